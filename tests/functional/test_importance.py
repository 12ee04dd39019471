"""Weights that correct for the engine, against exact expectations, and the threshold of the top-entropy tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rlhf.functional import sampling_weights, top_entropy_threshold
from lit_rlhf.functional.importance import SAMPLING_CORRECTIONS

property_test = settings(max_examples=60, deadline=None, derandomize=True)
logit_vectors = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
UNBOUNDED = {"low": 0.0, "high": 1e9}


def log_policy(values):
    return torch.tensor(values, dtype=torch.float64).log_softmax(-1)


@property_test
@given(logit_vectors, logit_vectors)
def test_weighted_expectations_under_the_engine_are_those_under_the_policy(policy, engine):
    old, sampling = log_policy(policy), log_policy(engine)
    mask = torch.ones(4, 1, dtype=torch.bool)
    weights, outside = sampling_weights(old[:, None], sampling[:, None], mask, **UNBOUNDED)
    values = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    under_engine = (sampling.exp() * weights[:, 0] * values).sum()
    torch.testing.assert_close(under_engine, (old.exp() * values).sum(), rtol=0, atol=1e-12)
    assert not outside.any()


@property_test
@given(logit_vectors, logit_vectors)
def test_a_sequence_weighs_the_product_of_its_tokens(policy, engine):
    """Over all two-token completions: only the product gives expectations of whole completions back."""
    old, sampling = (torch.cartesian_prod(p, p).reshape(-1, 2) for p in (log_policy(policy), log_policy(engine)))
    mask = torch.ones(16, 2, dtype=torch.bool)
    values = torch.arange(16, dtype=torch.float64).sin()
    weights, _ = sampling_weights(old, sampling, mask, "sequence_truncate", **UNBOUNDED)
    assert torch.equal(weights[:, 0], weights[:, 1])
    under_engine = (sampling.sum(1).exp() * weights[:, 0] * values).sum()
    torch.testing.assert_close(under_engine, (old.sum(1).exp() * values).sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("correction", "weights", "outside"),
    [
        ("off", [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], [[0, 0, 0], [0, 0, 0]]),
        ("token_truncate", [[2.0, 0.5, 0.0], [0.5, 1.0, 1.5]], [[1, 0, 0], [1, 0, 0]]),
        ("token_mask", [[0.0, 0.5, 0.0], [0.0, 1.0, 1.5]], [[1, 0, 0], [1, 0, 0]]),
        ("sequence_truncate", [[2.0, 2.0, 0.0], [0.5, 0.5, 0.5]], [[0, 0, 0], [1, 1, 1]]),
        ("sequence_mask", [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_ranges(correction, weights, outside):
    """Ratios 4, 1/2 (and a masked one) multiply to 2; 1/4, 1 and 3/2 to 3/8."""
    ratios = torch.tensor([[4.0, 0.5, float("nan")], [0.25, 1.0, 1.5]])
    mask = ~ratios.isnan()
    found, beyond = sampling_weights(ratios.log(), torch.zeros(2, 3), mask, correction, low=0.5, high=2.0)
    torch.testing.assert_close(found, torch.tensor(weights))
    assert beyond.int().tolist() == outside


@pytest.mark.parametrize("correction", SAMPLING_CORRECTIONS)
def test_an_engine_that_is_the_policy_is_not_corrected(correction):
    log_probs = -torch.rand(3, 5)
    mask = torch.rand(3, 5) < 0.7
    weights, outside = sampling_weights(log_probs, log_probs, mask, correction)
    assert torch.equal(weights, mask.float())
    assert not outside.any()


def test_unknown_correction():
    with pytest.raises(ValueError, match="'some'"):
        sampling_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "some")


@property_test
@given(st.lists(st.floats(0, 5, width=32), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_top_entropy_keeps_at_least_the_share_and_only_ties_beyond_it(entropies, share):
    values = torch.tensor(entropies)
    threshold = top_entropy_threshold(values, share)
    wanted = max(1, math.ceil(round(share * len(values), 6)))
    assert int((values >= threshold).sum()) >= wanted
    assert int((values > threshold).sum()) < wanted


def test_top_entropy_of_exact_shares():
    values = torch.arange(15.0)
    assert top_entropy_threshold(values, 0.2) == 12.0
    assert top_entropy_threshold(values, 1.0) == 0.0
    assert top_entropy_threshold(values[:0], 0.2) == math.inf
    with pytest.raises(ValueError, match="share"):
        top_entropy_threshold(values, 0.0)
