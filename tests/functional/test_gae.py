from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional.gae import (
    gae_advantages,
    masked_moments,
    place_outcome,
    reward_to_go,
    standardize,
)


def brute_force(rewards, values, mask, gamma, lam, bootstrap):
    """Double sum over the tokens that count: A_t = sum_k (gamma lambda)^k delta_{t+k}."""
    result = torch.zeros_like(values)
    for row in range(len(values)):
        places = mask[row].nonzero()[:, 0].tolist()
        for i, t in enumerate(places):
            total = 0.0
            for k, s in enumerate(places[i:]):
                following = values[row, places[i + k + 1]] if i + k + 1 < len(places) else bootstrap[row]
                total += (gamma * lam) ** k * (rewards[row, s] + gamma * following - values[row, s])
            result[row, t] = total
    return result


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_equals_a_double_sum(seed, width, gamma, lam):
    """With random lengths, holes and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 4, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, width, generator=generator) < 0.7
    bootstrap = torch.randn(4, generator=generator, dtype=torch.float64)
    found = gae_advantages(rewards, values, mask, gamma, lam, bootstrap)
    assert torch.allclose(found, brute_force(rewards, values, mask, gamma, lam, bootstrap), atol=1e-12)
    zero = torch.zeros_like(bootstrap)
    plain = gae_advantages(rewards, values, mask, gamma, lam)
    assert torch.allclose(plain, brute_force(rewards, values, mask, gamma, lam, zero), atol=1e-12)


def test_lambda_one_is_return_minus_value_and_zero_the_one_step_error():
    rewards = torch.tensor([[0.0, 0.0, 2.0, 9.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 1.0, 0.25, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    one = gae_advantages(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    returns = reward_to_go(rewards, mask, gamma=0.9)
    assert torch.allclose(returns[0, :3], torch.tensor([1.62, 1.8, 2.0], dtype=torch.float64))
    assert torch.allclose(one[mask], (returns - values)[mask])
    zero = gae_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.0)
    expected = torch.tensor([0.9 * 1.0 - 0.5, 0.9 * 0.25 - 1.0, 2.0 - 0.25], dtype=torch.float64)
    assert torch.allclose(zero[0, :3], expected)


def test_worked_examples():
    """Rewards 2, 4, 6, 8 of one-token completions: advantages over V = 5, and over a critic that says 3."""
    rewards, mask = torch.tensor([[2.0], [4.0], [6.0], [8.0]]), torch.ones(4, 1, dtype=torch.bool)
    right = gae_advantages(rewards, torch.full((4, 1), 5.0), mask)
    assert right.flatten().tolist() == [-3.0, -1.0, 1.0, 3.0]
    wrong = gae_advantages(rewards, torch.full((4, 1), 3.0), mask)
    assert wrong.flatten().tolist() == [-1.0, 1.0, 3.0, 5.0]


def test_padding_and_neighbours_change_nothing():
    rewards, values = torch.randn(2, 1, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    alone = gae_advantages(rewards, values, mask)
    garbage = torch.full((1, 2), float("nan"))
    wide = [torch.cat([x, garbage], dim=1) for x in (rewards, values)]
    wide_mask = torch.tensor([[True, True, True, False, False]])
    other = torch.randn(1, 5)
    both = gae_advantages(
        torch.cat([wide[0], other]), torch.cat([wide[1], other]), torch.cat([wide_mask, ~wide_mask | wide_mask])
    )
    assert torch.equal(both[0, :3], alone[0])
    assert (both[0, 3:] == 0).all()


def test_holes_carry_the_next_value():
    """A tool's output in the middle of a completion: as if it were not there."""
    mask = torch.tensor([[True, False, False, True]])
    rewards = torch.tensor([[0.0, 5.0, 5.0, 1.0]])
    values = torch.tensor([[0.2, 9.0, 9.0, 0.6]])
    with_hole = gae_advantages(rewards, values, mask, 0.9, 0.8)
    without = gae_advantages(rewards[:, [0, 3]], values[:, [0, 3]], mask[:, [0, 3]], 0.9, 0.8)
    assert torch.equal(with_hole[:, [0, 3]], without)
    assert (with_hole[:, 1:3] == 0).all()


def test_outcome_stands_at_the_last_token_that_counts():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    assert place_outcome(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-100, 100))
def test_standardize_has_mean_zero_and_variance_one(seed, shift):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 7, generator=generator) * 3 + shift
    mask = torch.rand(5, 7, generator=generator) < 0.6
    mask[0, :2] = True
    garbage = torch.where(mask, values, torch.full_like(values, float("nan")))
    white = standardize(garbage, mask)
    kept = white[mask].double()
    assert kept.mean().abs() < 1e-6
    assert kept.var(correction=0) == pytest.approx(1.0, abs=1e-5)
    assert (white[~mask] == 0).all()
    # Two halves with summed moments: what two ranks do.
    moments = masked_moments(values[:2], mask[:2]) + masked_moments(values[2:], mask[2:])
    halves = torch.cat([standardize(values[:2], mask[:2], moments), standardize(values[2:], mask[2:], moments)])
    assert torch.allclose(halves, white, atol=1e-6)


def test_standardize_of_equal_values_is_zero():
    white = standardize(torch.full((2, 3), 0.7), torch.ones(2, 3, dtype=torch.bool))
    assert white.abs().max() < 1e-3
    assert (standardize(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)) == 0).all()


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="must have one shape"):
        gae_advantages(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))
