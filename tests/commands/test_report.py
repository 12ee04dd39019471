from __future__ import annotations

from pathlib import Path

import pytest

from lit_rlhf.cli import main
from lit_rlhf.commands import COMMANDS
from tests.report.folders import comparison_entry, write_comparison, write_run


def test_a_run_and_a_comparison_are_reported_by_the_same_command(tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "run")
    write_comparison(tmp_path / "both", [comparison_entry(tmp_path / "both", name, name, (1, 2)) for name in "ab"])
    for folder in (tmp_path / "run", tmp_path / "both"):
        main(["report", str(folder)])
        assert f"report written to {folder / 'report.html'}, report.md and report.json" in capsys.readouterr().out
        assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_where_to_and_what_target(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))
    main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--target_accuracy", "0.7"])
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert "tokens to accuracy 0.7" in (tmp_path / "out" / "report.md").read_text()


def test_what_cannot_be_reported_is_said_in_a_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([str(tmp_path / "empty")], "no run has logged here"),
        ([str(tmp_path / "nowhere")], "there is no such folder"),
        ([str(write_run(tmp_path / "run")), "--target_accuracy", "90"], "target_accuracy must be a number in [0, 1]"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        assert ended.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("lit-rlhf: error: ")
        assert said in error
        assert error.count("\n") == 1


def test_a_place_that_cannot_be_written_to(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "file")])
    assert ended.value.code == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_help_explains(capsys) -> None:
    assert "report" in COMMANDS
    with pytest.raises(SystemExit) as ended:
        main(["report", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in ("--out", "--target_accuracy", "comparison.json", "metrics.csv", "docs/report.md"):
        assert word in said
