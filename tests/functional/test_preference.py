from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf.functional import bradley_terry_loss

scores = st.floats(-30, 30)


@given(scores, scores, st.floats(-100, 100))
def test_is_the_negative_log_probability_and_blind_to_a_common_offset(chosen: float, rejected: float, offset: float):
    pair = torch.tensor([[chosen], [rejected]], dtype=torch.float64)
    expected = math.log1p(math.exp(rejected - chosen))
    assert bradley_terry_loss(*pair).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert bradley_terry_loss(*(pair + offset)).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(scores, scores)
def test_gradient_is_the_probability_of_the_wrong_order(chosen: float, rejected: float):
    pair = torch.tensor([[chosen], [rejected]], dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(pair[0], pair[1]).sum().backward()
    wrong = 1 / (1 + math.exp(chosen - rejected))
    assert pair.grad is not None
    assert pair.grad.flatten().tolist() == pytest.approx([-wrong, wrong], rel=1e-6, abs=1e-12)


def test_the_two_orders_have_probabilities_that_add_up_to_one():
    a, b = torch.randn(2, 50, dtype=torch.float64)
    total = (-bradley_terry_loss(a, b)).exp() + (-bradley_terry_loss(b, a)).exp()
    torch.testing.assert_close(total, torch.ones(50, dtype=torch.float64))


def test_large_margins_stay_finite_with_finite_gradients():
    chosen = torch.tensor([1e4, -1e4, 3e38], requires_grad=True)
    loss = bradley_terry_loss(chosen, -chosen.detach().clamp(max=1e4))
    assert loss.tolist() == [0.0, 2e4, 0.0]
    loss.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [0.0, -1.0, 0.0]


def test_half_precision_scores_are_widened_before_they_are_subtracted():
    chosen, rejected = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([-1.0], dtype=torch.bfloat16)
    assert bradley_terry_loss(rejected, chosen).item() == 257.0  # 256 in bfloat16
    assert bradley_terry_loss(rejected, chosen).dtype == torch.float32


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="as many chosen as rejected"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2, 1))
