from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import EarlyStopInnerEpochs, RolloutCallback, WarmupCosine
from lit_rlhf.errors import ConfigurationError


class Steps(RolloutCallback):
    """Weights after each optimizer step, the KL at its start, and the size of each micro-batch."""

    def __init__(self):
        self.weights, self.tokens, self.rates, self.moments = [[]], [[]], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.tokens[-1].append(int(batch.rows.completion_mask.sum()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            parameters = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            self.weights[-1].append(torch.cat([p.detach().flatten() for p in parameters]))
            states = trainer.optimizers[0].state
            self.moments.append(torch.cat([states[p]["exp_avg"].flatten() for p in parameters if p in states]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.weights.append([])
        self.tokens.append([])


def flat_rate():
    return WarmupCosine(warmup_steps=0, floor=1.0)


def test_beyond_the_target_nothing_moves_any_more(fit, make_data, watch):
    """A target that one step exceeds: of the four passes only the first is learned from, to the last bit."""
    steps = Steps()
    data = make_data(passes=4, micro_batch_size=5)
    module = fit(data, [EarlyStopInnerEpochs(1e-7), steps, flat_rate()], max_epochs=3)
    assert watch.final["policy/early_stopped_steps"] == 0.75
    for iteration in steps.weights[:3]:
        assert len(iteration) == 4
        assert all(torch.equal(iteration[0], later) for later in iteration[1:])
    for number in range(3):
        moments = steps.moments[4 * number : 4 * number + 4]
        assert all(torch.equal(moments[0], later) for later in moments[1:])
    # Micro-batches keep their number; those of the third and fourth pass hold nothing.
    for tokens in steps.tokens[:3]:
        assert all(count > 0 for count in tokens[:10])
        assert tokens[10:] == [0] * 10
    assert module.trainer.global_step == 12


def test_it_is_the_run_with_one_pass(fit, make_data, weights, policy_dir):
    stopped = fit(make_data(passes=3, micro_batch_size=5), [EarlyStopInnerEpochs(1e-7), flat_rate()], max_epochs=3)
    plain = fit(make_data(passes=1, micro_batch_size=5), [flat_rate()], max_epochs=3)
    moved = (weights(plain) - weights(AutoModelForCausalLM.from_pretrained(policy_dir))).norm()
    assert (weights(stopped) - weights(plain)).norm() < 1e-4 * moved


def test_the_schedule_and_the_count_of_steps_go_on(fit, make_data):
    with_stop, without = Steps(), Steps()
    fit(make_data(passes=3), [EarlyStopInnerEpochs(1e-7), with_stop], max_epochs=3)
    fit(make_data(passes=3), [without], max_epochs=3)
    assert with_stop.rates == without.rates


def test_a_target_that_is_never_reached_changes_nothing(fit, make_data, weights, watch):
    one = fit(make_data(passes=3), [EarlyStopInnerEpochs(1e3)])
    assert watch.final["policy/early_stopped_steps"] == 0
    assert torch.equal(weights(one), weights(fit(make_data(passes=3))))


def test_it_stops_at_the_first_step_beyond_the_target(make_trainer, make_data, policy_dir):
    """Measured anew, with the whole rollout and the weights that each step starts from."""

    class Divergence(RolloutCallback):
        def __init__(self):
            self.seen = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            from lit_rlhf.rollout.generation import evaluation_mode

            rollout = trainer.datamodule.rollout
            with evaluation_mode(pl_module):
                now = pl_module.forward_train(rollout).log_probs
            d = (now - rollout.old_log_probs)[rollout.completion_mask]
            self.seen.append(float((d.exp() - 1 - d).mean()))

    measured, steps = Divergence(), Steps()
    callbacks = [measured, steps, EarlyStopInnerEpochs(2e-3), flat_rate()]
    make_trainer(callbacks=callbacks).fit(GRPOModule(policy_dir, lr=1e-4), make_data(passes=8, micro_batch_size=7))
    exceeded = next(number for number, kl in enumerate(measured.seen) if kl > 2e-3)
    assert 2 <= exceeded < 7
    weights = steps.weights[0]
    moved = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert moved == [number < exceeded for number in range(1, 8)]


def test_metrics_are_of_the_steps_that_were_taken(fit, make_data, watch):
    fit(make_data(passes=1), [flat_rate()], max_epochs=1, module={"kl_placement": "loss", "entropy_coef": 0.5})
    plain = dict(watch.final)
    stop = [EarlyStopInnerEpochs(1e-9), flat_rate()]
    fit(make_data(passes=5), stop, max_epochs=1, module={"kl_placement": "loss", "entropy_coef": 0.5})
    # Two steps went through the model: the first, and the one whose KL was too large.
    assert watch.final["tokens/trained"] == 2 * plain["tokens/trained"]
    assert watch.final["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert 0 < watch.final["policy/old_kl"] < 0.1
    assert plain["policy/old_kl"] == 0


def test_the_critic_stops_too(make_trainer, make_data, policy_dir):
    steps = Steps()
    module = PPOModule(policy_dir, lr=1e-3, critic_lr=1e-2)
    make_trainer(callbacks=[EarlyStopInnerEpochs(1e-7), steps]).fit(module, make_data(passes=3))
    assert torch.equal(steps.weights[0][0], steps.weights[0][2])


def test_resume(resumed_equals_uninterrupted, make_data):
    logged, _ = resumed_equals_uninterrupted(
        lambda: [EarlyStopInnerEpochs(1e-3)], lambda: make_data(passes=4, micro_batch_size=5)
    )
    assert len({metrics["policy/early_stopped_steps"] for metrics in logged}) > 1, "it stops here and there"


def test_one_step_has_nothing_to_stop_and_says_so(fit, weights, caplog):
    with caplog.at_level(logging.INFO):
        one = fit(None, [EarlyStopInnerEpochs(1e-9)])
    assert "EarlyStopInnerEpochs: an iteration has one optimizer step" in caplog.text
    assert torch.equal(weights(one), weights(fit(None)))


def test_bad_options():
    with pytest.raises(ConfigurationError, match=r"target_kl must be a number in \(0, inf\), got 0"):
        EarlyStopInnerEpochs(0.0)


@pytest.mark.distributed
def test_all_ranks_stop_together(tmp_path, make_trainer, make_data, policy_dir):
    """At the same steps as one process."""

    class Save(Steps):
        def on_train_end(self, trainer, pl_module):
            seen = self.weights[:-1], self.tokens[:-1]
            torch.save(seen, tmp_path / f"{trainer.world_size}-{trainer.global_rank}")

    for devices in (1, 2):
        callbacks = [EarlyStopInnerEpochs(1e-3), Save(), flat_rate()]
        strategy = {"devices": 2, "strategy": "ddp_fork"} if devices == 2 else {}
        trainer = make_trainer(callbacks=callbacks, max_epochs=2, **strategy)
        trainer.fit(GRPOModule(policy_dir, lr=2e-3), make_data(passes=4, prompts_per_iteration=5, micro_batch_size=4))
    (single, _), (first, tokens), (second, other) = (
        torch.load(tmp_path / name, weights_only=False) for name in ("1-0", "2-0", "2-1")
    )
    for steps in zip(single, first, second, strict=True):
        stops = [[torch.equal(a, b) for a, b in pairwise(run)] for run in steps]
        assert stops[0] == stops[1] == stops[2]
        assert any(stops[0])
        for alone, mine, others in zip(*steps, strict=True):
            assert torch.equal(mine, others)
            assert torch.allclose(alone, mine, atol=1e-5)
    assert tokens[0][-1] == other[0][-1] == 0
