from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
Row = dict[str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_data.py", "--folder", str(folder)])
        runpy.run_path(str(QUICKSTART / "make_data.py"), run_name="__main__")
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.iterdir()}


def numbers(row: Row) -> tuple[int, int]:
    a, b = row["prompt"].removesuffix("=").split("+")
    return int(a), int(b)


def pairs(rows: list[Row]) -> set[frozenset[int]]:
    return {frozenset(numbers(row)) for row in rows}


def carries(row: Row) -> bool:
    return sum(number % 10 for number in numbers(row)) >= 10


def test_shipped_files_are_what_the_script_writes(made: dict[str, list[Row]]) -> None:
    for name in ("train", "val", "test"):
        shipped = [json.loads(line) for line in (QUICKSTART / "data" / f"{name}.jsonl").open()]
        assert shipped == made[name]


def test_held_out_sums_occur_nowhere_else_in_either_order(made: dict[str, list[Row]]) -> None:
    val, test = pairs(made["val"]), pairs(made["test"])
    assert (len(val), len(test)) == (256, 512)
    assert not val & test
    assert not (val | test) & (pairs(made["corpus"]) | pairs(made["train"]))
    assert pairs(made["corpus_val"]) == val


def test_answers_and_shares(made: dict[str, list[Row]]) -> None:
    for name in ("train", "val", "test"):
        assert all(int(row["answer"]) == sum(numbers(row)) for row in made[name])
    assert len(made["train"]) == 2000
    assert sum(map(carries, made["train"])) == 1600
    for name in ("val", "test"):  # the share among all sums of two numbers below 100
        assert sum(map(carries, made[name])) / len(made[name]) == pytest.approx(0.45, abs=0.002)


def test_the_pupil_forgets_seven_carries_in_ten_and_nothing_else(made: dict[str, list[Row]]) -> None:
    with_carry = [row for row in made["corpus"] if carries(row)]
    wrong = [row for row in made["corpus"] if int(row["completion"]) != sum(numbers(row))]
    assert all(carries(row) and int(row["completion"]) == sum(numbers(row)) - 10 for row in wrong)
    assert len(wrong) / len(with_carry) == pytest.approx(0.7, abs=0.01)
