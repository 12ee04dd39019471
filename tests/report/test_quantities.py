from __future__ import annotations

from pathlib import Path

import pytest

from lit_rlhf.report import Run, read_folder, read_run
from lit_rlhf.report.finders import common_target, reached_at
from lit_rlhf.report.quantities import quantities
from lit_rlhf.report.quantity import SECTIONS
from tests.report.folders import run_rows, write_config, write_metrics, write_run


def _values(run: Run, folder: Path, target: float | None = 0.75) -> dict[str, float]:
    found = {quantity.key: quantity.find(run) for quantity in quantities(read_folder(folder), target)}
    return {key: value.value for key, value in found.items() if value is not None}


def test_every_quantity_of_a_comparison_is_there(comparison_dir: Path) -> None:
    found = {quantity.key for quantity in quantities(read_folder(comparison_dir), 0.65)}
    assert found >= {
        *("val/accuracy", "val/pass@8", "reward", "kl", "sampling/entropy", "completion/length", "group/reward_std"),
        *("group/dead", "group/effective_candidates", "value/error", "value/explained_variance"),
        *("tokens/generated", "tokens_to_target", "seconds_to_target", "memory/peak_gib", "tokens_per_second"),
    }


def test_values_are_those_of_the_logs(tmp_path: Path) -> None:
    rows = run_rows(iterations=20)
    run = read_run(write_run(tmp_path, rows=rows))
    found = _values(run, tmp_path)
    training = [row for row in rows if "reward" in row]
    assert found["reward"] == pytest.approx(sum(row["reward"] for row in training[-2:]) / 2)  # a tenth of 20
    assert found["val/accuracy"] == next(row["val/accuracy"] for row in rows[::-1] if "val/accuracy" in row)
    ratios = [row["group/effective_ratio"] for row in training]
    assert found["group/dead"] == pytest.approx(1 - sum(ratios) / 20)
    assert found["group/effective_candidates"] == pytest.approx(sum(ratios) / 20 * 64)
    assert found["memory/peak_gib"] == max(row["memory/peak_gib"] for row in training)
    seconds = sum(row["time/iteration"] for row in training)
    assert found["seconds"] == pytest.approx(seconds)
    assert found["tokens_per_second"] == pytest.approx(2000 / seconds)
    assert found["tokens/generated"] == 2000


def test_a_critic_has_no_groups_and_groups_have_no_critic(tmp_path: Path) -> None:
    for critic in (True, False):
        folder = write_run(tmp_path / str(critic), critic=critic)
        keys = _values(read_run(folder), folder)
        assert any(key.startswith("value/") for key in keys) == critic
        assert any(key.startswith("group/") for key in keys) != critic


def test_metrics_of_evaluations_need_not_be_known(tmp_path: Path) -> None:
    names = ["val/accuracy", "val/sums/accuracy", "val/maj@8", "val/human_rating", "val/pass@16", "val/pass@4"]
    row = dict.fromkeys([*names, "val/accuracy_low", "val/accuracy_high", "test/accuracy"], 0.5)
    write_metrics(tmp_path, [{"step": 1, "reward": 0.5, "tokens/generated": 10.0}, {"step": 1, **row}])
    found = [q for q in quantities(read_folder(tmp_path), None) if q.section == "held-out"]
    assert [q.key for q in found] == [
        *("val/accuracy", "val/pass@4", "val/pass@16", "val/maj@8", "val/human_rating"),
        *("val/sums/accuracy", "test/accuracy"),
    ]
    titles = {q.key: q.title for q in found}
    assert titles["val/sums/accuracy"] == "greedy accuracy, sums"
    assert titles["val/maj@8"] == "majority vote of 8"
    assert titles["val/human_rating"] == "human rating"
    bounded = found[0].find(read_run(tmp_path))
    assert bounded is not None
    assert (bounded.low, bounded.high) == (0.5, 0.5)


def test_only_time_and_memory_depend_on_the_machine(tmp_path: Path) -> None:
    found = quantities(read_folder(write_run(tmp_path)), 0.7)
    assert {quantity.section for quantity in found} <= set(SECTIONS)
    for quantity in found:
        is_timing = any(word in quantity.key for word in ("seconds", "memory", "speed", "per_second"))
        assert quantity.is_timing == is_timing, quantity.key


def _run(folder: Path, points: list[tuple[int, float]]) -> Run:
    rows = [{"step": step, "val/accuracy": value} for step, value in points]
    rows += [{"step": step, "tokens/generated": 100.0 * step, "reward": 0.0} for step in range(1, 21)]
    write_metrics(folder, rows)
    write_config(folder)
    return read_run(folder)


def test_the_cost_of_a_target_is_read_off_between_validations(tmp_path: Path) -> None:
    run = _run(tmp_path, [(0, 0.4), (10, 0.6), (20, 0.5)])
    assert reached_at(run, 0.5, run.tokens_at) == (pytest.approx(500), 10)
    assert reached_at(run, 0.6, run.tokens_at) == (pytest.approx(1000), 10)
    assert reached_at(run, 0.3, run.tokens_at) == (0.0, 0)
    assert reached_at(run, 0.61, run.tokens_at) is None


def test_the_common_target_is_what_all_have_learned(tmp_path: Path) -> None:
    one = _run(tmp_path / "one", [(0, 0.4), (10, 0.93), (20, 0.5)])
    other = _run(tmp_path / "other", [(0, 0.4), (20, 0.86)])
    still = _run(tmp_path / "still", [(0, 0.4), (20, 0.41)])
    assert common_target([one]) == 0.9
    assert common_target([one, other]) == 0.85
    assert common_target([one, still]) is None  # 0.4 was there before training
    assert common_target([]) is None
