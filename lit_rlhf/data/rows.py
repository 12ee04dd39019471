"""Rows from files, Hugging Face datasets and Python iterables, with the place of each row for messages.

Values keep their types: 18 in a JSON file stays an ``int``, ``"18"`` a ``str`` and a date the text it was written as.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rlhf.errors import DataError

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Rows:
    """Rows of one source, in its order.

    Attributes:
        rows: One dict per row, column name to plain Python value. A row need not have every column.
        columns: Every column name that occurs, in order of appearance.
        name: The path as it was given, or what kind of source it was (``"iterable"``, ``"dataset"``).
        lines: For text files with one row per line, the line number of each row, counted from 1.
    """

    rows: list[dict[str, Any]]
    columns: list[str]
    name: str
    lines: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of row ``index`` (counted from 0) in words, counted from 1: ``train.jsonl, line 7``."""
        if self.lines is not None:
            return f"{self.name}, line {self.lines[index]}"
        return f"{self.name}, row {index + 1}"


def read_rows(source: Any, split: str | None = None) -> Rows:
    """Read every row of a source into memory.

    Args:
        source: One of

            * a path to a ``.jsonl``, ``.jsonl.gz``, ``.json`` (a list of objects, or an object with such a list under
              ``"data"``), ``.csv`` (every value is text) or ``.parquet`` file;
            * a folder written by ``save_to_disk`` of Hugging Face ``datasets``;
            * a ``datasets.Dataset`` or ``DatasetDict``;
            * an iterable of mappings, or of strings, which become ``{"prompt": string}``.
        split: Which split of a source that has several.

    Returns:
        The rows, as plain Python values: arrays become lists, numpy numbers Python ones.

    Raises:
        DataError: The source does not exist, is empty, is of an unknown kind, holds a row that is not an object, or has
            several splits and ``split`` names none of them.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            return _from_dataset(_load_from_disk(path), str(source), split)
        if split is not None:
            raise DataError(f"{source}: a file has no splits, but split={split!r} was asked for")
        return _from_file(path, str(source))
    if _is_hugging_face(source):
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
    return _collect(((None, {"prompt": row} if isinstance(row, str) else row) for row in source), "iterable")


def _from_file(path: Path, name: str) -> Rows:
    if not path.is_file():
        raise DataError(_not_found(path, name))
    kind = path.name.lower()
    try:
        if kind.endswith(".jsonl.gz"):
            with gzip.open(path, "rt", encoding="utf-8-sig") as stream:
                return _collect(_json_lines(stream, name), name)
        if kind.endswith(".jsonl"):
            with path.open(encoding="utf-8-sig") as stream:
                return _collect(_json_lines(stream, name), name)
        if kind.endswith(".json"):
            return _collect(((None, row) for row in _json_list(path, name)), name)
        if kind.endswith(".csv"):
            with path.open(encoding="utf-8-sig", newline="") as stream:
                return _collect(_csv_rows(stream, name), name)
        if kind.endswith(".parquet"):
            return _collect(((None, row) for row in _parquet_rows(path, name)), name)
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: the text is not UTF-8 (byte {error.start}: {error.reason})") from error
    except (EOFError, OSError) as error:
        raise DataError(f"{name}: cannot be read ({error})") from error
    raise DataError(f"{name}: unknown kind of file. Allowed endings: {', '.join(_ENDINGS)}")


def _json_lines(stream: Iterable[str], name: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{name}, line {number}: not JSON ({error.msg} at column {error.colno})") from error


def _json_list(path: Path, name: str) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return []
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one object per line belongs in a .jsonl file" if error.msg == "Extra data" else ""
        raise DataError(f"{name}, line {error.lineno}: not JSON ({error.msg} at column {error.colno}){hint}") from error
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(f'{name}: a list of objects is wanted (or an object with such a list under "data")')
    return content


def _csv_rows(stream: Iterable[str], name: str) -> Iterator[tuple[None, dict[str, Any]]]:
    for number, row in enumerate(csv.DictReader(stream), start=1):
        if None in row:
            raise DataError(f"{name}, row {number}: more values than the header has columns")
        yield None, row


def _parquet_rows(path: Path, name: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{name}: cannot be read as parquet ({str(error).splitlines()[0]})") from error


def _is_hugging_face(source: Any) -> bool:
    if "datasets" not in sys.modules:  # nobody can hold one without having imported it
        return False
    import datasets

    return isinstance(source, (datasets.Dataset, datasets.DatasetDict))


def _load_from_disk(path: Path) -> Any:
    if not any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        found = sorted(entry.name for entry in path.iterdir())
        listing = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
        raise DataError(
            f"{path}: a folder is read only if save_to_disk of Hugging Face datasets wrote it; here is {listing}. "
            f"Name a file instead (allowed endings: {', '.join(_ENDINGS)})"
        )
    import datasets

    return datasets.load_from_disk(str(path))


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
    return _collect(((None, row) for row in dataset.with_format(None)), name)


def _collect(items: Iterable[tuple[int | None, Any]], name: str) -> Rows:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    columns: dict[str, None] = {}
    for line, row in items:
        place = f"row {len(rows) + 1}" if line is None else f"line {line}"
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, {place}: an object with named columns is wanted, not {_kind(row)}")
        rows.append({str(key): _plain(value) for key, value in row.items()})
        columns.update(dict.fromkeys(rows[-1]))
        if line is not None:
            lines.append(line)
    if not rows:
        raise DataError(f"{name}: is empty, there is not one row in it")
    return Rows(rows, list(columns), name, tuple(lines) if lines else None)


def _plain(value: Any) -> Any:
    """Lists and Python numbers where numpy left arrays and scalars; everything else as it is."""
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
    near = sorted(entry.name for entry in folder.iterdir() if entry.name.lower().endswith(_ENDINGS))
    listing = f"the folder has {', '.join(near[:8])}" + (", ..." if len(near) > 8 else "") if near else "none is there"
    return f"{name}: no such file. Looked in {folder.resolve()} for {', '.join(_ENDINGS)}: {listing}"
