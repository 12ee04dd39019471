"""Means and intervals over prompts do not depend on how prompts came: batches, ranks, order."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.utilities import dim_zero_cat

from lit_rlhf.functional import bootstrap_interval
from lit_rlhf.metrics import PromptResults

NAMES = ["accuracy", "reward"]
RIGHT = (torch.rand(12, generator=torch.Generator().manual_seed(0)) < 0.6).double()
REWARDS = torch.rand(12, generator=torch.Generator().manual_seed(1)).double()
SCORED = torch.arange(12) % 4


def make(sets=("",), **options):
    return PromptResults(NAMES, sets, shares=["accuracy"], with_interval=["accuracy"], confidence=0.95, **options)


def add(metric, rows, place=0):
    rows = torch.tensor(rows, dtype=torch.long)
    values = {
        "accuracy": (RIGHT[rows], torch.ones(len(rows))),
        "reward": (REWARDS[rows] * (SCORED[rows] > 0), SCORED[rows]),
    }
    metric.update(place, rows, values)


@pytest.mark.parametrize("batches", [[range(12)], [[11], range(5, 11), range(5)], [[], *([row] for row in range(12))]])
def test_batches_and_order_do_not_change_a_digit(batches):
    metric = make()
    for batch in batches:
        add(metric, list(batch))
    low, high = bootstrap_interval(RIGHT[:, None], torch.ones(12, 1), share_mask=torch.tensor([True]))
    assert metric.compute() == {
        "accuracy": RIGHT.mean().item(),
        "reward": (REWARDS * (SCORED > 0)).sum().item() / SCORED.sum().item(),
        "accuracy_low": low.item(),
        "accuracy_high": high.item(),
    }


def test_ranks_are_gathered():
    whole, one, two = make(), make(), make()
    add(whole, range(12))
    add(one, range(0, 12, 2))
    add(two, range(1, 12, 2))
    add(two, [])
    merged = make()
    merged.rows = [dim_zero_cat(one.rows), dim_zero_cat(two.rows)]
    merged._update_count = 1
    assert merged.compute() == whole.compute()


def test_sets_have_their_own_and_together_are_all_prompts():
    metric = make(("easy", "hard"))
    add(metric, range(8), place=1)
    add(metric, range(8, 12), place=0)
    found = metric.compute()
    assert found["hard/accuracy"] == RIGHT[:8].mean().item()
    assert found["easy/accuracy"] == RIGHT[8:].mean().item()
    assert found["accuracy"] == pytest.approx(RIGHT.mean().item(), abs=1e-12)
    assert {"accuracy_low", "hard/accuracy_low", "easy/accuracy_high"} <= found.keys()


def test_the_same_place_in_two_sets_is_two_prompts():
    metric = make(("a", "b"))
    add(metric, [3], place=0)
    add(metric, [3], place=1)
    assert metric.compute()["a/accuracy"] == metric.compute()["accuracy"] == RIGHT[3].item()


def test_what_no_prompt_has_is_left_out():
    metric = make()
    rows = torch.arange(2)
    metric.update(0, rows, {"accuracy": (torch.ones(2), torch.ones(2)), "reward": (torch.zeros(2), torch.zeros(2))})
    assert set(metric.compute()) == {"accuracy", "accuracy_low", "accuracy_high"}


def test_no_prompts_and_reset():
    metric = make()
    add(metric, [])
    assert metric.compute() == {}
    add(metric, [0, 1])
    metric.reset()
    add(metric, [2])
    assert metric.compute()["accuracy"] == RIGHT[2].item()


def test_without_confidence_there_are_no_intervals():
    metric = PromptResults(NAMES, shares=["accuracy"], with_interval=["accuracy"])
    add(metric, range(12))
    assert set(metric.compute()) == set(NAMES)
