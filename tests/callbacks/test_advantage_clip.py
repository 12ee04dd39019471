from __future__ import annotations

import pytest
import torch

from lit_rlhf import PPOModule
from lit_rlhf.callbacks import AdvantageClip, RolloutCallback, StdThresholdMask
from lit_rlhf.errors import ConfigurationError


class Spike(RolloutCallback):
    """One completion of each group is an outlier a thousand times as good as the deviation of the others."""

    runs_first = True

    def __init__(self, value=50.0):
        self.value = value

    def on_advantages_end(self, trainer, module, rollout):
        spikes = torch.zeros_like(rollout.advantages)
        spikes[::4] = self.value
        return rollout.replace(advantages=rollout.advantages + spikes)


@pytest.mark.parametrize("advantage_range", [0.5, 3.0])
def test_advantages_stay_in_range_and_the_rest_is_untouched(fit, watch, advantage_range):
    fit(None, max_epochs=1)
    (plain,) = watch.rollouts
    watch.rollouts.clear()
    fit(None, [AdvantageClip(advantage_range)], max_epochs=1)
    (clipped,) = watch.rollouts
    assert torch.equal(clipped.advantages, plain.advantages.clamp(-advantage_range, advantage_range))
    beyond = (plain.advantages.abs() > advantage_range) & plain.completion_mask
    share = float(beyond.sum() / plain.completion_mask.sum())
    assert watch.final["policy/advantage_clip_fraction"] == pytest.approx(share)
    assert share == 0 if advantage_range == 3.0 else share > 0.3  # a group of four has advantages up to sqrt(3)
    assert torch.equal(clipped.rewards, plain.rewards)


def test_an_outlier_no_longer_decides_the_step(fit, watch):
    fit(None, [Spike(), AdvantageClip(2.0)], max_epochs=1)
    assert watch.rollouts[0].advantages.abs().max() == 2.0
    fit(None, [Spike()], max_epochs=1)
    assert watch.rollouts[1].advantages.abs().max() > 40


@pytest.mark.parametrize("clip_first", [True, False])
def test_dead_groups_stay_at_zero(fit, watch, make_data, clip_first):
    callbacks = [AdvantageClip(0.1), StdThresholdMask()]
    data = make_data(rewards=lambda completions: [0.7] * len(completions))
    fit(data, callbacks if clip_first else callbacks[::-1], max_epochs=1, module={"lr": 1e-2})
    assert (watch.rollouts[0].advantages == 0).all()


def test_the_critics_targets_stay(make_trainer, make_data, policy_dir, watch):
    for callbacks in ([], [AdvantageClip(0.1)]):
        module = PPOModule(policy_dir, lr=1e-3, critic_lr=1e-3)
        make_trainer(callbacks=[*callbacks, watch]).fit(module, make_data())
    plain, clipped = watch.rollouts
    assert torch.equal(plain.returns, clipped.returns)
    assert plain.advantages.abs().max() > clipped.advantages.abs().max() == pytest.approx(0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bad_options(value):
    with pytest.raises(ConfigurationError, match=r"AdvantageClip: advantage_range must be a number in \(0, inf\), got"):
        AdvantageClip(value)
