"""Weights of a checkpoint as whole tensors on the CPU, whichever strategy wrote it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.errors import CheckpointError, reason_of


def read_weights(path: str | Path, content: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Weights of a checkpoint; of a folder of shards those that are asked for are read, and put together.

    Args:
        path: A checkpoint's file (of one process, DDP or FSDP2), or the folder of a sharded one.
        content: What :func:`~lit_rlhf.checkpointing.read_content` found in it.
        prefix: Only weights whose name begins with this.

    Returns:
        By name without the prefix. Tensors of a file are read from the disk when they are used.

    Raises:
        CheckpointError: The shards cannot be read.
    """
    if Path(path).is_dir():
        return _read_shards(Path(path), prefix)
    return {
        name.removeprefix(prefix): value for name, value in content["state_dict"].items() if name.startswith(prefix)
    }


def _read_shards(folder: Path, prefix: str) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    start = f"state_dict.{prefix}"
    try:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(start) and isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is wanted here
            if state:
                dcp.load(state, checkpoint_id=folder, no_dist=True)
    except (dcp.CheckpointException, OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{folder}: its shards cannot be read ({reason_of(error)})") from error
    return {name.removeprefix(start): value for name, value in state.items()}
