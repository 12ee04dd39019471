"""Rows of single files, as they stand: no value is guessed, converted or silently lost."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lit_rlhf.errors import DataError

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow")
"""Kinds of files that can be read."""

Numbered = Iterator[tuple[int | None, Any]]
"""Rows with their line numbers, counted from 1; ``None`` where a file has no lines."""


def ending(path: Path) -> str | None:
    """Which of :data:`ENDINGS` a file has, whatever its case; ``None`` for other files.

    Args:
        path: Of the file; it need not exist.
    """
    return next((end for end in sorted(ENDINGS, key=len, reverse=True) if path.name.lower().endswith(end)), None)


def read_file(path: Path, name: str, single: bool = False) -> Numbered:
    """Rows of a file, one after the other.

    Args:
        path: An existing file.
        name: Stands for it in messages.
        single: A ``.json`` file may hold one object, which is then one row.

    Raises:
        DataError: The file is of an unknown kind or not what its ending says. Names the line or row.
    """
    try:
        yield from _read(path, name, single)
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: the text is not UTF-8 (byte {error.start}: {error.reason})") from error
    except (EOFError, OSError) as error:
        raise DataError(f"{name}: cannot be read ({error})") from error


def _read(path: Path, name: str, single: bool) -> Numbered:
    kind = ending(path)
    if kind == ".jsonl.gz":
        with gzip.open(path, "rt", encoding="utf-8-sig") as stream:
            yield from _json_lines(stream, name)
    elif kind == ".jsonl":
        with path.open(encoding="utf-8-sig") as stream:
            yield from _json_lines(stream, name)
    elif kind == ".json":
        yield from ((None, row) for row in _json_list(path, name, single))
    elif kind == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield from ((None, row) for row in _csv_rows(stream, name))
    elif kind == ".parquet":
        yield from ((None, row) for row in _parquet_rows(path, name))
    elif kind == ".arrow":
        yield from ((None, row) for row in _arrow_rows(path, name))
    else:
        raise DataError(f"{name}: unknown kind of file. Allowed endings: {', '.join(ENDINGS)}")


def _json_lines(stream: Iterable[str], name: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield number, _parse(line, name, number)


def _json_list(path: Path, name: str, single: bool) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        return []
    content = _parse(text, name)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if isinstance(content, dict) and single:
        return [content]
    if not isinstance(content, list):
        raise DataError(f'{name}: a list of objects is wanted (or an object with such a list under "data")')
    return content


def _parse(text: str, name: str, line: int | None = None) -> Any:
    """JSON of a whole file, or of one of its lines."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        hint = "; one object per line belongs in a .jsonl file" if line is None and error.msg == "Extra data" else ""
        place = f"{name}, line {line or error.lineno}"
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}){hint}") from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, endless nesting
        place = name if line is None else f"{name}, line {line}"
        raise DataError(f"{place}: cannot be read as JSON ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):  # the standard library would keep the last value without a word
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return content


def _csv_rows(stream: Iterable[str], name: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)  # the module's own limit, 128 KB, is shorter than some prompts
    reader = csv.reader(stream, strict=True)
    try:
        header = next(reader, [])
        _refuse_twins(header, name)
        number = 0
        for values in reader:
            if not values:
                continue  # an empty line
            number += 1
            if len(values) != len(header):
                much = "more" if len(values) > len(header) else "fewer"
                raise DataError(f"{name}, row {number}: {much} values than the header has columns")
            yield dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{name}, line {reader.line_num}: not CSV ({error})") from error


def _parquet_rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _refuse_twins(file.schema_arrow.names, name)
            for batch in file.iter_batches():  # in parts, so that a large file is not in memory twice
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: cannot be read as parquet ({_first_line(error)})") from error


def _arrow_rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                file = pyarrow.ipc.open_file(source)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            except pyarrow.ArrowInvalid:  # the streaming form, which Hugging Face datasets writes
                source.seek(0)
                file = batches = pyarrow.ipc.open_stream(source)
            _refuse_twins(file.schema.names, name)
            for batch in batches:
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name}: cannot be read as Arrow ({_first_line(error)})") from error


def _refuse_twins(columns: list[str], name: str) -> None:
    twins = sorted({column for column in columns if columns.count(column) > 1})
    if twins:
        raise DataError(f"{name}: two columns are called {twins[0]!r}; rename one of them")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
