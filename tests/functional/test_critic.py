from __future__ import annotations

import pytest
import torch

from lit_rlhf.functional.critic import (
    clipped_value_loss,
    clipped_values,
    critic_error,
    critic_moments,
    explained_variance,
)


def test_value_loss_and_its_gradient():
    """V_old = 0, range 0.2, R = 1: inside the range the gradient is V - R, beyond it towards R it is gone."""
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(3), torch.ones(3))
    assert torch.allclose(loss, torch.tensor([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2]))
    loss.sum().backward()
    # 0.5: the clipped error (0.8) is the larger and constant; -0.5: the plain error (1.5) is the larger.
    assert torch.allclose(values.grad, torch.tensor([-0.9, 0.0, -1.5]))
    assert clipped_values(values.detach(), torch.zeros(3), torch.ones(3)).tolist() == [False, True, False]


def test_a_wide_range_is_plain_squared_error():
    values, returns = torch.randn(2, 20)
    assert torch.allclose(clipped_value_loss(values, torch.zeros(20), returns, 1e9), 0.5 * (values - returns) ** 2)


def test_explained_variance_and_error():
    mask = torch.ones(1, 4, dtype=torch.bool)
    returns = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    perfect = critic_moments(returns, returns, mask)
    assert explained_variance(perfect) == 1.0
    assert critic_error(perfect) == 0.0
    shifted = critic_moments(returns, returns + 5, mask)
    assert explained_variance(shifted) == pytest.approx(1.0)
    assert critic_error(shifted) == pytest.approx(5.0)
    constant = critic_moments(returns, torch.full_like(returns, 1.5), mask)
    assert explained_variance(constant) == pytest.approx(0.0)
    worse = critic_moments(returns, -returns, mask)
    assert explained_variance(worse) == pytest.approx(-3.0)


def test_moments_of_two_ranks_add_up():
    returns, values = torch.randn(2, 6, 5)
    mask = torch.rand(6, 5) < 0.7
    whole = critic_moments(returns, values, mask)
    halves = critic_moments(returns[:2], values[:2], mask[:2]) + critic_moments(returns[2:], values[2:], mask[2:])
    assert torch.allclose(whole, halves)
    r, v = returns[mask].double(), values[mask].double()
    assert explained_variance(whole) == pytest.approx(float(1 - (r - v).var() / r.var()))


def test_no_variance_is_missing_not_zero():
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(critic_moments(torch.full((1, 3), 0.7), torch.randn(1, 3), mask)).isnan()
    empty = critic_moments(torch.randn(1, 3), torch.randn(1, 3), ~mask)
    assert explained_variance(empty).isnan()
    assert critic_error(empty).isnan()
