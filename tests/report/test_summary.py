from __future__ import annotations

import random
from pathlib import Path

import pytest

from lit_rlhf.functional.intervals import mean_interval, paired_interval, welch_interval
from lit_rlhf.report import read_folder
from lit_rlhf.report.quantities import quantities
from lit_rlhf.report.summary import Difference, Number, differences, numbers
from tests.report.folders import comparison_entry, write_comparison, write_metrics, write_run


def _summary(folder: Path, target: float | None = None) -> tuple[list[Number], list[Difference]]:
    comparison = read_folder(folder)
    found = numbers(comparison, quantities(comparison, target))
    return found, differences(found, comparison.arms)


def _value(numbers: list[Number], key: str, arm: str) -> Number:
    return next(number for number in numbers if (number.quantity.key, number.arm.name) == (key, arm))


def _difference(differences: list[Difference], key: str, *arms: str) -> Difference:
    return next(d for d in differences if (d.quantity.key, d.first.name, d.second.name) == (key, *arms))


def test_numbers_are_means_over_seeds_with_students_interval(comparison_dir: Path) -> None:
    found, _ = _summary(comparison_dir)
    number = _value(found, "val/accuracy", "grpo")
    assert [seed for seed, _ in number.values] == [1, 2, 3]
    assert number.interval == mean_interval([value.value for _, value in number.values])
    assert number.basis == "seeds"


def test_every_number_is_in_the_file_that_it_names(comparison_dir: Path) -> None:
    found, _ = _summary(comparison_dir, 0.65)
    assert {seed for number in found for seed, _ in number.values} == {1, 2, 3}
    for number in found:
        for seed, value in number.values:
            assert f"{number.arm.name}/seed-{seed}/" in value.file.as_posix()
            metric = value.source.removeprefix("1 - ").split(",")[0].split(" at ")[0]
            assert metric in value.file.read_text().splitlines()[0].split(",") or metric.startswith("rows with ")


def test_the_same_seeds_are_compared_in_pairs_and_others_are_not(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2, 3)),
        comparison_entry(tmp_path, "b", "B", (3, 2, 1), accuracy=lambda p: 0.5 + 0.3 * p),
        comparison_entry(tmp_path, "c", "C", (4, 5, 6, 7)),
    ]
    found, differing = _summary(write_comparison(tmp_path, arms))
    confidence = 1 - 0.05 / 3
    values = {
        arm: [value.value for _, value in sorted(_value(found, "val/accuracy", arm).values, key=lambda pair: pair[0])]
        for arm in ("a", "b", "c")
    }
    paired = _difference(differing, "val/accuracy", "b", "a")
    assert paired.method == "paired"
    assert paired.interval.mean == pytest.approx(paired_interval(values["b"], values["a"], confidence).mean)
    assert paired.interval.low == pytest.approx(paired_interval(values["b"], values["a"], confidence).low)
    other = _difference(differing, "val/accuracy", "c", "a")
    assert other.method == "Welch"
    assert other.interval == welch_interval(values["c"], values["a"], confidence)


def test_of_many_arms_each_is_compared_with_the_first(tmp_path: Path) -> None:
    arms = [comparison_entry(tmp_path, name, name, (1, 2)) for name in "abcd"]
    _, differing = _summary(write_comparison(tmp_path, arms))
    assert {(d.first.name, d.second.name) for d in differing} == {("b", "a"), ("c", "a"), ("d", "a")}
    assert {round(d.confidence, 4) for d in differing} == {round(1 - 0.05 / 3, 4)}


def test_no_mean_of_those_that_happened_to_reach_the_target(tmp_path: Path) -> None:
    arm = comparison_entry(tmp_path, "a", "A", (1, 2))
    more = comparison_entry(tmp_path, "a", "A", (3,), accuracy=lambda p: 0.5)
    arm["runs"] += more["runs"]
    found, _ = _summary(write_comparison(tmp_path, [arm]), target=0.8)
    number = _value(found, "tokens_to_target", "a")
    assert ([seed for seed, _ in number.values], number.missing, number.interval) == ([1, 2], 1, None)


def test_two_equal_values_claim_nothing(tmp_path: Path) -> None:
    """Two seeds that agree to the last prompt do so by chance."""
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2), noise=0.0),
        comparison_entry(tmp_path, "b", "B", (1, 2), noise=0.0, accuracy=lambda p: 0.5 + 0.41 * p),
    ]
    found, differing = _summary(write_comparison(tmp_path, arms))
    assert _value(found, "val/accuracy", "a").interval == (pytest.approx(0.9), None, None, 2)
    assert not _difference(differing, "val/accuracy", "b", "a").is_shown


def test_bounds_stay_within_what_is_possible(tmp_path: Path) -> None:
    arm = comparison_entry(tmp_path, "a", "A", (1, 2), accuracy=lambda p: 0.97, noise=0.02)
    found, _ = _summary(write_comparison(tmp_path, [arm]))
    interval = _value(found, "val/accuracy", "a").interval
    assert interval is not None
    assert interval.high == 1.0
    assert interval.low is not None
    assert 0 <= interval.low < interval.mean


def test_one_run_has_the_interval_over_prompts_that_it_logged(tmp_path: Path) -> None:
    row = {"val/accuracy": 0.5, "val/accuracy_low": 0.4, "val/accuracy_high": 0.6}
    rows = [{"step": 1, "reward": 0.5, "tokens/generated": 10.0}, {"step": 1, **row}]
    write_run(tmp_path, rows=rows)
    found, differing = _summary(tmp_path)
    number = _value(found, "val/accuracy", tmp_path.name)
    assert number.basis == "prompts"
    assert number.interval == (0.5, 0.4, 0.6, 1)
    assert differing == []


def test_runs_that_go_on_are_not_compared(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2)),
        comparison_entry(tmp_path, "b", "B", (1, 2), {1: "running", 2: "running"}),
    ]
    found, differing = _summary(write_comparison(tmp_path, arms))
    assert _value(found, "val/accuracy", "b").interval is not None
    assert differing == []


def test_arms_that_do_not_differ_are_told_apart_about_as_rarely_as_agreed(tmp_path: Path) -> None:
    draw = random.Random(0)
    claims = 0
    for _ in range(100):
        for name in ("a", "b", "c"):
            for seed in (1, 2, 3):
                rows = [{"step": 1, "reward": draw.gauss(0, 1), "tokens/generated": 10.0}]
                write_metrics(tmp_path / name / str(seed), rows)
        runs = [{"seed": seed, "status": "done"} for seed in (1, 2, 3)]
        arms = [
            {"name": name, "runs": [{**run, "folder": f"{name}/{run['seed']}"} for run in runs]}
            for name in ("a", "b", "c")
        ]
        _, differing = _summary(write_comparison(tmp_path, arms))
        claims += any(difference.is_shown for difference in differing if difference.quantity.key == "reward")
    assert claims <= 12  # 5 are to be expected; more than 12 happen once in 500 times
