"""Completions of the same prompt side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rlhf.report.comparison import Comparison
from lit_rlhf.report.formats import counted, number
from lit_rlhf.report.runs import EvaluationFile, Run, read_json_lines

SHOWN = 8
LONGEST = 1200  # characters of a text


@dataclass(frozen=True)
class Sample:
    """A completion.

    Args:
        text: Of it.
        is_right: What the verifier says; ``None`` where it was not asked.
        note: Reward or score, length and how it ended.
    """

    text: str
    is_right: bool | None
    note: str


@dataclass(frozen=True)
class SampleRow:
    """A prompt with a completion per column.

    Args:
        prompt: Its text.
        expected: What the verifier compares with, where it is known.
        samples: One per column.
    """

    prompt: str
    expected: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class SampleTable:
    """Prompts by columns.

    Args:
        columns: Titles.
        rows: Prompts.
        source: Where they are from and how they were chosen.
        places: Of the arms that the columns are, for their colours; ``None`` for a column that is no arm's.
    """

    columns: tuple[str, ...]
    rows: tuple[SampleRow, ...]
    source: str
    places: tuple[int | None, ...]


Found = dict[Any, tuple[str, str, Sample]]
"""By what identifies a prompt: its text, what is expected, and a completion."""


def sample_table(comparison: Comparison) -> SampleTable | None:
    """Completions of held-out prompts, where the runs wrote them, or else of the rollouts.

    Of a comparison the columns are arms; of a run they are its beginning and its end.

    Args:
        comparison: With its runs.
    """
    runs = [(place, arm.title, arm.counted[0].run) for place, arm in enumerate(comparison.arms) if arm.counted]
    present = [(place, title, run) for place, title, run in runs if run is not None]
    if not present:
        return None
    if comparison.is_single:
        run = present[0][2]
        return _evaluated_over_time(run) or _sampled_over_time(run)
    return _evaluated_by_arm(present) or _sampled_by_arm(present)


def _evaluated_by_arm(runs: Sequence[tuple[int, str, Run]]) -> SampleTable | None:
    columns = [(place, title, _last_evaluation(run)) for place, title, run in runs]
    found = [(place, title, _read_evaluation(file)) for place, title, file in columns if file is not None]
    how = "Greedy completions of held-out prompts at the last evaluation, of each arm's first seed"
    return _table(found, how, "those on which the arms disagree come first")


def _sampled_by_arm(runs: Sequence[tuple[int, str, Run]]) -> SampleTable | None:
    found = [(place, title, _read_rollouts(run, run.samples)) for place, title, run in runs if run.samples]
    how = "Completions from rollouts, of each arm's first seed, of prompts that all arms have logged"
    return _table(found, how, "the latest come first", _latest_first)


def _evaluated_over_time(run: Run) -> SampleTable | None:
    last = _last_evaluation(run)
    if last is None:
        return None
    same = [file for file in run.evaluations if (file.stage, file.dataset) == (last.stage, last.dataset)]
    files = [same[0], last] if same[0].step != last.step else [last]
    found = [(None, f"step {file.step:,}", _read_evaluation(file)) for file in files]
    return _table(found, "Greedy completions of held-out prompts", "those whose answer changed come first")


def _sampled_over_time(run: Run) -> SampleTable | None:
    if not run.samples:
        return None
    first, last = min(run.samples), max(run.samples)
    early, late = _read_rollouts(run, [first]), _read_rollouts(run, [last])
    if early.keys() & late.keys() and first != last:
        columns = [(None, f"iteration {first}", early), (None, f"iteration {last}", late)]
        return _table(columns, "Completions from rollouts", "prompts of both iterations")
    return _table([(None, f"iteration {last}", late)], "Completions from the last rollout that was logged", "")


def _table(
    columns: Sequence[tuple[int | None, str, Found]],
    source: str,
    choice: str,
    key: Callable[[Sequence[Sample]], Any] | None = None,
) -> SampleTable | None:
    if not columns:
        return None
    common = [place for place in columns[0][2] if all(place in found for _, _, found in columns)]
    rows = [(*columns[0][2][place][:2], [found[place][2] for _, _, found in columns]) for place in common]
    rows.sort(key=lambda row: (key or _disagreement_first)(row[2]))
    if not rows:
        return None
    shown = tuple(SampleRow(_cut(prompt), _cut(expected), tuple(samples)) for prompt, expected, samples in rows[:SHOWN])
    said = f"{source}: {len(shown)} of {len(rows)} prompts{f', {choice}' if choice else ''}."
    return SampleTable(tuple(title for _, title, _ in columns), shown, said, tuple(place for place, _, _ in columns))


def _disagreement_first(samples: Sequence[Sample]) -> bool:
    return len({sample.is_right for sample in samples}) < 2


def _latest_first(samples: Sequence[Sample]) -> int:
    return -min(int(sample.note.rpartition(" ")[2]) for sample in samples)


def _last_evaluation(run: Run) -> EvaluationFile | None:
    """Of the validation if there is one, else of the test."""
    files = sorted(run.evaluations, key=lambda file: (file.stage.startswith("val"), file.step), reverse=True)
    newest = [file for file in files if (file.stage, file.step) == (files[0].stage, files[0].step)]
    return min(newest, key=lambda file: file.dataset, default=None)


def _read_evaluation(file: EvaluationFile) -> Found:
    found: Found = {}
    for record in read_json_lines(file.file):
        greedy, prompt, columns = record.get("greedy"), _text(record.get("prompt")), record.get("columns")
        if isinstance(greedy, Mapping):
            right = greedy.get("correct")
            sample = Sample(_cut(str(greedy.get("completion"))), None if right is None else bool(right), _note(greedy))
            expected = ", ".join(map(str, columns.values())) if isinstance(columns, Mapping) else ""
            found.setdefault((record.get("prompt_index"), prompt), (prompt, expected, sample))
    return found


def _read_rollouts(run: Run, iterations: Iterable[int]) -> Found:
    """The first completion of each prompt, the latest where there are several iterations."""
    found: Found = {}
    for iteration in sorted(iterations):
        fresh: Found = {}
        for file in run.samples[iteration]:
            for record in read_json_lines(file):
                prompt = _text(record.get("prompt"))
                sample = Sample(_cut(str(record.get("completion"))), None, f"{_note(record)}, iteration {iteration}")
                fresh.setdefault(prompt, (prompt, "", sample))
        found.update(fresh)
    return found


def _note(record: Mapping[str, Any]) -> str:
    reward, score = record.get("reward"), record.get("verifier")
    parts = [f"reward {number(reward)}" if isinstance(reward, int | float) else "no reward"]
    if isinstance(score, int | float) and score != reward:
        parts.append(f"verifier {number(score)}")
    if "tokens" in record:
        parts.append(counted(int(record["tokens"]), "token"))
    return ", ".join([*parts, *(["cut"] if record.get("finish") == "length" else [])])


def _text(prompt: Any) -> str:
    """A chat's last message, or the text."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        return str(prompt[-1].get("content", ""))
    return str(prompt)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"
