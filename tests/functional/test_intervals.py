from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf.functional.intervals import Interval, mean_interval, paired_interval, student_quantile, welch_interval

values = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [  # printed tables of the distribution
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.95, 2, 2.920),
        (0.995, 3, 5.841),
        (0.9995, 4, 8.610),
        (0.975, 10, 2.228),
        (0.95, 30, 1.697),
        (0.975, 99, 1.984),
        (0.975, 100, 1.984),
        (0.975, 120, 1.980),
        (0.975, 1e7, 1.960),
    ],
)
def test_quantiles_are_those_of_the_tables(probability: float, degrees: float, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=6e-4)


def test_quantiles_with_a_closed_form() -> None:
    for probability in (0.55, 0.9, 0.975, 0.9999):
        cauchy = math.tan(math.pi * (probability - 0.5))
        assert student_quantile(probability, 1) == pytest.approx(cauchy, rel=1e-6)
        a = 2 * probability - 1
        assert student_quantile(probability, 2) == pytest.approx(a * math.sqrt(2 / (1 - a * a)), rel=1e-6)
        assert student_quantile(1 - probability, 3) == pytest.approx(-student_quantile(probability, 3))


def test_quantile_falls_with_the_degrees_of_freedom() -> None:
    found = [student_quantile(0.975, degrees) for degrees in (1, 1.5, 2, 7, 99, 99.9, 100, 101, 1000)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 2), (1.0, 2), (0.9, 0.5)])
def test_quantile_refuses_what_has_none(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="degrees"):
        student_quantile(probability, degrees)


def _share(cover: list[bool]) -> float:
    return sum(cover) / len(cover)


@pytest.mark.parametrize(("count", "confidence"), [(2, 0.95), (3, 0.95), (5, 0.95), (3, 0.8)])
def test_intervals_of_a_few_seeds_cover_the_mean_as_often_as_they_say(count: int, confidence: float) -> None:
    draw = random.Random(count)
    found = [mean_interval([draw.gauss(0.7, 0.1) for _ in range(count)], confidence) for _ in range(4000)]
    covered = _share([one.low < 0.7 < one.high for one in found if one.low is not None and one.high is not None])
    assert covered == pytest.approx(confidence, abs=4 * math.sqrt(confidence * (1 - confidence) / 4000))


def test_welch_covers_where_deviations_and_numbers_differ() -> None:
    draw = random.Random(0)
    covered = []
    for _ in range(1500):
        first = [draw.gauss(0.5, 0.2) for _ in range(6)]
        second = [draw.gauss(0.2, 0.05) for _ in range(4)]
        found = welch_interval(first, second)
        assert found.low is not None
        assert found.high is not None
        covered.append(found.low < 0.3 < found.high)
    assert 0.93 < _share(covered) < 0.97


def test_pairs_see_what_welch_cannot() -> None:
    draw = random.Random(1)
    paired, unpaired = [], []
    for _ in range(200):
        seeds = [draw.gauss(0.5, 0.2) for _ in range(4)]  # some seeds are lucky for both arms
        first = [seed + 0.05 + draw.gauss(0, 0.01) for seed in seeds]
        second = [seed + draw.gauss(0, 0.01) for seed in seeds]
        paired.append(paired_interval(first, second).excludes_zero)
        unpaired.append(welch_interval(first, second).excludes_zero)
    assert _share(paired) > 0.9
    assert _share(unpaired) < 0.05


def test_a_difference_that_is_none_is_claimed_as_often_as_agreed() -> None:
    draw = random.Random(2)
    claimed = [
        paired_interval(*([draw.gauss(0, 1) for _ in range(3)] for _ in range(2))).excludes_zero for _ in range(4000)
    ]
    assert 0.035 < _share(claimed) < 0.065


@given(values, st.floats(-10, 10), st.floats(0.1, 10))
def test_intervals_follow_shift_and_scale(found: list[float], shift: float, scale: float) -> None:
    plain, moved = mean_interval(found), mean_interval([scale * value + shift for value in found])
    for before, after in zip(plain[:3], moved[:3], strict=True):
        assert before is not None
        assert after == pytest.approx(scale * before + shift, abs=1e-6)


@given(values, values)
def test_the_order_of_the_arms_turns_the_difference(first: list[float], second: list[float]) -> None:
    one, other = welch_interval(first, second), welch_interval(second, first)
    assert one.low is not None
    assert other.high is not None
    assert one.low == pytest.approx(-other.high, abs=1e-9)


def test_one_value_has_no_bounds_and_claims_nothing() -> None:
    assert mean_interval([3.0]) == Interval(3.0, None, None, 1)
    assert welch_interval([3.0], [1.0, 2.0]) == Interval(1.5, None, None, 1)
    assert not mean_interval([3.0]).excludes_zero


def test_equal_values_have_a_point() -> None:
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 3)
    assert welch_interval([2.0, 2.0], [1.0, 1.0]) == Interval(1.0, 1.0, 1.0, 2)


def test_refuses_nothing_and_unequal_pairs() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match="both sides"):
        welch_interval([1.0], [])
    with pytest.raises(ValueError, match="2 and 1"):
        paired_interval([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="confidence"):
        mean_interval([1.0, 2.0], 1.0)
