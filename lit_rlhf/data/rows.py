"""Rows from files, Hugging Face datasets and Python iterables, with the place of each row for messages.

Values keep their types: 18 in a JSON file stays an ``int``, ``"18"`` a ``str`` and a date the text it was written as.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rlhf.data.files import ENDINGS, ending, read_file
from lit_rlhf.data.folders import data_files, is_saved_dataset, listing, load_saved_dataset
from lit_rlhf.data.source import PromptSource
from lit_rlhf.errors import DataError

_PLAIN_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Part:
    """The rows of one file among those of a source.

    Attributes:
        name: Of the file, or of the source itself.
        start: Place of its first row in the source.
        lines: For text files with one row per line, the line number of each row, counted from 1.
    """

    name: str
    start: int
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Rows of one source, in its order.

    Attributes:
        rows: One dict per row, column name to plain Python value. A row need not have every column.
        columns: Every column name that occurs, in order of appearance.
        name: The path as it was given, or what kind of source it was (``"iterable"``, ``"dataset"``).
        parts: The files that the rows are from, at least one.
    """

    rows: list[dict[str, Any]]
    columns: list[str]
    name: str
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of row ``index`` (counted from 0) in words, counted from 1: ``train.jsonl, line 7``."""
        part = self.parts[bisect_right(self.parts, index, key=lambda part: part.start) - 1]
        number = index - part.start
        return f"{part.name}, line {part.lines[number]}" if part.lines else f"{part.name}, row {number + 1}"


def read_rows(source: Any, split: str | None = None) -> Rows:
    """Read every row of a source into memory.

    Args:
        source: One of

            * a path to a ``.jsonl``, ``.jsonl.gz``, ``.json`` (a list of objects, or an object with such a list under
              ``"data"``), ``.csv`` (every value is text), ``.parquet`` or ``.arrow`` file;
            * a folder written by ``save_to_disk`` of Hugging Face ``datasets``;
            * a folder with such files, all of one kind; a ``.json`` file in it may be a single row;
            * a ``datasets.Dataset`` or ``DatasetDict``;
            * an iterable of mappings, or of strings, which become ``{"prompt": string}``;
            * a :class:`~lit_rlhf.data.source.PromptSource`, whose values go through as they are.
        split: Which split of a source that has several.

    Returns:
        The rows, as plain Python values: arrays become lists, numpy numbers Python ones.

    Raises:
        DataError: The source does not exist, is empty, is of an unknown kind, holds a row that is not an object, or has
            several splits and ``split`` names none of them.
    """
    if isinstance(source, (str, Path)):
        return _from_path(Path(source), str(source), split)
    if isinstance(source, PromptSource) and split is None:
        return _collect([(source.name, ((None, row) for row in source))], plain=False)
    if is_hugging_face(source):
        return _from_dataset(source, "dataset", split)
    if split is not None:
        raise DataError(f"an iterable has no splits, but split={split!r} was asked for")
    if isinstance(source, Mapping) or hasattr(source, "iterrows"):
        raise DataError(
            f"rows are wanted, but a {type(source).__name__} iterates over its columns: "
            'pass a list of mappings (for a data frame: frame.to_dict("records"))'
        )
    if not isinstance(source, Iterable):
        raise DataError(
            f"cannot read rows from a {type(source).__name__}: pass a path, a dataset or a list of mappings"
        )
    rows = ((None, {"prompt": row} if isinstance(row, str) else row) for row in source)
    return _collect([("iterable", rows)])


def _from_path(path: Path, name: str, split: str | None) -> Rows:
    if path.is_dir():
        if is_saved_dataset(path):
            return _from_dataset(load_saved_dataset(path, name), name, split)
        files = {str(Path(name) / file.relative_to(path)): file for file in data_files(path, name, split)}
        parts = [(place, read_file(file, place, single=True)) for place, file in files.items()]
        return _collect(parts, f"{name} [{split}]" if split is not None else name)
    if not path.is_file():
        raise DataError(_not_found(path, name))
    if split is not None:
        raise DataError(f"{name}: a file has no splits, but split={split!r} was asked for")
    return _collect([(name, read_file(path, name))])


def is_hugging_face(source: Any) -> bool:
    """Whether a source is a dataset, or a mapping of splits, of Hugging Face ``datasets``.

    Args:
        source: Anything.
    """
    if "datasets" not in sys.modules:  # nobody can hold one without having imported it
        return False
    import datasets

    return isinstance(source, (datasets.Dataset, datasets.DatasetDict))


def _from_dataset(dataset: Any, name: str, split: str | None) -> Rows:
    if isinstance(dataset, dict):
        if split is None and len(dataset) == 1:
            (split,) = dataset
        if split not in dataset:
            given = "none was named" if split is None else f"split={split!r} is not one of them"
            raise DataError(f"{name}: has the splits {', '.join(dataset)}; {given} (option `split`)")
        name, dataset = f"{name} [{split}]", dataset[split]
    elif split is not None and str(dataset.split) != split:
        raise DataError(f"{name}: has no split {split!r}, it is a single dataset (option `split`)")
    return _collect([(name, ((None, row) for row in dataset.with_format(None)))])


def _collect(
    sources: Iterable[tuple[str, Iterable[tuple[int | None, Any]]]], name: str | None = None, plain: bool = True
) -> Rows:
    """All rows of some files; ``name`` stands for them together, by default that of the only one."""
    rows: list[dict[str, Any]] = []
    parts: list[Part] = []
    columns: dict[str, None] = {}
    for part_name, items in sources:
        start, lines = len(rows), []
        for line, row in items:
            if not isinstance(row, Mapping):
                place = f"row {len(rows) - start + 1}" if line is None else f"line {line}"
                raise DataError(f"{part_name}, {place}: an object with named columns is wanted, not {_kind(row)}")
            rows.append({str(key): _plain(value) if plain else value for key, value in row.items()})
            columns.update(dict.fromkeys(rows[-1]))
            if line is not None:
                lines.append(line)
        if len(rows) > start:  # an empty file among others has no part
            parts.append(Part(part_name, start, tuple(lines)))
        name = part_name if name is None else name
    if not rows or name is None:
        raise DataError(f"{name}: is empty, there is not one row in it")
    return Rows(rows, list(columns), name, tuple(parts))


def _plain(value: Any) -> Any:
    """Lists and Python numbers where numpy left arrays and scalars; everything else as it is."""
    if type(value) in _PLAIN_TYPES:
        return value
    if type(value).__module__ == "numpy":  # numpy itself need not be imported
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", type(None): "null", bool: "a boolean"}
    return names.get(type(value), f"a {type(value).__name__}")


def _not_found(path: Path, name: str) -> str:
    folder = path.parent
    if not folder.is_dir():
        return (
            f"{name}: no such file or folder (there is no folder {folder} in {Path.cwd()} either). "
            "A dataset of the Hugging Face hub is loaded with datasets.load_dataset, then passed on or saved to disk"
        )
    near = sorted(entry.name for entry in folder.iterdir() if ending(entry) is not None)
    found = f"the folder has {listing(near)}" if near else "none is there"
    return f"{name}: no such file. Looked in {folder.resolve()} for {', '.join(ENDINGS)}: {found}"
