"""Log-probabilities and entropy against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from lit_rlhf.functional import entropy, token_log_probs

property_test = settings(max_examples=40, deadline=None, derandomize=True)
logit_rows = st.integers(1, 6).flatmap(
    lambda vocab: st.lists(st.lists(st.floats(-30, 30), min_size=vocab, max_size=vocab), min_size=1, max_size=4)
)
temperatures = st.floats(0.1, 5.0)


@property_test
@given(logit_rows, temperatures, st.randoms(use_true_random=False))
def test_equals_log_softmax_in_value_and_gradient(rows, temperature, random):
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([random.randrange(len(rows[0])) for _ in rows])
    weights = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)

    result = token_log_probs(logits, ids, temperature)
    expected = (logits / temperature).log_softmax(-1)[torch.arange(len(rows)), ids]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        torch.autograd.grad((weights * result).sum(), logits)[0],
        torch.autograd.grad((weights * expected).sum(), logits)[0],
        rtol=0,
        atol=1e-11,
    )


def test_leading_dimensions_are_kept():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 6, 3], [1, 2, 5]])
    result = token_log_probs(logits, ids)
    assert result.shape == (2, 3)
    assert result[1, 2].item() == pytest.approx(logits[1, 2].log_softmax(-1)[5].item(), abs=1e-6)
    assert entropy(logits).shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_floats_are_computed_in_float32(dtype):
    logits = (torch.randn(5, 50, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    ids = torch.arange(5)
    result = token_log_probs(logits, ids, temperature=0.7)
    assert result.dtype == torch.float32
    assert entropy(logits, 0.7).dtype == torch.float32
    torch.testing.assert_close(result.double(), token_log_probs(logits.double(), ids, 0.7), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy(logits, 0.7).double(), entropy(logits.double(), 0.7), rtol=0, atol=1e-5)


def test_bfloat16_logits_over_a_large_vocabulary():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(16, 151_936, generator=generator) * 3).bfloat16()
    ids = torch.randint(151_936, (16,), generator=generator)
    exact = logits.double().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    naive = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    assert (token_log_probs(logits, ids).double() - exact).abs().max() < 3e-5
    assert (naive.double() - exact).abs().max() > 0.03  # what the float32 path is there to prevent


def test_impossible_token():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert token_log_probs(logits, torch.tensor([1])).item() == -torch.inf
    assert token_log_probs(logits, torch.tensor([2])).exp().item() == pytest.approx(0.5)


@property_test
@given(logit_rows, temperatures)
def test_entropy_equals_categorical_in_value_and_gradient(rows, temperature):
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    result = entropy(logits, temperature)
    expected = Categorical(logits=logits / temperature).entropy()
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(result.sum(), logits)[0],
        torch.autograd.grad(expected.sum(), logits)[0],
        rtol=0,
        atol=1e-10,
    )


@property_test
@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=5),
    st.integers(1, 4),
    temperatures,
)
def test_impossible_tokens_change_neither_entropy_nor_gradient(possible, impossible, temperature):
    short = torch.tensor([possible], dtype=torch.float64, requires_grad=True)
    row = [-torch.inf] * impossible + possible
    long = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(entropy(long, temperature), entropy(short, temperature), rtol=0, atol=1e-12)

    (short_gradient,) = torch.autograd.grad(entropy(short, temperature).sum(), short)
    (long_gradient,) = torch.autograd.grad(entropy(long, temperature).sum(), long)
    assert long_gradient[0, :impossible].tolist() == [0.0] * impossible
    torch.testing.assert_close(long_gradient[:, impossible:], short_gradient, rtol=0, atol=1e-12)


def test_half_precision_mask_value_overflows_to_an_impossible_token():
    logits = torch.tensor([[1.0, 1.0, -1e9]]).half()
    assert logits[0, 2].isneginf()
    assert entropy(logits).exp().item() == pytest.approx(2.0, rel=1e-6)


def test_entropy_between_its_extremes():
    assert entropy(torch.zeros(10, dtype=torch.float64)).exp().item() == pytest.approx(10.0, rel=1e-14)
    assert entropy(torch.tensor([1000.0, 0.0, 0.0])).item() == 0.0
    logits = torch.tensor([2.0, 0.0, -1.0])
    by_temperature = [entropy(logits, temperature).item() for temperature in (0.25, 0.5, 1.0, 2.0)]
    assert by_temperature == sorted(by_temperature)
    assert by_temperature[0] < by_temperature[-1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_log_probs(torch.zeros(1, 3), torch.tensor([0]), temperature)
    with pytest.raises(ValueError, match="temperature must be positive"):
        entropy(torch.zeros(1, 3), temperature)
