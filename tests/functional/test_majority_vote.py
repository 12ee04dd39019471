"""A majority vote against electing one answer at random among those with most votes."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch

from lit_rlhf.functional import majority_vote


def elected(row):
    """Chance that the elected answer is the right one, which is 0."""
    counts = Counter(answer for answer in row if answer is not None)
    if not counts:
        return Fraction(0)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(sum(answer == 0 for answer in winners), len(winners))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_outcome_of_an_election_among_three_answers(n):
    rows = list(itertools.product([0, 1, 2, None], repeat=n))
    answers = torch.tensor([[-1 if answer is None else answer for answer in row] for row in rows])
    result = majority_vote(answers, answers == 0, answers >= 0)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx([float(elected(row)) for row in rows], abs=1e-12)


def test_the_order_of_the_samples_does_not_matter():
    answers = torch.randint(0, 3, (20, 8))
    shuffled = answers[:, torch.randperm(8)]
    everyone = torch.ones(20, 8, dtype=torch.bool)
    one, other = (majority_vote(given, given == 1, everyone) for given in (answers, shuffled))
    assert torch.equal(one, other)


def test_it_beats_a_sample_where_the_right_answer_is_the_likeliest():
    right = torch.rand(4000, 9) < 0.4
    answers = torch.where(right, 0, torch.randint(1, 5, (4000, 9)))
    assert majority_vote(answers, right, torch.ones_like(right)).mean() > 0.6


def test_without_prompts():
    nothing = torch.zeros(0, 4, dtype=torch.long)
    assert majority_vote(nothing, nothing.bool(), nothing.bool()).tolist() == []
