"""Sums over counts and maxima, over micro-batches and ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from lit_rlhf.metrics import IterationMetrics

MEANS, MAXIMA = ["kl", "reward", "clip_fraction"], ["length", "ratio"]


@pytest.fixture
def ranks():
    """Two ranks: 2.0 over 20 tokens and 2.0 over 4; nothing was clipped or counted on either."""
    one, two = IterationMetrics(MEANS, MAXIMA), IterationMetrics(MEANS, MAXIMA)
    one.update(
        {"kl": (torch.tensor(2.0), 20), "reward": (torch.tensor(3.0), torch.tensor(4))}, {"length": torch.tensor(7)}
    )
    two.update({"kl": (2.0, 4.0)}, {"length": torch.tensor(9)})
    two.update({"reward": (-1.0, 4), "kl": (0.0, 0)}, {"length": torch.tensor(5)})
    return one, two


EXPECTED = {"kl": 4 / 24, "reward": 2 / 8, "length": 9.0}


def test_micro_batches_are_weighted_by_their_counts():
    metrics = IterationMetrics(["kl"], [])
    metrics.update({"kl": (torch.tensor(2.0), 20)})
    metrics.update({"kl": (torch.tensor(2.0), 4)})
    assert metrics.compute() == {"kl": pytest.approx(4 / 24, abs=1e-12)}


def test_so_far_is_of_this_rank_and_ends_with_a_reset():
    metrics = IterationMetrics(["kl", "reward"], [])
    metrics.update({"kl": (torch.tensor(2.0), 20)})
    metrics.update({"kl": (1.0, 4), "reward": (5.0, 1)})
    assert metrics.so_far("kl").tolist() == [3.0, 24.0]
    assert metrics.compute()["kl"] == pytest.approx(3 / 24)
    metrics.reset()
    assert metrics.so_far("kl").tolist() == [0.0, 0.0]


def test_an_empty_window_is_left_out():
    metrics = IterationMetrics(MEANS, MAXIMA)
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert metrics.compute() == {}
    metrics.update({"kl": (0.0, 0)})
    assert metrics.compute() == {}
    metrics.update({"reward": (0.0, 3)}, {"ratio": torch.tensor(0.0)})
    assert metrics.compute() == {"reward": 0.0, "ratio": 0.0}


def test_maxima_of_negative_numbers():
    metrics = IterationMetrics([], ["length", "ratio"])
    for value in (-3.0, -1.5, -2.0):
        metrics.update({}, {"ratio": torch.tensor(value)})
    assert metrics.compute() == {"ratio": -1.5}


def test_a_nan_is_not_hidden():
    metrics = IterationMetrics(["kl"], ["ratio"])
    for value in (1.0, float("nan"), 2.0):
        metrics.update({"kl": (value, 1)}, {"ratio": torch.tensor(value)})
    values = metrics.compute()
    assert list(values) == ["kl", "ratio"]
    assert all(math.isnan(value) for value in values.values())


def test_maxima_of_integers_and_half_precision():
    metrics = IterationMetrics([], ["length", "ratio"])
    metrics.update({}, {"length": torch.tensor(2**40 + 1), "ratio": torch.tensor(1.5, dtype=torch.bfloat16)})
    assert metrics.compute() == {"length": 2**40 + 1, "ratio": 1.5}


def test_merged_states_are_those_of_all_ranks(ranks):
    one, two = ranks
    one.merge_state(two)
    assert one.compute() == pytest.approx(EXPECTED, abs=1e-12)


def test_synchronised_states_are_those_of_all_ranks(ranks):
    one, two = ranks
    for metric in ranks:
        metric = copy.deepcopy(metric)
        gathered = {id(getattr(metric, name)): [getattr(one, name), getattr(two, name)] for name in metric._defaults}
        calls = []

        def gather(state, group=None, gathered=gathered, calls=calls):
            calls.append(state)
            return gathered[id(state)]

        metric.dist_sync_fn, metric.distributed_available_fn = gather, lambda: True
        assert metric.compute() == pytest.approx(EXPECTED, abs=1e-12)
        assert len(calls) == 3, "the number of collectives must not grow with the number of metrics"


def test_reset_starts_the_next_iteration(ranks):
    one, _ = ranks
    one.reset()
    one.update({"kl": (1.0, 2)}, {"length": torch.tensor(1)})
    assert one.compute() == {"kl": 0.5, "length": 1.0}


def test_sums_are_kept_in_double_precision():
    metrics = IterationMetrics(["tokens"], [])
    for total in (2.0**24, 1.0, 1.0, 1.0):
        metrics.update({"tokens": (torch.tensor(total), 1)})
    assert metrics.compute() == {"tokens": (2.0**24 + 3) / 4}


def test_the_graph_is_not_kept():
    metrics = IterationMetrics(["kl"], ["ratio"])
    value = torch.tensor(2.0, requires_grad=True)
    metrics.update({"kl": (value * 3, 2)}, {"ratio": value * 5})
    assert not metrics.sums.requires_grad
    assert not metrics.peaks.requires_grad
    assert metrics.compute() == {"kl": 3.0, "ratio": 10.0}


@pytest.mark.parametrize(
    "update", [({"unknown": (1.0, 1)},), ({}, {"unknown": torch.tensor(1.0)})], ids=["mean", "maximum"]
)
def test_an_unknown_name_is_an_error(update):
    with pytest.raises(KeyError, match="unknown"):
        IterationMetrics(MEANS, MAXIMA).update(*update)


def test_minima_are_those_of_all_ranks():
    one, two = (IterationMetrics([], ["longest"], ["lowest", "unseen"]) for _ in range(2))
    one.update({}, {"longest": torch.tensor(3.0)}, {"lowest": torch.tensor(-1.5)})
    one.update({}, minima={"lowest": torch.tensor(0.5)})
    two.update({}, {"longest": torch.tensor(7.0)}, {"lowest": torch.tensor(-4.0)})
    assert copy.deepcopy(one).compute() == {"longest": 3.0, "lowest": -1.5}
    one.merge_state(two)
    assert one.compute() == {"longest": 7.0, "lowest": -4.0}
