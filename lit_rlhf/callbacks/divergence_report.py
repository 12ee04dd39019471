"""The completions of an optimizer step that was skipped."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from lit_rlhf.errors import check_number
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.evidence import write_evidence

_log = logging.getLogger(__name__)


class DivergenceReport(L.Callback):
    """Write the rows of optimizer steps whose gradient was not finite to ``diverged/`` in the log folder.

    Acts in ``on_train_batch_start`` and ``on_train_batch_end`` and changes nothing. A line is a completion with its
    prompt and the names of its numbers that are not finite; those come first. If all lines say that every number is
    finite, the gradient itself overflowed. Each rank writes its own rows.

    Args:
        most_files: After this many steps nothing is written any more.
    """

    def __init__(self, most_files: int = 10) -> None:
        check_number("DivergenceReport: most_files", most_files, minimum=0)
        self.most_files = most_files
        self.written = 0
        self._step: int | None = None
        self._rows: list[RolloutBatch] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the step's micro-batches, which are in memory anyway."""
        if batch.step != self._step:
            self._step, self._rows = batch.step, []
        self._rows.append(batch.rows)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write them if the step was skipped."""
        if not batch.last_of_step:
            return
        skipped = any(not bool(norm.isfinite()) for norm in pl_module.grad_norms.values())
        if skipped and self.written < self.most_files:
            self.written += 1
            iteration = trainer.datamodule.iteration - 1  # type: ignore[attr-defined]
            rows = [part for part in self._rows if bool(part.completion_mask.any())]
            for number, part in enumerate(rows):
                name = f"iteration-{iteration:05}-step-{batch.step}" + (f"-part-{number}" if len(rows) > 1 else "")
                path = write_evidence(part, trainer, name)
            if rows:
                _log.warning("an optimizer step was skipped, its gradient is not finite; its rows are in %s", path)
        self._step, self._rows = None, []
