"""Where a run writes, and where an earlier one has written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf.errors import CheckpointError, OutputError

# Written where something had gone wrong: nothing to go on from unasked.
_NOT_LAST = ("diverged",)


def output_folders(trainer: L.Trainer) -> list[Path]:
    """Local folders that a run writes to.

    Args:
        trainer: With its loggers and callbacks.
    """
    places: list[Any] = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
    places += [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [Path(place) for place in dict.fromkeys(map(str, filter(None, places))) if "://" not in place]


def check_folders(folders: Iterable[Path]) -> None:
    """Refuse a folder that cannot be written to, before anything is computed that could not be kept.

    Args:
        folders: Created if missing.

    Raises:
        OutputError: Naming the folder.
    """
    for folder in folders:
        probe = folder / f".writable-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(f"the output folder {folder} cannot be written to: {error.strerror or error}") from error


def check_room(folders: Iterable[Path], size: int) -> None:
    """Refuse to start where not even one checkpoint would fit on the disk.

    Args:
        folders: Existing ones.
        size: Of a checkpoint, in bytes.

    Raises:
        OutputError: Naming the folder, what it needs and what is free.
    """
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OutputError(
                f"{folder}: a checkpoint of this run takes about {size / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are "
                "free; make room, name another default_root_dir, or set enable_checkpointing: false"
            )


def find_last(trainer: L.Trainer) -> Path:
    """The newest checkpoint of any earlier run with the same output folders.

    Lightning's own ``last`` looks into the folder of the run that is about to start, where there is none yet, and then
    trains from the beginning.

    Args:
        trainer: With its loggers and callbacks.

    Raises:
        CheckpointError: There is none, saying where it was looked for.
    """
    places: list[Any] = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    places += [getattr(logger, "root_dir", logger.save_dir) for logger in trainer.loggers]
    places += [Path(trainer.default_root_dir, name) for name in ("lightning_logs", "checkpoints")]
    folders = [Path(place) for place in dict.fromkeys(str(place) for place in places if place)]
    patterns = ("*.ckpt", "checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
    found = {file for folder in folders for pattern in patterns for file in folder.glob(pattern)}
    usable = [file for file in found if not file.stem.startswith(_NOT_LAST) and file.exists()]
    if not usable:
        raise CheckpointError(
            f"ckpt_path: last finds no checkpoint in {', '.join(map(str, folders))}; leave it out to start a new run"
        )
    return max(usable, key=lambda file: (file.stat().st_mtime_ns, file.stem.startswith("last")))
