"""What may be said, in plain words: what the intervals support, and what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rlhf.report.comparison import Comparison
from lit_rlhf.report.finders import accuracy_series
from lit_rlhf.report.formats import bounds, counted, listed, number, signed
from lit_rlhf.report.overoptimization import find_overoptimization
from lit_rlhf.report.runs import Run
from lit_rlhf.report.summary import CONFIDENCE, Difference, Number

Kind = Literal["shown", "open", "warning", "note"]
_HEADLINES = (
    r"(val|test)/(accuracy|verifier|reward)",
    r"kl",
    r"tokens_to_target",
    r"memory/peak_gib|seconds_to_target|seconds",
)
_IN_PERCENT = ("tokens_to_target", "memory/peak_gib", "seconds_to_target", "seconds")
_TIMES = 2.0  # from which ratio on it is said instead of the percentage
_ORDER = ("warning", "", "note")  # what is shown and what is open stand in between, quantity by quantity
_BUDGET_SLACK = 1.0  # iterations


@dataclass(frozen=True)
class Statement:
    """A sentence of the verdict.

    Args:
        kind: ``shown`` is a difference that the runs show, ``open`` one that they cannot decide; ``warning`` is
            something that went wrong.
        text: Ends with a full stop.
        subject: What it is about, where that is a quantity.
        is_timing: It is about seconds or memory, and may read otherwise after another run with the same seeds.
    """

    kind: Kind
    text: str
    subject: str = ""
    is_timing: bool = False

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" if self.subject else self.text


def verdict(
    comparison: Comparison, numbers: Sequence[Number], differences: Sequence[Difference], target: float | None
) -> list[Statement]:
    """All that is to be said, the most important first.

    Args:
        comparison: With its runs.
        numbers: Of its arms.
        differences: Between them.
        target: Accuracy that the cost of reaching was looked for.
    """
    said = [*_unfinished(comparison), *_overoptimized(comparison)]
    if comparison.is_single:
        return [*said, *_progress(comparison), *_target(numbers, target, comparison), *_alarms(comparison)]
    said += _comparisons(list(_headlines(differences)))
    said += [*_target(numbers, target, comparison), *_budget(comparison), *_too_few(comparison)]
    return sorted(said, key=lambda statement: _ORDER.index(statement.kind) if statement.kind in _ORDER else 1)


def method_note(differences: Sequence[Difference], is_single: bool = False) -> str:
    """How the intervals were made and differences were judged.

    Args:
        differences: Those of the report.
        is_single: It is about one run.
    """
    if is_single:
        return "One run: an interval, where there is one, is over its held-out prompts and says nothing of other seeds."
    parts = [f"Intervals are {CONFIDENCE:.0%} intervals of the mean over seeds by Student's t."]
    if differences:
        methods = {difference.method for difference in differences}
        how = {"paired": "paired by seed", "Welch": "by Welch's t, as the seeds differ"}
        said = listed([how[method] for method in sorted(methods, reverse=True)])
        parts.append(f"A difference is claimed only if its interval ({said}) excludes 0.")
        if differences[0].confidence > CONFIDENCE:
            parts.append(
                f"As several pairs of arms are compared, each interval of a difference is one of "
                f"{differences[0].confidence:.1%}: together they hold with {CONFIDENCE:.0%} (Bonferroni)."
            )
        parts.append("Where there is no difference, about one quantity in twenty will nevertheless show one by chance.")
    return " ".join(parts)


def _headlines(differences: Sequence[Difference]) -> Iterator[Difference]:
    largest = max((d.quantity.key for d in differences if "/pass@" in d.quantity.key), key=_k_of, default=None)
    for pattern in (*_HEADLINES[:1], re.escape(largest or " "), *_HEADLINES[1:]):
        yield from (d for d in differences if re.fullmatch(pattern, d.quantity.key))


def _k_of(key: str) -> tuple[bool, int]:
    digits = key.rpartition("@")[2]
    return key.count("/") == 1, int(digits) if digits.isdigit() else 0


def _comparisons(differences: Sequence[Difference]) -> Iterator[Statement]:
    """What is shown, pair by pair, and in one statement the pairs of a quantity that the seeds cannot tell apart."""
    for key in dict.fromkeys(difference.quantity.key for difference in differences):
        of_quantity = [difference for difference in differences if difference.quantity.key == key]
        yield from (_shown(difference) for difference in of_quantity if difference.is_shown)
        for second in dict.fromkeys(difference.second for difference in of_quantity):
            undecided = [d for d in of_quantity if d.second is second and not d.is_shown]
            if undecided:
                yield _undecided(undecided)


def _shown(difference: Difference) -> Statement:
    quantity, interval = difference.quantity, difference.interval
    is_higher = interval.mean > 0
    ratio = 1 + interval.mean / difference.reference if difference.reference > 0 else 0.0
    word = "higher" if is_higher else "lower"
    if quantity.key in _IN_PERCENT and 0 < ratio < _TIMES:
        word = f"{abs(ratio - 1):.0%} {word}"
    elif quantity.key in _IN_PERCENT and ratio:
        word = f"{ratio:.2g} times as high"
    worth = ""
    if quantity.higher_is_better is not None:
        worth = " – better" if is_higher == quantity.higher_is_better else " – worse"
    word += " as" if word.endswith("high") else " than"
    first, second = difference.first.title, difference.second.title
    text = f"{first} is {word} {second} ({_values(difference)}){worth}."
    return Statement("shown", text, _capital(quantity.title), quantity.is_timing)


def _undecided(differences: Sequence[Difference]) -> Statement:
    """Differences to the same arm."""
    quantity, second = differences[0].quantity, differences[0].second.title
    sizes = {difference.interval.size for difference in differences}
    is_one_number = len(sizes) == 1 and all(difference.method == "paired" for difference in differences)
    seeds = counted(sizes.pop(), "seed") if is_one_number else "seeds"
    has_bounds = any(difference.interval.low is not None for difference in differences)
    if len(differences) == 1:
        first, values = differences[0].first.title, _values(differences[0])
        text = f"no difference between {first} and {second} that these {seeds} can show ({values})."
        if not has_bounds:
            text = f"too few seeds to tell {first} from {second} ({values})."
    else:
        arms = listed([f"{difference.first.title} ({_values(difference)})" for difference in differences])
        text = f"no difference to {second} that these {seeds} can show: {arms}."
        if not has_bounds:
            text = f"too few seeds to tell from {second}: {arms}."
    return Statement("open", text, _capital(quantity.title), quantity.is_timing)


def _values(difference: Difference) -> str:
    interval, unit = difference.interval, difference.quantity.unit
    values = f"{number(difference.reference + interval.mean)} against {number(difference.reference)}"
    span = bounds(interval)
    return f"{values}{f' {unit}' if unit else ''}; {signed(interval.mean)}{f', {span}' if span else ''}"


def _unfinished(comparison: Comparison) -> Iterator[Statement]:
    for arm in comparison.arms:
        for status, word in (("failed", ""), ("running", "still running"), ("pending", "not begun")):
            runs = [run for run in arm.runs if run.status == status]
            if runs and status == "failed":
                for run in runs:
                    reason = " ".join((run.error or "no reason was noted").split()).rstrip(".") + "."
                    yield Statement("warning", f"{arm.title}, seed {run.seed}, failed and is not counted: {reason}")
            elif runs:
                seeds = f"seed{'s' * (len(runs) > 1)} {listed([str(run.seed) for run in runs])}"
                yield Statement("note", f"{arm.title}, {seeds}: {word}.")
        for run in arm.runs:
            if run.status == "done" and run.run is None:
                yield Statement("warning", f"{arm.title}, seed {run.seed}, has no logs: {run.error}")
        if arm.is_unfinished:
            yield Statement(
                "note", f"{arm.title}: no run is done; its numbers are those so far, and nothing is claimed."
            )


def _overoptimized(comparison: Comparison) -> Iterator[Statement]:
    for arm in comparison.arms:
        found = [(run.seed, find_overoptimization(run.run)) for run in arm.counted if run.run is not None]
        gamed = [(seed, what) for seed, what in found if what is not None and not what.is_over]
        passed = [(seed, what) for seed, what in found if what is not None and what.is_over]
        who = "The run" if comparison.is_single else arm.title
        for seeds, kind in ((gamed, "warning"), (passed, "note")):
            if not seeds:
                continue
            first = seeds[0][1]
            assert first is not None
            share = "" if comparison.is_single else f" in {len(seeds)} of {counted(len(found), 'run')}"
            which = "" if comparison.is_single else f"seed {seeds[0][0]}, "
            seen = f"{which}iteration {first.iteration}: {first.finding}"
            if kind == "warning":
                text = f"{who} over-optimises{share}: the reward rises while the held-out metric falls ({seen})."
            else:
                text = f"{who} looked over-optimised for a while{share} and recovered ({seen})."
            yield Statement("warning" if kind == "warning" else "note", text)


def _progress(comparison: Comparison) -> Iterator[Statement]:
    run = comparison.arms[0].runs[0].run
    series = None if run is None else accuracy_series(run)
    if run is None or series is None:
        yield Statement("note", "There was no validation: nothing can be said of held-out prompts.")
        return
    if len(series.values) < 2:
        yield Statement("note", f"One validation so far: greedy accuracy {number(series.last)}.")
        return
    first, last = series.values[0], series.last
    text = f"Greedy accuracy on held-out prompts went from {number(first)} to {number(last)}"
    text += f" with {number(run.tokens_at(series.steps[-1]))} generated tokens"
    ends = [_bounds_at(run, place) for place in (0, -1)]
    if ends[0] is None or ends[1] is None:
        yield Statement("note", f"{text}. One run says nothing of other seeds.")
        return
    (low, high), (last_low, last_high) = ends[0], ends[1]
    spans = f"(intervals over prompts: {number(low)} to {number(high)}, {number(last_low)} to {number(last_high)})"
    if last_low > high or last_high < low:
        yield Statement("shown", f"{text} {spans}: more than the choice of prompts explains. Other seeds may differ.")
    else:
        yield Statement("open", f"{text} {spans}: these prompts cannot show that it changed.")


def _bounds_at(run: Run, place: int) -> tuple[float, float] | None:
    low, high = run.series.get("val/accuracy_low"), run.series.get("val/accuracy_high")
    return None if low is None or high is None else (low.values[place], high.values[place])


def _target(numbers: Sequence[Number], target: float | None, comparison: Comparison) -> Iterator[Statement]:
    if target is None:
        return
    by_arm = {number.arm.name: number for number in numbers if number.quantity.key == "tokens_to_target"}
    for arm in comparison.arms:
        count = sum(run.run is not None and accuracy_series(run.run) is not None for run in arm.counted)
        reached = len(by_arm[arm.name].values) if arm.name in by_arm else 0
        if reached < count:
            runs = "the run" if comparison.is_single else f"{reached} of {counted(count, 'run')} of {arm.title}"
            word = "did not reach" if comparison.is_single else "reached"
            yield Statement("note", f"{_capital(runs)} {word} accuracy {target:g}.")


def _alarms(comparison: Comparison) -> Iterator[Statement]:
    run = comparison.arms[0].runs[0].run
    warnings = [] if run is None else [alarm for alarm in run.alarms if alarm.level == "warning"]
    if warnings:
        names = listed(list(dict.fromkeys(alarm.rule for alarm in warnings)))
        yield Statement("warning", f"{counted(len(warnings), 'alarm')} rang: {names}.")


def _budget(comparison: Comparison) -> Iterator[Statement]:
    """Whether equal cost is what was compared."""
    if comparison.token_budget is None:
        return
    for arm in comparison.arms:
        for run in arm.counted:
            if run.run is not None and run.status == "done":
                over = (run.run.last("tokens/generated") or 0.0) - comparison.token_budget
                if abs(over) > _BUDGET_SLACK * _tokens_per_iteration(run.run):
                    text = f"{arm.title}, seed {run.seed}, generated {signed(over)} tokens beyond the budget"
                    yield Statement("warning", f"{text}: more than an iteration.")


def _tokens_per_iteration(run: Run) -> float:
    steps = run.iteration_steps
    return max((run.tokens_at(step) - run.tokens_at(step - 1) for step in steps), default=0.0)


def _too_few(comparison: Comparison) -> Iterator[Statement]:
    lonely = [arm.title for arm in comparison.arms if len(arm.counted) == 1]
    if lonely and len(comparison.arms) > 1:
        yield Statement("note", f"{listed(lonely)}: one seed, so there is no interval and nothing can be claimed.")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
