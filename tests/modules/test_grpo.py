from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lit_rlhf import GRPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback, StdThresholdMask
from lit_rlhf.errors import ConfigurationError


def make_data(rows: Any, rewards: Any, **options: Any) -> RolloutDataModule:
    defaults = {"prompts_per_iteration": 6, "group_size": 4, "max_new_tokens": 6, "seed": 0}
    return RolloutDataModule(rows, rewards=rewards, **{**defaults, **options})


class Watch(RolloutCallback):
    """Keeps every rollout and every iteration's metrics."""

    def __init__(self) -> None:
        self.rollouts: list[RolloutBatch] = []
        self.metrics: list[dict[str, float]] = []

    def on_advantages_end(self, trainer: Any, module: Any, rollout: RolloutBatch) -> None:
        self.rollouts.append(rollout)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.metrics.append({})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.final = {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_worked_example(make_trainer, policy_dir, rows):
    """Rewards 2, 4, 6, 8 in each group: mean 5, deviation 2.236, advantages -1.34, -0.45, 0.45, 1.34."""

    def rising(completions: list[str]) -> list[float]:
        return [2.0, 4.0, 6.0, 8.0] * (len(completions) // 4)

    watch = Watch()
    make_trainer(callbacks=[watch]).fit(GRPOModule(policy_dir, kl_coef=0.0), make_data(rows, [rising]))
    rollout = watch.rollouts[0]
    first_token = rollout.advantages[:, 0].reshape(-1, 4)
    expected = torch.tensor([-1.34, -0.45, 0.45, 1.34])
    assert torch.equal(first_token.round(decimals=2), expected.expand(6, 4))
    on_tokens = rollout.advantages[rollout.completion_mask]
    assert (on_tokens != 0).all()
    assert (rollout.advantages[~rollout.completion_mask] == 0).all()


@pytest.mark.parametrize("options", [{}, {"passes": 2}, {"steps_per_pass": 3, "micro_batch_size": 5}])
def test_ratio_is_one_before_the_first_step(make_trainer, policy_dir, rows, digits, options):
    watch = Watch()
    trainer = make_trainer(callbacks=[watch], max_epochs=3)
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data(rows, [digits], temperature=0.7, **options))
    assert watch.final["sampling/log_prob_gap"] < 1e-5
    assert watch.final["policy/first_step_ratio_gap"] < 1e-5
    if not options:  # one pass in one step: by construction
        assert watch.final["policy/first_step_ratio_gap"] == 0.0
        assert watch.final["policy/clip_fraction"] == 0.0


def test_no_reference_at_coefficient_zero(make_trainer, policy_dir, rows, digits):
    module = GRPOModule(policy_dir, kl_coef=0.0)
    trainer = make_trainer()
    trainer.fit(module, make_data(rows, [digits]))
    assert module.reference is None
    assert "kl" not in trainer.callback_metrics


def test_kl_is_zero_at_the_start_and_grows(make_trainer, policy_dir, rows, digits):
    watch = Watch()
    trainer = make_trainer(callbacks=[watch], max_epochs=4)
    trainer.fit(GRPOModule(policy_dir, lr=1e-3), make_data(rows, [digits]))
    first, last = watch.rollouts[0], watch.rollouts[-1]
    gap = (first.old_log_probs - first.ref_log_probs)[first.completion_mask].abs().max()
    assert gap < 1e-6
    assert (last.old_log_probs - last.ref_log_probs)[last.completion_mask].abs().max() > 1e-3


def test_penalty_in_the_reward_enters_before_the_baseline(make_trainer, policy_dir, rows, digits):
    watch = Watch()
    module = GRPOModule(policy_dir, lr=1e-2, kl_coef=0.5)
    make_trainer(callbacks=[watch], max_epochs=3).fit(module, make_data(rows, [digits]))
    rollout = watch.rollouts[-1]
    kl = torch.where(rollout.completion_mask, rollout.old_log_probs - rollout.ref_log_probs, 0.0).sum(1)
    penalised = (rollout.rewards - 0.5 * kl).double().reshape(-1, 4)
    expected = (penalised - penalised.mean(1, keepdim=True)) / (penalised.std(1, correction=0, keepdim=True) + 1e-4)
    dead = rollout.rewards.reshape(-1, 4).std(1, correction=0) <= 1e-6
    expected[dead] = 0.0
    assert torch.allclose(rollout.advantages[:, 0].double(), expected.flatten(), atol=1e-4)
    assert kl.abs().max() > 1e-2


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_strong_penalty_keeps_the_policy_at_home(make_trainer, policy_dir, rows, digits, placement):
    """The constraint works: the same run drifts less under a large coefficient."""

    def drift(kl_coef: float) -> float:
        watch = Watch()
        module = GRPOModule(policy_dir, lr=3e-3, kl_coef=kl_coef, kl_placement=placement)
        trainer = make_trainer(callbacks=[watch], max_epochs=12)
        trainer.fit(module, make_data(rows, [digits], group_size=8))
        return watch.final["kl"]

    assert drift(3.0) < 0.5 * drift(0.001)


def test_dead_groups_get_exactly_zero_and_move_nothing(make_trainer, policy_dir, rows):
    """All rewards equal 0.7: not even AdamW's momentum or decay moves the weights."""

    def constant(completions: list[str]) -> list[float]:
        return [0.7] * len(completions)

    watch = Watch()
    module = GRPOModule(policy_dir, lr=1e-2, weight_decay=0.1, kl_coef=0.1)
    trainer = make_trainer(callbacks=[watch], max_epochs=2)
    module.trainer = trainer
    trainer.fit(module, make_data(rows, [constant]))
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    assert all(torch.equal(p, q) for p, q in zip(module.policy.parameters(), base.parameters(), strict=True))
    assert (watch.rollouts[0].advantages == 0).all()
    assert trainer.global_step == 2
    assert watch.final["policy/dead_steps"] == 1.0
    assert watch.final["group/effective_ratio"] == 0.0


def test_kl_noise_in_a_dead_group_is_masked(policy_dir):
    """Without the mask a dead group's KL noise becomes a full-size advantage."""
    noise = torch.tensor([1e-3, -2e-3, 5e-4, 5e-4])
    raw = torch.full((4,), 0.7)
    rollout = hand_made_rollout(raw).replace(
        old_log_probs=noise[:, None].clone(), ref_log_probs=torch.zeros(4, 1), advantages=None
    )
    module = GRPOModule(policy_dir, kl_coef=1.0)
    rollout = module.compute_advantages(RolloutBatch.replace(rollout, kl_coef=1.0))
    assert rollout.advantages.abs().max() > 0.5
    masked = StdThresholdMask().on_advantages_end(None, module, rollout)
    assert (masked.advantages == 0).all()


def hand_made_rollout(rewards: torch.Tensor, width: int = 1) -> RolloutBatch:
    n = len(rewards)
    ids = torch.ones(n, width, dtype=torch.long)
    return RolloutBatch(
        prompt_ids=ids[:, :1],
        prompt_lengths=torch.ones(n, dtype=torch.long),
        completion_ids=ids,
        completion_lengths=torch.full((n,), width),
        completion_mask=torch.ones(n, width, dtype=torch.bool),
        finished=torch.ones(n, dtype=torch.bool),
        group_index=torch.zeros(n, dtype=torch.long),
        prompt_index=torch.zeros(n, dtype=torch.long),
        sampling_log_probs=torch.zeros(n, width),
        rewards=rewards,
        scored_mask=torch.ones(n, dtype=torch.bool),
        reward_components=rewards[:, None],
        outcome_mask=torch.ones(n, dtype=torch.bool),
        prompts=("p",) * n,
        completions=("c",) * n,
        reward_names=("r",),
    )


def test_abstaining_rows_leave_statistics_and_denominator(make_trainer, policy_dir, rows):
    def one_opinion(completions: list[str]) -> list[float | None]:
        return [1.0, None, None, 0.0] * (len(completions) // 4)

    watch = Watch()
    trainer = make_trainer(callbacks=[watch])
    data = make_data(rows, [one_opinion])
    trainer.fit(GRPOModule(policy_dir, kl_coef=0.0), data)
    advantages = watch.rollouts[0].advantages[:, 0].reshape(-1, 4)
    expected = 0.5 / (0.5 + 1e-4)
    assert torch.allclose(advantages, torch.tensor([expected, 0.0, 0.0, -expected]).expand(6, 4))
    assert watch.final["reward"] == pytest.approx(0.5)
    assert watch.final["reward/missing"] == pytest.approx(0.5)
    scored = watch.rollouts[0].scored_mask
    assert data.trainer.lightning_module.loss_denominator(watch.rollouts[0], 6) == float(
        watch.rollouts[0].completion_lengths[scored].sum()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_placement": "advantage"}, "kl_placement of GRPOModule must be one of reward, after, loss"),
        ({"kl_coef": -0.1}, r"kl_coef must be a number in \[0, inf\), got -0.1"),
        ({"loss_aggregation": "mean"}, "loss_aggregation must be one of token_mean, sequence_mean, sequence_sum"),
        ({"baseline": "mode"}, "baseline must be one of mean, median, leave_one_out, none"),
        ({"clip_range": 1.5}, r"clip_range must be a number in \[0, 1\], got 1.5"),
        ({"lr": 0.0}, r"lr must be a number in \(0, inf\), got 0.0"),
        ({"dtype": "float8"}, "dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_bad_options(policy_dir, options, message):
    with pytest.raises(ConfigurationError, match=message):
        GRPOModule(policy_dir, **options)


def test_a_group_of_one_is_refused_before_a_model_is_loaded(make_trainer, policy_dir, rows, digits):
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match="group_size must be at least 2, got 1"):
        make_trainer().fit(module, make_data(rows, [digits], group_size=1))
    assert module.policy is None
    plain = GRPOModule(policy_dir, baseline="none", scale_by_std=False)
    make_trainer().fit(plain, make_data(rows, [digits], group_size=1))


def test_dropout_of_the_checkpoint_is_off(make_trainer, policy_dir, rows, digits, tmp_path):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    tokenizer.save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1)
    config.update({"eos_token_id": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    watch = Watch()
    trainer = make_trainer(callbacks=[watch])
    trainer.fit(GRPOModule(str(tmp_path / "gpt2"), lr=1e-3), make_data(rows, [digits], passes=2))
    assert watch.final["sampling/log_prob_gap"] < 1e-5
    assert watch.final["policy/first_step_ratio_gap"] < 1e-5


def test_learns_a_simple_reward(make_trainer, policy_dir, rows, digits):
    watch = Watch()
    trainer = make_trainer(callbacks=[watch], max_epochs=25)
    trainer.fit(GRPOModule(policy_dir, lr=3e-3), make_data(rows, [digits], group_size=8))
    before = float(watch.rollouts[0].rewards.mean())
    assert watch.final["reward"] > before + 0.25


def test_the_reference_is_the_start_also_after_an_earlier_validation(make_trainer, policy_dir, rows, digits, tmp_path):
    """validate() builds the policy; fit() must still find its reference, and not the validated checkpoint's weights."""
    from transformers import AutoModelForCausalLM

    first = make_trainer(max_epochs=2)
    first.fit(GRPOModule(policy_dir, lr=1e-2), make_data(rows, [digits], val=rows))
    first.save_checkpoint(tmp_path / "moved.ckpt")
    module = GRPOModule(policy_dir, lr=1e-3)
    data = make_data(rows, [digits], val=rows, val_samples=2)
    make_trainer().validate(module, data, ckpt_path=tmp_path / "moved.ckpt")
    watch = Watch()
    make_trainer(callbacks=[watch]).fit(module, data)
    base = AutoModelForCausalLM.from_pretrained(policy_dir)
    pairs = list(zip(module.reference.model.parameters(), base.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    assert watch.final["kl/per_token"] != 0.0
