from __future__ import annotations

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import (
    AdaptiveKL,
    AdvantageClip,
    DifficultySampler,
    DynamicSampling,
    EarlyStopInnerEpochs,
    KLSchedule,
    ReferenceSync,
    RolloutCallback,
    StdThresholdMask,
    WarmupCosine,
)
from lit_rlhf.errors import ConfigurationError


class Own(RolloutCallback):
    """A callback of a user's that has its own idea of the KL coefficient."""

    sets = ("KL coefficient",)


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (AdaptiveKL(0.1), KLSchedule(0.1, 0.2), "KL coefficient"),
        (KLSchedule(0.1, 0.2), KLSchedule(0.1, 0.2), "KL coefficient"),
        (Own(), KLSchedule(0.1, 0.2), "KL coefficient"),
        (WarmupCosine(), WarmupCosine(), "learning rate"),
        (WarmupCosine(), WarmupCosine(groups=["policy"]), "learning rate/policy"),
        (WarmupCosine(groups=["policy"]), WarmupCosine(groups=["value", "policy"]), "learning rate/policy"),
        (AdvantageClip(), AdvantageClip(3.0), "advantage range"),
        (StdThresholdMask(), StdThresholdMask(0.1), "std threshold of dead groups"),
        (EarlyStopInnerEpochs(0.1), EarlyStopInnerEpochs(0.2), "target KL of an iteration"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_two_that_set_the_same_are_refused(make_trainer, make_data, policy_dir, one, other, what, turned):
    one, other = (other, one) if turned else (one, other)
    module = GRPOModule(policy_dir)
    message = f"{type(one).__name__} and {type(other).__name__} both set the {what}: keep one of them"
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(callbacks=[one, other]).fit(module, make_data())
    assert module.policy is None


def test_a_scheduler_of_the_module_is_refused(make_trainer, make_data, policy_dir):
    class Scheduled(GRPOModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    data = make_data()
    with pytest.raises(ConfigurationError, match=r"WarmupCosine and the ConstantLR of Scheduled\.configure_optimizers"):
        make_trainer().fit(Scheduled(policy_dir), data)
    assert data.rollout is None


class HalveTruncated(RolloutCallback):
    """Sets rewards."""

    def on_rewards_end(self, trainer, module, rollout):
        return rollout.replace(rewards=rollout.rewards * (0.5 + 0.5 * rollout.finished.float()))


class Plain(L.Callback):
    """Sets nothing."""


def first_digits(completions):
    """Dead groups here and there."""
    return [float(text[:1].isdigit() or text[1:2].isdigit()) for text in completions]


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 7, 2, 5, 1, 6, 4], [4, 7, 1, 5, 0, 6, 2, 3]])
def test_any_order_gives_the_same_run(fit, make_data, weights, watch, order):
    def run(order):
        callbacks = [
            DynamicSampling(token_budget=100),
            DifficultySampler(0.2, 0.3),
            HalveTruncated(),
            KLSchedule(0.05, 0.3),
            ReferenceSync(weight=0.5),
            AdvantageClip(1.0),
            EarlyStopInnerEpochs(2e-4),
            Plain(),
        ]
        watch.rollouts.clear()
        data = make_data(rewards=first_digits, passes=3, prompts_per_iteration=4)
        module = fit(data, [callbacks[place] for place in order], max_epochs=4)
        kept = {name: value for name, value in watch.final.items() if not name.startswith(("time/", "memory/"))}
        return weights(module), {name: value for name, value in kept.items() if "per_second" not in name}

    expected, metrics = run(range(8))
    found, again = run(order)
    assert torch.equal(found, expected)
    assert again == metrics
    assert metrics["group/redrawn"] > 0
    assert 0 < metrics["policy/early_stopped_steps"] < 1
    assert metrics["policy/advantage_clip_fraction"] > 0


@pytest.mark.parametrize(
    "callback",
    [
        AdaptiveKL(0.1, final_target=0.05),
        AdvantageClip(1.0),
        DifficultySampler(),
        DynamicSampling(),
        EarlyStopInnerEpochs(0.01),
        KLSchedule(0.1, 0.2),
        ReferenceSync(),
        StdThresholdMask(0.1),
        WarmupCosine(0.5, groups=["policy"]),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_each_alone_in_fit_and_the_other_loops(make_trainer, make_data, policy_dir, rows, callback, tmp_path):
    """Also in the loops where it has nothing to do."""
    trainer = make_trainer(callbacks=[callback], max_epochs=2)
    module = GRPOModule(policy_dir, lr=1e-3)
    data = make_data(val=rows[:2])
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer.validate(module, data, ckpt_path=tmp_path / "x.ckpt")
    assert "val/accuracy" in trainer.callback_metrics
    trainer.predict(module, data)
