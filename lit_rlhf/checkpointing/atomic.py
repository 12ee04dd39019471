"""Files and folders that appear whole or not at all: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lit_rlhf.errors import OutputError

_MARK = ".partial-"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a crash, a kill or a full disk leaves the previous file as it was.

    Lightning's own way collects the checkpoint in memory, writes it to the system's temporary folder and moves it from
    there, which is a copy where that is another disk.

    Args:
        check: Called with the path of a checkpoint before it is loaded, to refuse it.
    """

    def __init__(self, check: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self.check = check

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; a remote path (``s3://...``) goes Lightning's way.

        Args:
            checkpoint: What ``torch.save`` takes.
            path: Of the file.
            storage_options: Not used.

        Raises:
            OutputError: It cannot be written.
        """
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        with atomic_file(path) as temporary:
            torch.save(checkpoint, temporary)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Check, then load.

        Args:
            path: Of the checkpoint.
            args: As Lightning's.
            options: As Lightning's.
        """
        if self.check is not None:
            self.check(str(path))
        return super().load_checkpoint(path, *args, **options)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside a file; it takes the file's place at the end of the block, if that ends without an error.

    Args:
        path: Of the file; its folder is created if missing.

    Raises:
        OutputError: It cannot be written; what stood there before is untouched.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, atomic_file(Path(folder) / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    """
    target = Path(path)
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        temporary = target.with_name(f"{target.name}{_MARK}{os.getpid()}")
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_json_lines(records: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write a file with a JSON object per line, whole or not at all.

    Args:
        records: One per line, in order.
        path: Of the file; its folder is created if missing.

    Raises:
        OutputError: It cannot be written; what stood there before is untouched.
    """
    with atomic_file(path) as temporary:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        temporary.write_text("".join(lines), encoding="utf-8", newline="\n")


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """The same for a folder. Where it is there already, its files are replaced one by one, others in it stay.

    Args:
        path: Of the folder.

    Raises:
        OutputError: It cannot be written.
    """
    target = Path(path)
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}{_MARK}{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            written = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
            for file in written:
                _sync(file)
            if not target.exists() or (target.is_dir() and not any(target.iterdir())):
                os.replace(temporary, target)
            else:
                for file in written:
                    place = target / file.relative_to(temporary)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, place)
            _sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what a killed process left of the same file."""
    for leftover in target.parent.glob(f"{glob.escape(target.name)}{_MARK}*"):
        owner = leftover.name.rpartition(_MARK)[2]
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            with contextlib.suppress(OSError):
                leftover.unlink()


def _sync(path: Path) -> None:
    """To the disk itself: a rename may otherwise outrun the content when the machine goes down."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{target} cannot be written: {error.strerror or error}; {_kept(target)}") from error
    except RuntimeError as error:  # torch's writer, of a full disk
        if not any(word in str(error) for word in ("PytorchStreamWriter", "inline_container", "iostream")):
            raise
        free = shutil.disk_usage(target.parent).free / 2**30
        raise OutputError(
            f"{target} cannot be written ({free:.2f} GiB free): {str(error).splitlines()[0]}; {_kept(target)}"
        ) from error


def _kept(target: Path) -> str:
    return "the one from before is whole" if target.exists() else "nothing was there before"
