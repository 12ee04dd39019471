from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data.rows import read_rows
from lit_rlhf.errors import DataError

ROWS = [
    {"prompt": "Wie viel ist 3 € + 4 €? 🙂", "answer": 18, "day": "2024-01-02", "score": 0.5, "ok": True, "none": None},
    {"prompt": "三加四等于几？", "answer": "18", "tests": ["a", {"b": 1}]},
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_keeps_every_type_and_counts_lines_past_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1], ensure_ascii=False) + "\n", encoding="utf-8")
    rows = read_rows(path)
    assert rows.rows == ROWS
    assert type(rows.rows[0]["answer"]) is int
    assert type(rows.rows[1]["answer"]) is str
    assert rows.rows[0]["ok"] is True
    assert rows.columns == ["prompt", "answer", "day", "score", "ok", "none", "tests"]
    assert len(rows) == 2
    assert rows.name == str(path)
    assert rows.where(1) == f"{path}, line 3"


def test_line_separators_inside_text_do_not_split_a_row(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    assert read_rows(write_lines(tmp_path / "a.jsonl", [{"prompt": text}])).rows == [{"prompt": text}]


def test_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert read_rows(path).rows == [{"prompt": "a"}]


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in ROWS)
    assert read_rows(str(path)).rows == ROWS


@pytest.mark.parametrize("content", [ROWS, {"data": ROWS, "version": 1}])
def test_json(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    rows = read_rows(path)
    assert rows.rows == ROWS
    assert rows.where(1) == f"{path}, row 2"


def test_csv_values_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"two\nlines, one cell",007\nb,1.50\n', encoding="utf-8")
    rows = read_rows(path)
    assert rows.rows == [{"prompt": "two\nlines, one cell", "answer": "007"}, {"prompt": "b", "answer": "1.50"}]
    assert rows.where(1).endswith("a.csv, row 2")


def test_parquet_from_pandas_gives_lists_of_plain_dicts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "a.parquet"
    chat = [{"role": "user", "content": "2+2?"}]
    pandas.DataFrame({"prompt": [chat, chat], "tests": [["x", "y"], ["z"]], "answer": [4, 5]}).to_parquet(path)
    again = pandas.read_parquet(path)  # now arrays of dicts
    for source in (path, again.to_dict("records")):
        row = read_rows(source).rows[0]
        assert row == {"prompt": chat, "tests": ["x", "y"], "answer": 4}
        assert type(row["prompt"]) is list
        assert type(row["prompt"][0]) is dict
        assert type(row["answer"]) is int
    assert read_rows(path).where(0) == f"{path}, row 1"


def test_numpy_inside_rows_becomes_python() -> None:
    numpy = pytest.importorskip("numpy")
    row = {"a": numpy.int64(3), "b": numpy.array([[True], [False]]), "c": {"d": numpy.float64(0.5)}, "e": (1, 2)}
    plain = read_rows([row]).rows[0]
    assert plain == {"a": 3, "b": [[True], [False]], "c": {"d": 0.5}, "e": [1, 2]}
    assert type(plain["a"]) is int
    assert type(plain["b"][0][0]) is bool
    assert type(row["a"]) is numpy.int64  # the source is not edited


def test_hugging_face_dataset_in_memory_and_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    expected = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    assert read_rows(one).rows == expected
    assert read_rows(one.with_format("numpy")).rows == expected
    one.save_to_disk(tmp_path / "one")
    assert read_rows(tmp_path / "one").rows == expected

    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "single")
    assert read_rows(tmp_path / "single").rows == expected

    both = datasets.DatasetDict({"train": one, "test": one.select([1])})
    both.save_to_disk(tmp_path / "both")
    for source in (both, tmp_path / "both"):
        assert read_rows(source, split="test").rows == expected[1:]
        with pytest.raises(DataError, match=r"splits train, test; none was named.*`split`"):
            read_rows(source)
        with pytest.raises(DataError, match=r"split='dev' is not one of them"):
            read_rows(source, split="dev")
    with pytest.raises(DataError, match=r"has no split 'dev'"):
        read_rows(tmp_path / "one", split="dev")


def test_iterables() -> None:
    assert read_rows(["a", "b"]).rows == [{"prompt": "a"}, {"prompt": "b"}]
    rows = read_rows(row for row in ({"x": 1}, {"y": 2}))
    assert rows.columns == ["x", "y"]
    assert rows.where(1) == "iterable, row 2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl: is empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl: is empty"),
        ("a.json", "", r"a\.json: is empty"),
        ("a.json", "[]", r"a\.json: is empty"),
        ("a.csv", "prompt,answer\n", r"a\.csv: is empty"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"a": 1}\n\n[1, 2]\n', r"a\.jsonl, line 3: an object .* not a list"),
        ("a.jsonl", "null\n", r"a\.jsonl, line 1: an object .* not null"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', r"a\.json, line 2: not JSON .*\.jsonl"),
        ("a.json", '{"rows": []}', r"a\.json: a list of objects"),
        ("a.json", '[{"a": 1}, "b"]', r"a\.json, row 2: an object .* not a string"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv, row 2: more values than"),
        ("a.txt", "hello", r"a\.txt: unknown kind of file.*\.jsonl, \.jsonl\.gz, \.json, \.csv, \.parquet"),
        ("a.parquet", "no parquet", r"a\.parquet: cannot be read"),
        ("a.jsonl.gz", "not zipped", r"a\.jsonl\.gz: cannot be read"),
    ],
)
def test_unusable_files_are_named_with_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: the text is not UTF-8"):
        read_rows(tmp_path / "a.jsonl")


def test_missing_file_names_what_is_there(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"trian\.jsonl: no such file.*\.parquet.*has train\.jsonl"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder.*load_dataset"):
        read_rows("openai/gsm8k")


def test_folder_that_is_no_dataset(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"save_to_disk.*here is train\.jsonl"):
        read_rows(tmp_path)


def test_columns_instead_of_rows_and_other_types_are_refused(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"iterates over its columns"):
        read_rows({"prompt": ["a"]})
    with pytest.raises(DataError, match=r"to_dict"):
        read_rows(pandas.DataFrame({"prompt": ["a"]}))
    with pytest.raises(DataError, match=r"cannot read rows from a int"):
        read_rows(3)
    with pytest.raises(DataError, match=r"iterable, row 2: .* not a number"):
        read_rows([{"a": 1}, 2])
    with pytest.raises(DataError, match=r"no splits"):
        read_rows([{"a": 1}], split="train")
    with pytest.raises(DataError, match=r"no splits"):
        read_rows(write_lines(tmp_path / "a.jsonl", [{"a": 1}]), split="train")
