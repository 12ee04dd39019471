from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_rlhf.errors import DataError
from lit_rlhf.report import read_folder
from tests.report.folders import comparison_entry, write_comparison, write_run


def test_a_run_is_a_comparison_of_one(tmp_path: Path) -> None:
    found = read_folder(write_run(tmp_path / "my-run", seed=3))
    assert found.is_single
    assert [(arm.name, arm.title, [run.seed for run in arm.counted]) for arm in found.arms] == [("my-run", "GRPO", [3])]


def test_only_runs_that_are_done_count_as_long_as_there_are_any(tmp_path: Path) -> None:
    statuses = {2: "failed", 3: "running", 4: "pending"}
    write_comparison(tmp_path, [comparison_entry(tmp_path, "grpo", "GRPO", (1, 2, 3, 4), statuses)])
    arm = read_folder(tmp_path).arms[0]
    assert [run.seed for run in arm.counted] == [1]
    assert not arm.is_unfinished
    assert [run.run is None for run in arm.runs] == [False, False, False, True]


def test_an_arm_of_which_nothing_is_done_counts_what_runs(tmp_path: Path) -> None:
    statuses = {1: "failed", 2: "running", 3: "pending"}
    write_comparison(tmp_path, [comparison_entry(tmp_path, "grpo", "GRPO", (1, 2, 3), statuses)])
    arm = read_folder(tmp_path).arms[0]
    assert [run.seed for run in arm.counted] == [2]
    assert arm.is_unfinished


def test_a_run_that_has_not_logged_yet_is_no_error(tmp_path: Path) -> None:
    entry = comparison_entry(tmp_path, "grpo", "GRPO", (1,))
    for status in ("running", "failed", "done"):
        entry["runs"].append({"seed": status, "folder": f"grpo/{status}", "status": status, "error": None})
        (tmp_path / "grpo" / status).mkdir()
    arm = read_folder(write_comparison(tmp_path, [entry])).arms[0]
    assert [run.seed for run in arm.counted] == [1]
    assert arm.runs[-1].error is not None
    assert "no run has logged here" in arm.runs[-1].error
    assert arm.runs[1].error is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"arms": [', "is no list of arms"),
        ('{"token_budget": 3}', "KeyError: 'arms'"),
        ('{"arms": []}', "has no arms"),
        ('{"arms": [{"name": "a", "runs": [{"seed": 1, "status": "well"}]}]}', "done, failed, running, pending"),
    ],
)
def test_a_file_that_is_no_comparison_is_said_so_in_a_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(DataError, match=said):
        read_folder(tmp_path)


def test_a_title_may_be_missing(tmp_path: Path) -> None:
    write_comparison(tmp_path, [comparison_entry(tmp_path, "grpo", "GRPO", (1,))])
    content = json.loads((tmp_path / "comparison.json").read_text())
    del content["arms"][0]["title"]
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert read_folder(tmp_path).arms[0].title == "grpo"
