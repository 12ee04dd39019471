from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf import functional
from lit_rlhf.functional.standard_scores import standard_scores

NAN = float("nan")


def test_each_column_in_each_population() -> None:
    values = torch.tensor([[1.0, 100.0], [3.0, 300.0], [5.0, 5.0], [5.0, NAN], [5.0, 7.0]])
    scores, divisor = standard_scores(values, torch.tensor([0, 0, 1, 1, 1]), 2, eps=0.0)
    assert scores[:2].tolist() == [[-1, -1], [1, 1]]
    assert scores[2:, 0].tolist() == [0, 0, 0]
    assert scores[[2, 4], 1].tolist() == [-1, 1]
    assert scores[3, 1].isnan()
    assert divisor[:, 0].tolist() == [1, 1, 0, 0, 0]


def test_missing_values_enter_no_statistic() -> None:
    scores, _ = standard_scores(
        torch.tensor([[1.0], [NAN], [0.0], [1.0]]), torch.zeros(4, dtype=torch.long), 1, eps=0.0
    )
    assert scores[[0, 2, 3], 0].tolist() == pytest.approx([0.7071, -1.4142, 0.7071], abs=1e-4)
    scores, _ = standard_scores(torch.full((3, 1), NAN), torch.zeros(3, dtype=torch.long), 1)
    assert scores.isnan().all()


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 64), st.sampled_from([0.0, 1e-4]))
def test_equal_values_are_exactly_zero(value: float, count: int, eps: float) -> None:
    scores, _ = standard_scores(torch.full((count, 1), value), torch.zeros(count, dtype=torch.long), 1, eps)
    assert scores.eq(0).all()


def test_ranks_together_are_one() -> None:
    torch.manual_seed(0)
    values, population = torch.randn(12, 3), torch.randint(0, 3, (12,))
    values[2, 1] = NAN
    whole, _ = standard_scores(values, population, 3)
    halves = (slice(0, 5), slice(5, 12))
    sums: list[list[torch.Tensor]] = [[], []]

    def record(sums_of_one: torch.Tensor, call: int) -> torch.Tensor:
        sums[call].append(sums_of_one)
        return sums_of_one

    # First the totals of each rank, then, with the totals of all, the squares.
    for half in halves:
        standard_scores(
            values[half], population[half], 3, sum_over_ranks=lambda s: record(s, 0) if s.shape[1] == 6 else s
        )
    totals = sums[0][0] + sums[0][1]
    for half in halves:
        standard_scores(
            values[half], population[half], 3, sum_over_ranks=lambda s: totals if s.shape[1] == 6 else record(s, 1)
        )
    squares = sums[1][0] + sums[1][1]
    parts = [
        standard_scores(
            values[half], population[half], 3, sum_over_ranks=lambda s: totals if s.shape[1] == 6 else squares
        )[0]
        for half in halves
    ]
    torch.testing.assert_close(torch.cat(parts), whole, equal_nan=True)


def test_no_module_hides_an_exported_function() -> None:
    assert importlib.import_module("lit_rlhf.callbacks.normalize_rewards")
    assert all(callable(getattr(functional, name)) for name in functional.__all__)
