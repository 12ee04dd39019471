"""Unbiased pass@k against counting every draw of k samples."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lit_rlhf.metrics import PassAtK

GENERATOR = torch.Generator().manual_seed(0)
CORRECT = torch.rand(9, 6, generator=GENERATOR) < torch.linspace(0, 1, 9)[:, None]


def counted(correct, k):
    """Mean over prompts of the share of k-subsets with a right sample."""
    shares = []
    for row in correct.tolist():
        draws = list(combinations(row, k))
        shares.append(sum(any(draw) for draw in draws) / len(draws))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_equals_counting_every_draw(k):
    metric = PassAtK(k)
    metric.update(CORRECT)
    assert metric.compute().item() == pytest.approx(counted(CORRECT, k), abs=1e-12)


def test_every_prompt_counts_the_same_however_they_are_batched_and_sampled():
    metric = PassAtK(2)
    batches = [CORRECT[:4], CORRECT[4:5], CORRECT[5:, :3]]
    for batch in batches:
        metric.update(batch)
    expected = sum(counted(batch, 2) * len(batch) for batch in batches) / 9
    assert metric.compute().item() == pytest.approx(expected, abs=1e-12)


def test_five_prompts_in_batches_of_four():
    metric = PassAtK(1)
    metric.update(torch.tensor([[True], [False], [True], [True]]))
    metric.update(torch.tensor([[False]]))
    assert metric.compute().item() == pytest.approx(0.6, abs=1e-12)
    assert metric.prompts == 5


def test_merges_as_ranks_do():
    whole, one, two = PassAtK(3), PassAtK(3), PassAtK(3)
    whole.update(CORRECT)
    one.update(CORRECT[:2])
    two.update(CORRECT[2:])
    one.merge_state(two)
    assert one.compute() == pytest.approx(whole.compute().item(), abs=1e-12)


def test_no_prompts_and_reset():
    metric = PassAtK(1)
    metric.update(torch.ones(2, 1, dtype=torch.bool))
    metric.update(torch.ones(0, 1, dtype=torch.bool))
    assert metric.compute() == 1.0
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert metric.compute().isnan()


def test_fewer_samples_than_k_are_refused():
    with pytest.raises(ValueError, match="k=4 with 3 samples"):
        PassAtK(4).update(torch.ones(2, 3, dtype=torch.bool))
