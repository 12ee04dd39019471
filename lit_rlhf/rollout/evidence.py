"""Rows that numbers which are not finite came from, on the disk: what to look at after a run that diverged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from lit_rlhf.checkpointing import write_json_lines
from lit_rlhf.rollout.batch import RolloutBatch

FIELDS = (
    "rewards",
    "sampling_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "returns",
    "advantages",
)


def write_evidence(rollout: RolloutBatch, trainer: L.Trainer, name: str) -> Path:
    """Write rows as JSON lines, those with a number that is not finite first; each says which numbers those are.

    Args:
        rollout: ``N`` rows.
        trainer: Its log folder gets a folder ``diverged``.
        name: Of the file, without an ending; with several ranks theirs is added.

    Returns:
        The file.
    """
    root = next((logger.log_dir for logger in trainer.loggers if getattr(logger, "log_dir", None)), None)
    rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
    path = Path(root or trainer.default_root_dir) / "diverged" / f"{name}{rank}.jsonl"
    records = [_record(rollout, row) for row in range(len(rollout))]
    records.sort(key=lambda record: not record["not_finite"])
    write_json_lines(records, path)
    return path


def _record(rollout: RolloutBatch, row: int) -> dict[str, Any]:
    found = {name: getattr(rollout, name) for name in FIELDS}
    length = int(rollout.completion_lengths[row])
    return {
        "prompt_index": int(rollout.prompt_index[row]),
        "prompt": rollout.prompts[row],
        "completion": rollout.completions[row],
        "tokens": length,
        "not_finite": [name for name, value in found.items() if value is not None and not _finite(value[row])],
    }


def _finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())
