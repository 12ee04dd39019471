"""Folders of data files: those of Hugging Face ``datasets``, and shards as they are published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_rlhf.data.files import ENDINGS, ending
from lit_rlhf.errors import DataError

# What save_to_disk and load_dataset leave beside the data.
_ABOUT = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
_SPLITS = ("train", "validation", "valid", "val", "dev", "test")


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of Hugging Face ``datasets`` wrote the folder.

    Args:
        folder: An existing folder.
    """
    return any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json"))


def load_saved_dataset(folder: Path, name: str) -> Any:
    """The ``Dataset`` or ``DatasetDict`` in a folder.

    Args:
        folder: See :func:`is_saved_dataset`.
        name: Stands for it in messages.

    Raises:
        DataError: ``datasets`` cannot read it.
    """
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises whatever its first damaged file leads to
        raise DataError(f"{name}: datasets.load_from_disk fails ({type(error).__name__}: {error})") from error


def data_files(folder: Path, name: str, split: str | None) -> list[Path]:
    """Data files of one split in a folder and the folders below, in the order of their names.

    A file belongs to a split whose name stands in its path as a word of its own: ``train-00000-of-00002.parquet``,
    ``gsm8k-train.arrow``, ``train/algebra/1.json``.

    Args:
        folder: An existing folder.
        name: Stands for it in messages.
        split: Which split; ``None`` takes all files where there is only one split, or none.

    Raises:
        DataError: There is no data file, several kinds of them, no such split, or several and none was named.
    """
    found = sorted(path for path in folder.rglob("*") if _is_data(path.relative_to(folder)) and path.is_file())
    if not found:
        entries = sorted(entry.name for entry in folder.iterdir())
        raise DataError(
            f"{name}: the folder has no data file ({', '.join(ENDINGS)}); here is {listing(entries) or 'nothing'}"
        )
    kinds = sorted({str(ending(path)) for path in found})
    if len(kinds) > 1:
        raise DataError(f"{name}: the folder has files of several kinds ({', '.join(kinds)}); name one file")
    relative = {path: str(path.relative_to(folder))[: -len(kinds[0])] for path in found}
    splits = [word for word in _SPLITS if any(_has_word(place, word) for place in relative.values())]
    if split is not None:
        of_split = [path for path in found if _has_word(relative[path], split)]
        if not of_split:
            there = f"it has {', '.join(splits)}" if splits else f"there is {listing([p.name for p in found])}"
            raise DataError(f"{name}: no file belongs to split={split!r}; {there} (option `split`)")
        return of_split
    if len(splits) > 1:
        raise DataError(f"{name}: has the splits {', '.join(splits)}; none was named (option `split`)")
    return found


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.name not in _ABOUT and ending(path) is not None


def _has_word(place: str, word: str) -> bool:
    return re.search(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", place, re.IGNORECASE) is not None


def listing(names: Sequence[str]) -> str:
    """The first names of a long list.

    Args:
        names: Of files or folders.
    """
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
