from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from lit_rlhf.errors import DataError
from lit_rlhf.report.logs import read_csv, read_events, read_logs
from tests.report.folders import Rows, run_rows, write_metrics


def write_events(folder: Path, rows: Rows) -> None:
    with SummaryWriter(str(folder)) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, int(row["step"]))


def test_tensorboard_and_csv_say_the_same(tmp_path: Path) -> None:
    rows = run_rows()
    write_events(tmp_path / "tensorboard", rows)
    events, lines = read_events(tmp_path / "tensorboard"), read_csv(write_metrics(tmp_path / "csv", rows))
    assert events.keys() == lines.keys() == {row["step"] for row in rows}
    for step, row in lines.items():
        assert events[step] == pytest.approx(row, rel=1e-6)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file = write_metrics(tmp_path, [{"step": step, "reward": 0.125 * step} for step in (1, 2, 3)])
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 2):
        file.write_bytes(whole[:-cut])
        assert read_csv(file) == {1: {"reward": 0.125}, 2: {"reward": 0.25}}


def test_cells_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,reward,kl\n1,nan,0.5\n,1,1\nx,1,1\n2,0.5\n3,0.5,inf\n")
    assert read_csv(file) == {1: {"kl": 0.5}, 2: {"reward": 0.5}, 3: {"reward": 0.5}}


def _steps(folder: Path) -> list[list[int]]:
    return [list(log.rows) for log in read_logs(folder).logs]


def _rows(first: int, last: int, value: float = 1.0) -> Rows:
    return [
        {"step": step, "reward": value, "tokens/generated": 10.0 * step, "time/iteration": 1.0}
        for step in range(first, last + 1)
    ]


def test_a_resumed_run_goes_on_where_it_was_resumed(tmp_path: Path) -> None:
    write_metrics(tmp_path / "version_0", _rows(1, 9))
    write_metrics(tmp_path / "version_1", _rows(5, 7))
    write_metrics(tmp_path / "version_2", _rows(8, 12))
    assert _steps(tmp_path) == [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]]


def test_versions_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for version in range(11):
        write_metrics(tmp_path / f"version_{version}", _rows(version + 1, version + 1))
    assert _steps(tmp_path) == [[step] for step in range(1, 12)]


def test_a_run_that_was_begun_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    write_metrics(tmp_path / "version_0", _rows(1, 9))
    # With more steps in an iteration, so that its first row is not the first of the old one.
    write_metrics(tmp_path / "version_1", [{"step": 4, "reward": 0.5, "tokens/generated": 10.0}])
    assert _steps(tmp_path) == [[4]]


def test_an_evaluation_of_a_checkpoint_is_no_start(tmp_path: Path) -> None:
    write_metrics(tmp_path / "version_0", [{"step": 0, "val/accuracy": 0.5}, *_rows(1, 3)])
    write_metrics(tmp_path / "version_1", [{"step": 0, "val/accuracy": 0.9, "test/accuracy": 0.8}])
    logs = read_logs(tmp_path).logs
    assert logs[0].rows[0] == {"val/accuracy": 0.5}
    assert logs[1].rows == {0: {"test/accuracy": 0.8}}


def test_a_start_that_failed_at_once_changes_nothing(tmp_path: Path) -> None:
    write_metrics(tmp_path / "version_0", _rows(1, 5))
    write_metrics(tmp_path / "version_1", [{"step": 3, "val/accuracy": 0.9}])
    write_metrics(tmp_path / "version_2", _rows(4, 6))
    assert _steps(tmp_path) == [[1, 2, 3], [4, 5, 6]]


def test_the_logger_that_has_got_further_is_read(tmp_path: Path) -> None:
    write_metrics(tmp_path / "csv" / "version_0", _rows(1, 3))  # flushed now and then
    write_events(tmp_path / "tensorboard" / "version_0", _rows(1, 4))
    assert read_logs(tmp_path).logs[0].folder.parent.name == "tensorboard"
    write_metrics(tmp_path / "csv" / "version_0", _rows(1, 4))
    assert read_logs(tmp_path).logs[0].folder.parent.name == "csv"


def test_two_runs_in_one_folder_are_refused_by_name(tmp_path: Path) -> None:
    write_metrics(tmp_path / "one" / "csv" / "version_0", _rows(1, 3))
    write_metrics(tmp_path / "two" / "csv" / "version_0", _rows(1, 3))
    with pytest.raises(DataError, match=r"logs of 2 runs \(one/csv, two/csv\): name one"):
        read_logs(tmp_path)


def test_what_a_start_said_ends_with_the_next_one(tmp_path: Path) -> None:
    write_metrics(tmp_path / "version_0", _rows(1, 9))
    write_metrics(tmp_path / "version_1", _rows(5, 7))
    logs = read_logs(tmp_path)
    assert logs.end_of(tmp_path / "version_0" / "health.jsonl", tmp_path) == 5
    assert logs.end_of(tmp_path / "version_1" / "samples" / "x.jsonl", tmp_path) == float("inf")
    assert logs.end_of(tmp_path / "elsewhere" / "health.jsonl", tmp_path) == float("inf")
