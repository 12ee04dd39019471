"""Ratings beside the verifier: counts, mean, rank correlation."""

from __future__ import annotations

import pytest
import torch

from lit_rlhf.metrics import HumanAgreement


def compute(ratings, scores, total=10, numbers=None):
    metric = HumanAgreement(total)
    ratings, scores = torch.tensor(ratings), torch.tensor(scores)
    metric.update(ratings, scores, torch.ones_like(ratings) if numbers is None else torch.tensor(numbers))
    return metric.compute()


def test_a_rank_correlation_does_not_ask_for_a_scale():
    ratings, scores = [1.0, 2.0, 3.0, 4.0], [-5.0, 0.0, 0.1, 100.0]
    assert compute(ratings, scores)["human_agreement"] == pytest.approx(1.0, abs=1e-4)
    assert compute(ratings, scores[::-1])["human_agreement"] == pytest.approx(-1.0, abs=1e-4)


def test_ties_share_their_rank():
    """Ranks (1, 2.5, 2.5, 4) and (1.5, 1.5, 3.5, 3.5): their sums of squares and products are 4.5, 4 and 3."""
    found = compute([1.0, 3.0, 3.0, 5.0], [0.0, 0.0, 1.0, 1.0])["human_agreement"]
    assert found == pytest.approx(3 / (4.5 * 4) ** 0.5, abs=1e-4)


@pytest.mark.parametrize(("ratings", "scores"), [([2.0, 2.0], [0.0, 1.0]), ([1.0, 2.0], [1.0, 1.0]), ([1.0], [1.0])])
def test_no_correlation_where_one_side_is_constant(ratings, scores):
    found = compute(ratings, scores)
    assert "human_agreement" not in found
    assert found["human_rating"] == sum(ratings) / len(ratings)


def test_counts_are_of_completions_and_of_ratings():
    found = compute([1.0, 4.0], [0.0, 1.0], total=7, numbers=[2.0, 3.0])
    assert (found["human_rated"], found["human_unmatched"]) == (2.0, 2.0)


def test_where_the_verifier_abstained_the_rating_counts_without_it():
    found = compute([1.0, 2.0, 6.0], [0.0, 1.0, float("nan")])
    assert found["human_rating"] == 3.0
    assert found["human_agreement"] == pytest.approx(1.0, abs=1e-4)


def test_nothing_joined():
    metric = HumanAgreement(3)
    metric.update(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert metric.compute() == {"human_rated": 0.0, "human_unmatched": 3.0}


def test_batches_do_not_change_a_digit():
    ratings, scores = torch.rand(9).double(), torch.rand(9).double()
    whole, parts = HumanAgreement(9), HumanAgreement(9)
    whole.update(ratings, scores, torch.ones(9))
    for rows in ([8, 7], [0, 1, 2, 3], [4, 5, 6]):
        parts.update(ratings[rows], scores[rows], torch.ones(len(rows)))
    assert parts.compute()["human_agreement"] == whole.compute()["human_agreement"]
