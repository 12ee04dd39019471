"""Warm-up and cosine: shape, bounds, and dependence on the step alone."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import annealed, warmup_cosine

property_test = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def schedules(draw):
    total = draw(st.integers(1, 60))
    return total, draw(st.integers(0, total)), draw(st.floats(0.0, 1.0))


@property_test
@given(schedules())
def test_rises_linearly_then_falls_to_the_floor(schedule):
    total, warmup, floor = schedule
    factors = [warmup_cosine(step, total, warmup, floor) for step in range(total + 3)]

    assert factors[0] > 0
    assert factors[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    falling = factors[warmup:]
    assert falling == sorted(falling, reverse=True)
    assert all(floor <= factor <= 1.0 + 1e-12 for factor in falling)
    assert factors[total:] == [floor] * 3


@property_test
@given(schedules().filter(lambda schedule: schedule[1] < schedule[0]))
def test_joins_without_a_jump(schedule):
    total, warmup, floor = schedule
    assert warmup_cosine(warmup, total, warmup, floor) == pytest.approx(1.0)
    if warmup:
        assert warmup_cosine(warmup - 1, total, warmup, floor) == pytest.approx(1.0)
    steepest = (1.0 - floor) * math.pi / 2 / (total - warmup)
    for step in range(warmup, total):
        drop = warmup_cosine(step, total, warmup, floor) - warmup_cosine(step + 1, total, warmup, floor)
        assert drop <= steepest + 1e-12


def test_last_step_still_moves():
    assert warmup_cosine(9, total_steps=10) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    assert warmup_cosine(0, total_steps=1) == 1.0
    assert warmup_cosine(9, total_steps=10, warmup_steps=10) == 1.0


def test_half_way_is_half_way():
    assert warmup_cosine(6, total_steps=10, warmup_steps=2) == pytest.approx(0.5)
    assert warmup_cosine(6, total_steps=10, warmup_steps=2, floor=0.1) == pytest.approx(0.55)


def test_interrupted_run_has_the_same_rates():
    def scheduler():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-5)
        factor = functools.partial(warmup_cosine, total_steps=12, warmup_steps=3, floor=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def rates(optimizer, schedule, steps):
        result = []
        for _ in range(steps):
            result.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return result

    whole = rates(*scheduler(), 12)
    optimizer, schedule = scheduler()
    first = rates(optimizer, schedule, 5)
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = scheduler()
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    assert first + rates(optimizer, schedule, 7) == whole
    assert len(set(whole)) > 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"total_steps": 10, "warmup_steps": 11}, r"warmup_steps must lie in \[0, 10\]"),
        ({"total_steps": 10, "warmup_steps": -1}, r"warmup_steps must lie in \[0, 10\]"),
        ({"total_steps": 10, "floor": 1.5}, "floor must lie in"),
        ({"total_steps": 10, "floor": -0.1}, "floor must lie in"),
    ],
)
def test_impossible_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(0, **arguments)


@pytest.mark.parametrize("shape", ["linear", "cosine", "geometric"])
@pytest.mark.parametrize(("start", "end"), [(0.01, 0.3), (0.3, 0.01)])
def test_annealed_goes_from_start_to_end_without_turning_back(shape, start, end):
    way = [annealed(start, end, p / 20, shape) for p in range(21)]
    assert (way[0], way[-1]) == (start, end)
    assert way == sorted(way, reverse=start > end)
    assert (annealed(start, end, -1, shape), annealed(start, end, 2, shape)) == (start, end)
    # The way back is the same way.
    assert way[::-1] == pytest.approx([annealed(end, start, p / 20, shape) for p in range(21)])
    middle = math.sqrt(start * end) if shape == "geometric" else (start + end) / 2
    assert annealed(start, end, 0.5, shape) == pytest.approx(middle)


def test_annealed_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="shape must be one of linear, cosine, geometric, got 'step'"):
        annealed(0.1, 0.2, 0.5, "step")
    with pytest.raises(ValueError, match=r"a geometric way needs positive ends, got 0\.0 and 1\.0"):
        annealed(0.0, 1.0, 0.5, "geometric")
