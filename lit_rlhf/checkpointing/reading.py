"""What a checkpoint says about itself, without its weights."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from lit_rlhf.errors import CheckpointError, reason_of

FORMAT = 1
"""Number of the layout of what :class:`~lit_rlhf.callbacks.ResumeGuard` saves."""

STATE_KEY = "ResumeGuard"
"""Its place among the states of the callbacks."""

_META = "meta.pt"


def read_summary(path: str | Path) -> dict[str, Any]:
    """What :class:`~lit_rlhf.callbacks.ResumeGuard` wrote into a checkpoint; the tensors stay on the disk.

    Args:
        path: A checkpoint's file, or the folder of a sharded one.

    Returns:
        ``{"resumable": bool}``, whether it holds more than weights, and the guard's state, if one was there.

    Raises:
        CheckpointError: There is none, it is damaged, or something else wrote it.
    """
    return summary_of(read_content(path))


def summary_of(content: dict[str, Any]) -> dict[str, Any]:
    """The same of a checkpoint that was read already.

    Args:
        content: As :func:`read_content` gives it.
    """
    # Weights alone come without schedulers. (A folder's optimizer states are not among the content.)
    return {**content.get("callbacks", {}).get(STATE_KEY, {}), "resumable": "lr_schedulers" in content}


def read_content(path: str | Path) -> dict[str, Any]:
    """Everything in a checkpoint; the tensors of a file stay on the disk, those of a folder are not among it.

    Args:
        path: A checkpoint's file, or the folder of a sharded one.

    Raises:
        CheckpointError: There is none, it is damaged, or something else wrote it.
    """
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"{path}: there is no such checkpoint")
    file = place / _META if place.is_dir() else place
    if not file.exists():
        raise CheckpointError(f"{path}: a folder without {_META} is no checkpoint; name the .ckpt file in it")
    if file.stat().st_size == 0:
        raise CheckpointError(f"{path}: the file is empty, it was never written to its end; take an earlier checkpoint")
    _refuse_damage(file)
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever the first byte that is wrong leads to
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({reason_of(error)})") from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        keys = ", ".join(map(str, list(content)[:4])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: Lightning did not write this checkpoint (it holds {keys}); weights alone go into `policy`"
        )
    saved: dict[str, Any] = content.get("callbacks", {}).get(STATE_KEY, {})
    if saved.get("format", FORMAT) > FORMAT:
        raise CheckpointError(
            f"{path}: written by a newer lit_rlhf (format {saved['format']}, this one reads {FORMAT}); upgrade"
        )
    return content


def _refuse_damage(file: Path) -> None:
    """A file that was cut off lacks the directory at its end, without which nothing in it can be found."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"{file}: the file is cut off ({file.stat().st_size:,} bytes); take an earlier checkpoint"
        )
    if not start.startswith(b"PK"):
        raise CheckpointError(f"{file}: this is no checkpoint of PyTorch's")
