from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.callbacks import Throughput
from lit_rlhf.callbacks.throughput import peak_memory_gib

PHASES = ("generation", "rewards", "reference", "training")


def tokens_of(rollouts):
    completions = sum(int(rollout.completion_lengths.sum()) for rollout in rollouts)
    return completions, completions + sum(int(rollout.prompt_lengths.sum()) for rollout in rollouts)


def test_seconds_add_up_and_rates_are_tokens_over_seconds(fit, watch):
    own = Throughput()
    fit(None, [own], max_epochs=2)
    seconds = {phase: watch.final[f"time/{phase}"] for phase in PHASES}
    assert all(value > 0 for value in seconds.values())
    assert watch.final["time/iteration"] == pytest.approx(sum(seconds.values()))
    completions, both = tokens_of(watch.rollouts[-1:])
    for name, count, phase in (
        ("generated", completions, "generation"),
        ("rewarded", completions, "rewards"),
        ("scored", both, "reference"),
    ):
        assert watch.final[f"tokens/{name}_per_second"] == pytest.approx(count / seconds[phase], rel=1e-4)
    assert own.seconds.keys() == set(PHASES)
    assert own.tokens["generated"] == watch.final["tokens/generated"] == tokens_of(watch.rollouts)[0]
    assert own.tokens["trained"] == watch.final["tokens/trained"]


def test_trained_tokens_count_each_pass(fit, make_data, watch):
    """Without a penalty in the reward every row of a group that differs is trained on."""
    fit(make_data(passes=3), max_epochs=1)
    (rollout,) = watch.rollouts
    live = rollout.select((rollout.advantages != 0).any(dim=1))
    assert watch.final["tokens/trained"] == 3 * tokens_of([live])[1]


def test_no_rate_of_a_phase_that_did_not_run(fit, watch, make_trainer, make_data, policy_dir):
    fit(max_epochs=1, module={"kl_coef": 0.0})
    assert "tokens/scored_per_second" not in watch.final
    make_trainer(callbacks=[watch]).fit(PPOModule(policy_dir, kl_coef=0.0), make_data())
    assert watch.final["tokens/scored_per_second"] > 0  # values are scored, too


def test_totals_are_part_of_the_checkpoint(make_trainer, make_data, policy_dir, tmp_path):
    def run(epochs, folder, ckpt=None):
        own = Throughput()
        saving = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = make_trainer(callbacks=[own, saving], max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data(), ckpt_path=ckpt)
        return own

    whole = run(4, "whole")
    assert run(4, "again", tmp_path / "whole" / "epoch=1.ckpt").tokens == whole.tokens


def test_memory_is_a_peak(fit, watch):
    before = peak_memory_gib(torch.device("cpu"))
    fit(max_epochs=1)
    assert before <= watch.final["memory/peak_gib"] <= peak_memory_gib(torch.device("cpu")) + 1e-6


def test_changes_nothing(fit, weights):
    assert weights(fit()).equal(weights(fit(None, [Throughput()])))
