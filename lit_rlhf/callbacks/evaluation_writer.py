"""Write what each held-out prompt got, at each evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_rlhf.checkpointing import atomic_file
from lit_rlhf.rewards.protocol import selected

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.rollout.evaluation import Evaluated, Judged

_Line = tuple[int, str]  # place of the prompt in its source, and its record as JSON


class EvaluationWriter(L.Callback):
    """One file per evaluation and data set, with one line per prompt in the order of their source.

    ``evaluation/val-00000080.jsonl`` in the log folder holds the validation after 80 optimizer steps;
    ``val-00000080-sums.jsonl`` that of the data set ``sums``; ``test-...`` those of ``lit-rlhf test``. A line has
    ``prompt_index``, ``prompt``, ``columns`` (those that the verifier reads), ``greedy`` and ``samples``: each
    completion with ``completion``, ``correct``, ``reward`` (of training; ``null`` where all functions abstained),
    ``verifier`` (its score; ``null`` where it abstained), ``answer`` where there is a majority vote, ``tokens`` and
    ``finish``. Acts in ``on_validation_batch_end``, ``on_test_batch_end`` and at the end of both, and changes nothing.
    All ranks send their prompts to the first, which writes the file whole or not at all.

    Args:
        folder: Of the files; ``evaluation`` in the log folder by default, and then no files without a logger.
        enabled: Whether there are files; every module for rollouts adds this callback where the Trainer has none.
    """

    def __init__(self, folder: str | None = None, enabled: bool = True) -> None:
        self.folder = folder
        self.enabled = enabled
        self._folder: Path | None = None
        self._lines: dict[str, list[_Line]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the folder while all ranks are together: the log folder is broadcast."""
        log_dir = trainer.log_dir if trainer.loggers else None
        folder = self.folder or (Path(log_dir) / "evaluation" if log_dir else None)
        on = self.enabled and folder is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = Path(folder) if on and folder is not None else None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin anew, also after an evaluation that did not come to its end."""
        self._lines = {}

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same."""
        self._lines = {}

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Keep the batch's lines."""
        from lit_rlhf.rollout.evaluation import Evaluated, judge_of  # which needs callbacks itself

        if self._folder is not None and isinstance(outputs, Evaluated):
            judge = judge_of(trainer.datamodule)  # type: ignore[attr-defined]
            self._lines.setdefault(outputs.batch.set_name, []).extend(evaluation_lines(outputs, judge))

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """The same."""
        self.on_validation_batch_end(trainer, pl_module, outputs, batch)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the files."""
        self._write(trainer, pl_module, "val")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same."""
        self._write(trainer, pl_module, "test")

    def _write(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        mine, self._lines = self._lines, {}
        if self._folder is None:
            return
        lines = _gathered(mine, trainer)
        if not trainer.is_global_zero:
            return
        for name in sorted(lines):
            path = self._folder / f"{stage}-{module.evaluated_step:08}{f'-{name}' if name else ''}.jsonl"
            with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for _, line in sorted(lines[name]))
            if trainer.state.fn != "fit":
                rank_zero_info(f"results of each prompt written to {path}")


def _gathered(mine: dict[str, list[_Line]], trainer: L.Trainer) -> dict[str, list[_Line]]:
    """Lines of all ranks by data set on the first rank, nothing on the others. A collective."""
    if trainer.world_size == 1:
        return mine
    parts: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(mine, parts, dst=0)
    joined: dict[str, list[_Line]] = {}
    for part in parts or []:
        for name, lines in part.items():
            joined.setdefault(name, []).extend(lines)
    return joined


def evaluation_lines(evaluated: Evaluated, judge: Callable[..., Any]) -> list[_Line]:
    """The record of each prompt as JSON, with the place of the prompt in its source.

    Args:
        evaluated: ``M`` prompts.
        judge: Says which columns the reference answer is in.
    """
    greedy = _completions(evaluated.greedy)
    sampled = None if evaluated.sampled is None else _completions(evaluated.sampled)
    lines = []
    for place, prompt in enumerate(evaluated.batch.prompts):
        record = {
            **({"set": evaluated.batch.set_name} if evaluated.batch.set_name else {}),
            "prompt_index": prompt.index,
            "prompt": prompt.text,
            "columns": _columns_read(judge, prompt),
            "greedy": greedy[place][0],
            "samples": [] if sampled is None else sampled[place],
        }
        lines.append((prompt.index, json.dumps(record, ensure_ascii=False, default=str)))
    return lines


def _completions(judged: Judged) -> list[list[dict[str, Any]]]:
    """The record of each completion of each prompt."""
    rollout, (prompts, n) = judged.rollout, judged.correct.shape
    answers: Iterable[Any] = [{}] * (prompts * n)
    if judged.answers is not None:
        answers = ({"answer": answer} for row in judged.answers for answer in row)
    columns = zip(
        rollout.completions,
        judged.correct.flatten().tolist(),
        rollout.rewards.tolist(),
        rollout.scored_mask.tolist(),
        judged.scores.flatten().tolist(),
        answers,
        rollout.completion_lengths.tolist(),
        rollout.finished.tolist(),
        strict=True,
    )
    records = [
        {
            "completion": text,
            "correct": correct,
            "reward": reward if scored else None,
            "verifier": None if math.isnan(score) else score,
            **answer,
            "tokens": tokens,
            "finish": "stop" if finished else "length",
        }
        for text, correct, reward, scored, score, answer, tokens, finished in columns
    ]
    return [records[place * n : (place + 1) * n] for place in range(prompts)]


def _columns_read(judge: Callable[..., Any], prompt: Prompt) -> dict[str, Any]:
    """The columns that the judge names; all where it names none and takes any."""
    names = {name.split(".")[0] for name in getattr(judge, "required_columns", ())} or selected(judge, prompt.columns)
    return {name: value for name, value in prompt.columns.items() if name in names}
