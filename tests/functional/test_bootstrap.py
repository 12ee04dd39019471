"""Bootstrap intervals: how often they hold the truth, and where they are known exactly."""

from __future__ import annotations

import pytest
import torch

from lit_rlhf.functional import bootstrap_interval

TRIALS = 1500


def coverage(values, truth, shares=True, confidence=0.95):
    """Share of the columns whose interval holds the truth."""
    low, high = bootstrap_interval(
        values, torch.ones_like(values), confidence, torch.full((values.shape[1],), shares), resamples=1000
    )
    return ((low <= truth) & (truth <= high)).double().mean().item()


@pytest.mark.parametrize("prompts", [64, 256, 600])
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.8, 0.9])
def test_coverage_of_a_greedy_accuracy(prompts, chance):
    right = (torch.rand(prompts, TRIALS) < chance).double()
    assert 0.92 <= coverage(right, chance) <= 0.97


@pytest.mark.parametrize("prompts", [30, 64, 256])
@pytest.mark.parametrize("chance", [0.02, 0.95, 0.98])
def test_coverage_where_nearly_all_or_none_are_right(prompts, chance):
    """Plain quantiles hold the truth in half of the cases then, since all prompts may well be right."""
    right = (torch.rand(prompts, TRIALS) < chance).double()
    assert coverage(right, chance) >= 0.92


@pytest.mark.parametrize("prompts", [64, 256])
@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
def test_coverage_of_a_sampled_accuracy(prompts, mean):
    """Each prompt has its own difficulty, and eight samples."""
    chances = torch.distributions.Beta(2 * mean, 2 * (1 - mean)).sample((prompts, TRIALS))
    shares = torch.binomial(torch.full_like(chances, 8), chances).double() / 8
    assert 0.92 <= coverage(shares, mean) <= 0.97


def test_coverage_of_a_skewed_score_without_limits():
    scores = torch.distributions.Exponential(1.0).sample((100, TRIALS)).double()
    assert 0.92 <= coverage(scores, 1.0, shares=False) <= 0.97


def test_coverage_at_another_confidence():
    assert 0.76 <= coverage(torch.randn(100, TRIALS).double(), 0.0, shares=False, confidence=0.8) <= 0.84


def test_coverage_where_prompts_have_unequal_counts():
    """The mean over scored completions is a ratio, in which a prompt with more of them weighs more."""
    counts = torch.randint(0, 9, (80, TRIALS)).double()
    difficulty = torch.rand(80, TRIALS)
    sums = torch.binomial(counts.float(), difficulty).double()
    low, high = bootstrap_interval(sums, counts, resamples=1000)
    assert 0.92 <= ((low <= 0.5) & (high >= 0.5)).double().mean() <= 0.97


def test_coverage_over_several_sets():
    """Of sets of different difficulty as many prompts are drawn as there are: their difference is no noise."""
    sets = torch.tensor([0] * 100 + [1] * 40)
    right = (torch.rand(140, TRIALS) < torch.where(sets == 0, 0.9, 0.1)[:, None]).double()
    truth = (100 * 0.9 + 40 * 0.1) / 140
    ones = torch.ones_like(right)
    low, high = bootstrap_interval(right, ones, strata=sets, resamples=1000)
    assert 0.92 <= ((low <= truth) & (truth <= high)).double().mean() <= 0.97
    wide = bootstrap_interval(right, ones, resamples=1000)
    assert (high - low).mean() < 0.8 * (wide[1] - wide[0]).mean()


def test_the_mean_lies_inside():
    values, ones = torch.rand(50, 3).double(), torch.ones(50, 3)
    low, high = bootstrap_interval(values, ones)
    assert ((low < values.mean(dim=0)) & (values.mean(dim=0) < high)).all()


def test_the_same_values_give_the_same_interval_and_the_global_generator_is_left_alone():
    values, ones = torch.rand(40, 2).double(), torch.ones(40, 2)
    state = torch.get_rng_state()
    first, second = bootstrap_interval(values, ones), bootstrap_interval(values, ones)
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(torch.stack(first), torch.stack(bootstrap_interval(values, ones, seed=1)))


def test_many_prompts_are_drawn_in_parts():
    """Six million indices would not be drawn at once."""
    values = (torch.arange(3000) % 4 == 0).double()[:, None]
    low, high = bootstrap_interval(values, torch.ones_like(values))
    error = (0.25 * 0.75 / 3000) ** 0.5
    assert low.item() == pytest.approx(0.25 - 1.96 * error, abs=0.1 * error)
    assert high.item() == pytest.approx(0.25 + 1.96 * error, abs=0.1 * error)


def test_where_all_are_right_the_exact_limit_stands():
    """With a chance of 0.025 ** (1/20) = 0.8316 to be right, all of 20 are with a chance of 0.025."""
    low, high = bootstrap_interval(torch.ones(20, 1), torch.ones(20, 1), share_mask=torch.tensor([True]))
    assert (low.item(), high.item()) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    low, high = bootstrap_interval(torch.zeros(20, 1), torch.ones(20, 1), share_mask=torch.tensor([True]))
    assert (low.item(), high.item()) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))


def test_where_one_set_is_all_right_and_another_all_wrong():
    """As well as 10 of 10 can be said to be right, and 20 of 20 wrong, each for its share of the prompts."""
    right = torch.tensor([1.0] * 10 + [0.0] * 20)[:, None]
    sets = torch.tensor([0] * 10 + [1] * 20)
    low, high = bootstrap_interval(right, torch.ones(30, 1), share_mask=torch.tensor([True]), strata=sets)
    assert low.item() == pytest.approx(0.025 ** (1 / 10) / 3)
    assert high.item() == pytest.approx(1 / 3 + (1 - 0.025 ** (1 / 20)) * 2 / 3)


def test_of_one_score_without_limits_nothing_can_be_said():
    low, high = bootstrap_interval(torch.full((20, 1), 3.0), torch.ones(20, 1))
    assert low.isnan()
    assert high.isnan()


def test_without_prompts_or_without_values():
    for shape in ((0, 2), (3, 2)):
        low, high = bootstrap_interval(torch.zeros(shape), torch.zeros(shape), share_mask=torch.ones(2).bool())
        assert low.isnan().all()
        assert high.isnan().all()


def test_prompts_without_a_value_do_not_count():
    values, counts = torch.rand(30, 1).double(), torch.ones(30, 1)
    values[::3], counts[::3] = 0.0, 0.0
    low, high = bootstrap_interval(values, counts)
    there = values[counts > 0].mean()
    assert low.item() < there.item() < high.item()


def test_a_single_prompt():
    low, high = bootstrap_interval(torch.ones(1, 1), torch.ones(1, 1), share_mask=torch.tensor([True]))
    assert (low.item(), high.item()) == (pytest.approx(0.025), 1.0)
