from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data.rows import read_rows
from lit_rlhf.data.source import PromptSource
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


def test_a_csv_cell_may_be_long_and_empty_and_look_like_a_date(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"prompt,answer\n{'x' * 200_000},\nb,2024-01-02\n")
    rows = read_rows(path).rows
    assert len(rows[0]["prompt"]) == 200_000
    assert [row["answer"] for row in rows] == ["", "2024-01-02"]


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
        ("a.csv", "a,b\n1,2\n\n1\n", r"a\.csv, row 2: fewer values than"),
        ("a.csv", "a,b,a\n1,2,3\n", r"a\.csv: two columns are called 'a'"),
        ("a.csv", 'a,b\n"1"x,2\n', r"a\.csv, line 2: not CSV"),
        ("a.jsonl", '{"a": ' + "[" * 100_000, r"a\.jsonl, line 1: cannot be read as JSON"),
        ("a.json", '[{"a": ' + "9" * 5000 + "}]", r"a\.json: cannot be read as JSON"),
        ("a.arrow", "no arrow", r"a\.arrow: cannot be read as Arrow"),
        ("a.txt", "hello", r"a\.txt: unknown kind of file.*\.jsonl, \.jsonl\.gz, \.json, \.csv, \.parquet, \.arrow"),
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


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(DataError, match=r"no data file \(\.jsonl, .*here is notes\.txt"):
        read_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"load_from_disk fails"):
        read_rows(tmp_path)


def write_arrow(path: Path, rows: list[Any], stream: bool) -> Path:
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return path


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_keep_types_and_nulls(tmp_path: Path, stream: bool) -> None:
    rows = [
        {"prompt": "a", "n": 18, "day": "2024-01-02", "l": [{"x": 1}]},
        {"prompt": "b", "n": None, "day": "", "l": []},
    ]
    again = read_rows(write_arrow(tmp_path / "a.arrow", rows, stream))
    assert again.rows == rows
    assert type(again.rows[0]["n"]) is int  # not 18.0, although a neighbour is missing
    assert again.where(1).endswith("a.arrow, row 2")


def test_shards_of_a_folder_are_read_in_order_and_by_split(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "data").mkdir()
    shards = {"train-00000-of-00002": ["a", "b"], "train-00001-of-00002": ["c"], "test-00000-of-00001": ["d"]}
    for name, texts in shards.items():
        table = pyarrow.Table.from_pylist([{"prompt": text} for text in texts])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("not for us")
    train = read_rows(tmp_path, split="train")
    assert [row["prompt"] for row in train.rows] == ["a", "b", "c"]
    assert train.name == f"{tmp_path} [train]"
    assert train.where(1) == f"{tmp_path}/data/train-00000-of-00002.parquet, row 2"
    assert train.where(2) == f"{tmp_path}/data/train-00001-of-00002.parquet, row 1"
    assert [row["prompt"] for row in read_rows(tmp_path, split="test").rows] == ["d"]
    with pytest.raises(DataError, match=r"has the splits train, test; none was named \(option `split`\)"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match=r"no file belongs to split='dev'; it has train, test"):
        read_rows(tmp_path, split="dev")
    write_lines(tmp_path / "data" / "train.jsonl", [{"prompt": "e"}])
    with pytest.raises(DataError, match=r"several kinds \(\.jsonl, \.parquet\); name one file"):
        read_rows(tmp_path, split="train")


def test_one_json_object_per_file_in_folders_of_subjects(tmp_path: Path) -> None:
    for place, number in (("train/algebra/1", 1), ("train/geometry/7", 2), ("test/algebra/3", 3)):
        path = tmp_path / f"{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"problem": "?", "level": number}))
    rows = read_rows(tmp_path, split="train")
    assert [row["level"] for row in rows.rows] == [1, 2]
    assert rows.where(1) == f"{tmp_path}/train/geometry/7.json, row 1"
    assert read_rows(tmp_path / "test").rows == [{"problem": "?", "level": 3}]
    (tmp_path / "train" / "geometry" / "8.json").write_text("[1]")
    with pytest.raises(DataError, match=r"geometry/8\.json, row 1: an object .* not a number"):
        read_rows(tmp_path, split="train")


def test_lines_are_counted_in_the_file_that_they_are_in(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "b.jsonl").write_text('\n{"prompt": "3"}\n')
    rows = read_rows(tmp_path)
    assert [rows.where(index) for index in range(3)] == [
        f"{tmp_path}/a.jsonl, line 1",
        f"{tmp_path}/a.jsonl, line 2",
        f"{tmp_path}/b.jsonl, line 2",
    ]
    (tmp_path / "c.jsonl").write_text('{"prompt": "4"}\nnonsense\n')
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: not JSON"):
        read_rows(tmp_path)


def test_the_cache_of_load_dataset_is_read_as_a_folder_of_arrow_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = write_lines(tmp_path / "rows.jsonl", ROWS[:1])
    datasets.load_dataset("json", data_files=str(file), cache_dir=str(tmp_path / "cache"))
    (folder,) = {path.parent for path in (tmp_path / "cache").rglob("*.arrow")}
    assert [row["prompt"] for row in read_rows(folder).rows] == [ROWS[0]["prompt"]]


def test_a_value_that_json_would_lose_in_silence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"answer": 1}\n{"x": {"answer": 1, "answer": 2}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*the key 'answer' stands twice"):
        read_rows(path)


def test_a_source_that_makes_its_rows_keeps_them_as_they_are() -> None:
    class Made(PromptSource):
        name = "made"

        def __iter__(self) -> Any:
            return iter([{"prompt": "a", "pair": (1, 2)}])

    rows = read_rows(Made())
    assert rows.rows == [{"prompt": "a", "pair": (1, 2)}]
    assert rows.where(0) == "made, row 1"
    with pytest.raises(DataError, match="no splits"):
        read_rows(Made(), split="train")


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
