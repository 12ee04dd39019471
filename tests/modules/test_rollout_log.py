"""What the log says of a rollout, against counting it by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lit_rlhf.callbacks import NormalizeRewards, RolloutCallback


def pairs_by_hand(rollout):
    rows = zip(rollout.completion_ids.tolist(), rollout.completion_lengths.tolist(), strict=True)
    ids = [tuple(row[:length]) for row, length in rows]
    groups = rollout.group_index.tolist()
    pairs = [(ids[a], ids[b]) for a, b in combinations(range(len(ids)), 2) if groups[a] == groups[b]]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_variety(fit, make_data, watch):
    fit(make_data(max_new_tokens=2, group_size=6), max_epochs=1)
    (rollout,) = watch.rollouts
    expected = pairs_by_hand(rollout)
    assert 0 < expected < 1
    assert watch.final["group/same_pairs"] == pytest.approx(expected)
    assert "completion/repetition" not in watch.final  # no completion has a run of four tokens


def test_one_completion_per_prompt_has_no_pairs(fit, make_data, watch):
    fit(make_data(group_size=1), module={"baseline": "none", "scale_by_std": False}, max_epochs=1)
    assert "group/same_pairs" not in watch.final


def test_repetition(fit, make_data, watch):
    fit(make_data(max_new_tokens=30), max_epochs=1)
    (rollout,) = watch.rollouts
    repeated = total = 0
    for row, length in zip(rollout.completion_ids.tolist(), rollout.completion_lengths.tolist(), strict=True):
        runs = [tuple(row[start : start + 4]) for start in range(length - 3)]
        repeated, total = repeated + len(runs) - len(set(runs)), total + len(runs)
    assert watch.final["completion/repetition"] == pytest.approx(repeated / total)


def test_sampled_entropy_estimates_the_exact_one(fit, make_data, watch):
    """With a learning signal on every row both are means over the same tokens."""

    def distinct(completions, **columns):
        return [float(place) for place, _ in enumerate(completions)]

    fit(make_data(rewards=distinct, group_size=24, max_new_tokens=8), max_epochs=1, module={"kl_coef": 0.0})
    assert watch.final["sampling/entropy"] == pytest.approx(watch.final["policy/entropy"], rel=0.05)


class Give(RolloutCallback):
    def __init__(self, rewards, scored=None):
        self.rewards, self.scored = torch.tensor(rewards), scored

    def on_rewards_end(self, trainer, module, rollout):
        scored = rollout.scored_mask if self.scored is None else torch.tensor(self.scored)
        return rollout.replace(rewards=self.rewards, scored_mask=scored)


def test_range_and_deviation_of_rewards(fit, watch):
    rewards = [-2.0, 0.5, 0.5, 3.0] * 6
    fit(None, [Give(rewards)], max_epochs=1)
    assert (watch.final["reward/min"], watch.final["reward/max"]) == (-2.0, 3.0)
    assert watch.final["reward/std"] == pytest.approx(float(torch.tensor(rewards).std(correction=0)))
    assert "reward/mean_square" not in watch.final


def test_the_deviation_is_of_rewards_before_they_were_normalised(fit, watch):
    given = [-2.0, 0.5, 0.5, 3.0] * 6
    fit(None, [Give(given), NormalizeRewards(over="batch")], max_epochs=1)
    assert watch.rollouts[0].rewards.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
    assert watch.final["reward/std"] == pytest.approx(float(torch.tensor(given).std(correction=0)))
    assert watch.final["group/reward_std"] == pytest.approx(watch.final["reward/std"]), "every group has these four"


def test_unscored_rewards_are_in_none_of_them(fit, watch):
    fit(None, [Give([9.0, 0.5, 0.5, 1.0] * 6, [False, True, True, True] * 6)], max_epochs=1)
    assert watch.final["reward/max"] == 1.0
    assert watch.final["reward/std"] == pytest.approx(float(torch.tensor([0.5, 0.5, 1.0]).std(correction=0)))
    watch.final.clear()
    fit(None, [Give([9.0, 0.5, 0.5, 1.0] * 6, [False] * 24)], max_epochs=1)
    assert not {"reward", "reward/min", "reward/max", "reward/std"} & watch.final.keys()
