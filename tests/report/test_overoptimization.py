from __future__ import annotations

from pathlib import Path

import pytest

from lit_rlhf.callbacks.overoptimization_monitor import Evaluation
from lit_rlhf.report import read_run
from lit_rlhf.report.overoptimization import evaluations_of, find_overoptimization
from tests.report.folders import alarm, run_rows, write_run


def hill(progress: float) -> float:
    """Better until the middle, then worse."""
    return 0.5 + 0.8 * progress if progress <= 0.5 else 1.3 - 0.8 * progress


def test_reward_up_and_held_out_down_is_called_so(tmp_path: Path) -> None:
    found = find_overoptimization(read_run(write_run(tmp_path, accuracy=hill, noise=0.0)))
    assert found is not None
    assert not found.is_over
    assert found.iteration == 19  # the second validation in a row that is worse than the one in the middle
    assert "reward rose from" in found.finding
    assert "val/accuracy went from 0.9 (iteration 9) to 0.5" in found.finding


@pytest.mark.parametrize(
    "accuracy",
    [
        lambda progress: 0.5 + 0.4 * progress,  # both rise
        lambda progress: 0.8 - 0.04 * progress,  # a fall within noise
        lambda progress: hill(progress) if progress < 0.8 else 0.9,  # one bad validation
    ],
)
def test_other_curves_are_not(tmp_path: Path, accuracy) -> None:
    assert find_overoptimization(read_run(write_run(tmp_path, accuracy=accuracy, noise=0.0))) is None


def test_a_fall_of_both_is_no_overoptimization(tmp_path: Path) -> None:
    rows = [{**row, "reward": 1 - row["reward"]} if "reward" in row else row for row in run_rows(accuracy=hill)]
    assert find_overoptimization(read_run(write_run(tmp_path, rows=rows))) is None


def test_the_alarm_of_the_run_is_believed(tmp_path: Path) -> None:
    rung = {**alarm("overoptimization", 7), "finding": "as the monitor saw it"}
    found = find_overoptimization(read_run(write_run(tmp_path, alarms=[rung])))
    assert found == (7, "as the monitor saw it", True)  # the curve went up again


def test_evaluations_are_those_of_the_monitor(tmp_path: Path) -> None:
    rows = run_rows(iterations=10, every=5)
    rewards = [row["reward"] for row in rows if "reward" in row]
    accuracies = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    assert evaluations_of(read_run(write_run(tmp_path, rows=rows))) == [
        Evaluation(0, rewards[0], accuracies[0]),
        Evaluation(4, pytest.approx(sum(rewards[:5]) / 5), accuracies[1]),
        Evaluation(9, pytest.approx(sum(rewards[5:]) / 5), accuracies[2]),
    ]


def test_without_validations_there_is_nothing_to_judge(tmp_path: Path) -> None:
    rows = [{n: v for n, v in row.items() if not n.startswith("val/")} for row in run_rows()]
    assert evaluations_of(read_run(write_run(tmp_path, rows=[row for row in rows if len(row) > 1]))) == []
