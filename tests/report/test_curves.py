from __future__ import annotations

from pathlib import Path

import pytest

from lit_rlhf.functional.intervals import mean_interval
from lit_rlhf.report import Arm, read_folder
from lit_rlhf.report.curves import POINTS, curve_of, seconds, tokens
from tests.report.folders import comparison_entry, run_rows, write_comparison, write_run


def _arm(folder: Path, **options) -> Arm:
    return read_folder(write_comparison(folder, [comparison_entry(folder, "a", "A", (1, 2, 3), **options)])).arms[0]


def test_points_with_the_same_number_are_averaged(tmp_path: Path) -> None:
    arm = _arm(tmp_path)
    curve = curve_of(arm, "reward", tokens)
    assert curve is not None
    assert curve.x == tuple(100.0 * step for step in range(1, 21))
    for place in (0, 7, 19):
        values = [run.run.series["reward"].values[place] for run in arm.counted if run.run is not None]
        assert (curve.mean[place], curve.low[place], curve.high[place]) == pytest.approx(mean_interval(values)[:3])


def test_seconds_differ_between_runs_and_are_averaged_too(tmp_path: Path) -> None:
    arm = _arm(tmp_path)
    curve = curve_of(arm, "val/accuracy", seconds)
    assert curve is not None
    ends = [run.run.seconds_at(20) for run in arm.counted if run.run is not None]
    assert curve.x[0] == 0
    assert curve.x[-1] == pytest.approx(sum(ends) / 3)


def test_runs_of_unequal_length_are_read_off_where_all_have_been(tmp_path: Path) -> None:
    long, short = run_rows(iterations=40, noise=0.0), run_rows(iterations=40, noise=0.0)[:24]
    entry = comparison_entry(tmp_path, "a", "A", (1, 2), rows=long)
    write_run(tmp_path / "a" / "seed-2", rows=short)
    curve = curve_of(read_folder(write_comparison(tmp_path, [entry])).arms[0], "reward", tokens)
    assert curve is not None
    steps = max(row["step"] for row in short if "reward" in row)
    assert curve.x[0] == 100
    assert curve.x[-1] == pytest.approx(100 * steps)
    for x, mean in zip(curve.x, curve.mean, strict=True):
        assert mean == pytest.approx(0.4 + 0.5 * x / 4000)  # the line that both lie on


def test_many_points_become_few_with_the_same_mean(tmp_path: Path) -> None:
    arm = _arm(tmp_path, iterations=60 * 7)
    curve = curve_of(arm, "reward", tokens)
    assert curve is not None
    assert len(curve.x) == POINTS
    values = [value for run in arm.counted if run.run is not None for value in run.run.series["reward"].values]
    assert sum(curve.mean) / POINTS == pytest.approx(sum(values) / len(values))


def test_two_runs_have_no_band(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, [comparison_entry(tmp_path, "a", "A", (1, 2))])
    curve = curve_of(read_folder(folder).arms[0], "reward", tokens)
    assert curve is not None
    assert curve.low == curve.high == ()
    assert len(curve.runs) == 2


def test_what_was_not_logged_has_no_curve(tmp_path: Path) -> None:
    assert curve_of(_arm(tmp_path), "value/error", tokens) is None
