"""Write the completions of ``predict`` to a jsonl file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info


class CompletionWriter(BasePredictionWriter):
    """One line per completion, written as each batch is done: what was sampled before a failure is on disk.

    Acts in ``write_on_batch_end``. Every rank writes a file of its own; with one rank it is ``completions.jsonl``.

    Args:
        path: Of the file; ``completions.jsonl`` in the run's log folder by default.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.written_to: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start an empty file."""
        if stage != "predict":
            return
        path = Path(self.path or Path(trainer.log_dir or trainer.default_root_dir) / "completions.jsonl")
        if trainer.world_size > 1:
            path = path.with_name(f"{path.stem}-rank{trainer.global_rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self.written_to = path

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the batch's completions."""
        assert self.written_to is not None
        with self.written_to.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in prediction)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say where they are."""
        if self.written_to is not None:
            rank_zero_info(f"completions written to {self.written_to}")
