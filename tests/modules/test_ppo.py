from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.gae import gae_advantages, place_outcome

CRITICS = [{"critic": "own"}, {"critic": "shared"}, {"critic": "adapter", "lora_rank": 4}]
IDS = ["own", "shared", "adapter"]


@pytest.fixture
def train(make_trainer, make_data, policy_dir, rows, digits, watch):
    """Run PPO for some iterations; gives module, DataModule and what was watched."""

    def run(max_epochs: int = 2, data: dict[str, Any] | None = None, **options: Any) -> Any:
        module = PPOModule(policy_dir, **{"lr": 1e-3, "critic_lr": 1e-2, **options})
        datamodule = make_data(rows, rewards=[digits], **(data or {}))
        make_trainer(callbacks=[watch], max_epochs=max_epochs).fit(module, datamodule)
        return module, datamodule, watch

    return run


@pytest.mark.parametrize("critic", CRITICS, ids=IDS)
def test_values_do_not_depend_on_padding_or_neighbours(train, critic):
    module, data, _ = train(data={"passes": 2}, **critic)
    rollout = data.rollout
    with torch.no_grad():
        together = module._values(rollout)
        for row in range(len(rollout)):
            alone = module._values(rollout.select([row]).trim())[0]
            length = int(rollout.completion_lengths[row])
            assert torch.allclose(together[row, : length + 1], alone[: length + 1], atol=1e-5)
    assert together.abs().max() > 1e-3  # the critic has learned something


@pytest.mark.parametrize("critic", CRITICS, ids=IDS)
def test_a_value_is_taken_before_its_token(train, critic):
    """V at a token must not change with that token or what follows it."""
    module, data, _ = train(data={"passes": 2}, **critic)
    rollout = data.rollout.select([0]).trim()
    ids = rollout.completion_ids.clone()
    place = 2
    ids[0, place:] = (ids[0, place:] + 3) % 10 + 2
    with torch.no_grad():
        before, after = module._values(rollout), module._values(rollout.replace(completion_ids=ids))
    assert torch.allclose(before[0, : place + 1], after[0, : place + 1], atol=1e-6)
    assert not torch.allclose(before[0, place + 1 :], after[0, place + 1 :], atol=1e-6)


def test_advantages_are_gae_of_the_penalised_token_rewards(train):
    _, data, _ = train(max_epochs=3, kl_coef=0.3, whiten_advantages=False, gae_lambda=0.9, gamma=0.99)
    rollout = data.rollout
    kl = torch.where(rollout.completion_mask, rollout.old_log_probs - rollout.ref_log_probs, 0.0)
    rewards = place_outcome(rollout.rewards, rollout.completion_mask) - 0.3 * kl
    expected = gae_advantages(rewards, rollout.values, rollout.completion_mask, 0.99, 0.9)
    assert torch.allclose(rollout.advantages, expected, atol=1e-6)
    returns = torch.where(rollout.completion_mask, expected + rollout.values, 0.0)
    assert torch.allclose(rollout.returns, returns, atol=1e-6)
    assert kl.abs().max() > 1e-3


def test_whitening_is_over_the_whole_rollout_and_leaves_returns_alone(train):
    _, data, _ = train(data={"micro_batch_size": 5})
    rollout = data.rollout
    kept = rollout.advantages[rollout.completion_mask].double()
    assert kept.mean().abs() < 1e-6
    assert kept.var(correction=0) == pytest.approx(1.0, abs=1e-4)
    plain = gae_advantages(
        place_outcome(rollout.rewards, rollout.completion_mask)
        - 0.04 * torch.where(rollout.completion_mask, rollout.old_log_probs - rollout.ref_log_probs, 0.0),
        rollout.values,
        rollout.completion_mask,
    )
    mask = rollout.completion_mask
    assert torch.allclose(rollout.returns[mask], (plain + rollout.values)[mask], atol=1e-5)


def test_truncated_completions_do_not_bootstrap(train):
    """Their outcome reward covers them; a value after the end would pay for never stopping."""
    _, data, _ = train(whiten_advantages=False, kl_coef=0.0, data={"max_new_tokens": 2})
    rollout = data.rollout
    truncated = ~rollout.finished
    assert truncated.any()
    last = rollout.completion_lengths - 1
    at_end = rollout.advantages.gather(1, last[:, None])[:, 0]
    value = rollout.values.gather(1, last[:, None])[:, 0]
    assert torch.allclose(at_end, rollout.rewards - value, atol=1e-6)


def test_bootstrap_serves_unscored_truncated_rows_only(make_trainer, make_data, policy_dir, rows):
    def every_other(completions: list[str]) -> list[float | None]:
        return [1.0 if i % 2 else None for i in range(len(completions))]

    for wanted in (False, True):
        module = PPOModule(policy_dir, kl_coef=0.0, whiten_advantages=False, bootstrap_truncated=wanted, critic_lr=1e-2)
        data = make_data(rows, rewards=[every_other], max_new_tokens=2)
        make_trainer(max_epochs=3).fit(module, data)
        rollout = data.rollout
        unscored = ~rollout.scored_mask
        learned = module.loss_mask(rollout).any(1)
        assert torch.equal(learned, rollout.scored_mask | (unscored & ~rollout.finished & wanted))
        last = (rollout.completion_lengths - 1)[:, None]
        chosen = unscored & ~rollout.finished
        assert chosen.any()
        end_error = rollout.advantages.gather(1, last)[chosen, 0]
        expected = rollout.bootstrap_values[chosen] - rollout.values.gather(1, last)[chosen, 0]
        assert torch.allclose(end_error, expected if wanted else torch.zeros_like(expected), atol=1e-6)


@pytest.mark.parametrize("critic", CRITICS, ids=IDS)
def test_the_policy_does_not_move_while_the_critic_warms_up(make_trainer, make_data, policy_dir, rows, digits, critic):
    """To the bit; and the critic does learn."""
    module = PPOModule(
        policy_dir, lr=1e-2, critic_lr=1e-2, weight_decay=0.1, critic_warmup_iterations=2, entropy_coef=0.1, **critic
    )
    before: dict[str, torch.Tensor] = {}

    from lightning import Callback

    class Snapshots(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.update({n: p.detach().clone() for n, p in pl_module.named_parameters()})
            self.moved: list[set[str]] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            now = dict(pl_module.named_parameters())
            self.moved.append({n for n, p in before.items() if not torch.equal(p, now[n].detach())})

    snapshots = Snapshots()
    trainer = make_trainer(callbacks=[snapshots], max_epochs=3)
    trainer.fit(module, make_data(rows, rewards=[digits], passes=2))
    policy_names = {n for n in before if n.startswith("policy.") and ".value." not in n}
    for iteration in (0, 1):
        assert snapshots.moved[iteration], "the critic must learn"
        assert not snapshots.moved[iteration] & policy_names
    trained = {n for n, p in module.named_parameters() if p.requires_grad and n in policy_names}
    assert snapshots.moved[2] & trained, "after the warm-up the policy must learn"


def test_frozen_parts_never_move(train):
    module, _, _ = train(max_epochs=3, critic="adapter", lora_rank=4, data={"passes": 2})
    from transformers import AutoModelForCausalLM

    base = dict(AutoModelForCausalLM.from_pretrained(module.model_name).named_parameters())
    for name, parameter in module.policy.get_base_model().named_parameters():
        if "lora_" in name:
            continue
        assert torch.equal(parameter, base[name.replace(".base_layer", "")]), name
    names = {name for name, p in module.policy.named_parameters() if p.requires_grad}
    assert any(".default." in name for name in names)
    assert any(".value." in name for name in names)


def test_learning_rates_and_norm_limits_are_separate(train, make_trainer):
    module, _, watch = train(max_epochs=1, lr=1e-3, critic_lr=5e-3, critic_max_grad_norm=0.5)
    groups = {group["name"]: group for group in module.trainer.optimizers[0].param_groups}
    assert groups["policy"]["initial_lr"] == 1e-3
    assert groups["value"]["initial_lr"] == 5e-3
    assert groups["value"]["max_grad_norm"] == 0.5
    assert len(groups["policy"]["params"]) + len(groups["value"]["params"]) == sum(
        p.requires_grad for p in module.parameters()
    )
    for name in ("policy/grad_norm", "value/grad_norm", "lr/policy", "lr/value"):
        assert name in watch.final


@pytest.mark.parametrize("critic", CRITICS, ids=IDS)
def test_micro_batches_change_no_gradient(make_trainer, make_data, policy_dir, rows, digits, critic):
    from lightning import Callback

    class Keep(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.gradient = torch.cat(
                [p.grad.flatten() for p in pl_module.parameters() if p.requires_grad and p.grad is not None]
            )

    def gradient(**cut: Any) -> torch.Tensor:
        torch.manual_seed(5)  # adapters start at random
        keep = Keep()
        module = PPOModule(policy_dir, lr=1e-5, entropy_coef=0.01, **critic)
        data = make_data(rows, rewards=[digits], **cut)
        make_trainer(callbacks=[keep]).fit(module, data)
        return keep.gradient

    whole = gradient()
    for cut in ({"micro_batch_size": 5}, {"micro_batch_tokens": 60}):
        assert (gradient(**cut) - whole).norm() <= 2e-6 * whole.norm()


def test_explained_variance_and_error_are_logged_against_monte_carlo_returns(train):
    _, data, watch = train(max_epochs=6, kl_coef=0.0, critic_lr=3e-2, critic_warmup_iterations=6, data={"passes": 4})
    rollout = data.rollout
    mask = rollout.completion_mask
    returns = rollout.rewards[:, None].expand_as(rollout.values)[mask].double()
    error = returns - rollout.values[mask].double()
    assert watch.final["value/error"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    expected = float(1 - error.var() / returns.var())
    assert watch.final["value/explained_variance"] == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1


def test_learns_with_one_sample_per_prompt(make_trainer, make_data, policy_dir, rows, digits, watch):
    module = PPOModule(policy_dir, lr=3e-3, critic_lr=1e-2)
    data = make_data(rows * 8, rewards=[digits], prompts_per_iteration=48, group_size=1, passes=2)
    make_trainer(callbacks=[watch], max_epochs=15).fit(module, data)
    assert watch.final["reward"] > float(watch.rollouts[0].rewards.mean()) + 0.2


def test_swapping_the_module_is_all_it_takes(make_trainer, make_data, policy_dir, rows, digits):
    for algorithm in (GRPOModule, PPOModule):
        trainer = make_trainer()
        trainer.fit(algorithm(policy_dir), make_data(rows, rewards=[digits]))
        assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic": "big"}, "critic must be one of own, shared, adapter, got 'big'"),
        ({"critic": "adapter"}, "critic='adapter' sits on the policy's frozen base: set lora_rank"),
        (
            {"critic": "shared", "critic_model": "x"},
            "critic_model is the critic's own backbone, but",
        ),
        ({"gamma": 1.5}, r"gamma must be a number in \[0, 1\], got 1.5"),
        ({"gae_lambda": -0.1}, r"gae_lambda must be a number in \[0, 1\], got -0.1"),
        ({"critic_lr": 0.0}, r"critic_lr must be a number in \(0, inf\), got 0.0"),
        ({"critic_warmup_iterations": -1}, "critic_warmup_iterations must be a number in"),
    ],
)
def test_bad_options(policy_dir, options, message):
    with pytest.raises(ConfigurationError, match=message):
        PPOModule(policy_dir, **options)


def test_a_divergent_critic_never_reaches_the_policy(make_trainer, make_data, policy_dir, rows, digits, tmp_path):
    """Steps that are not finite are skipped and counted; then the run stops with a checkpoint that loads."""
    from lit_rlhf.errors import DivergedError

    module = PPOModule(policy_dir, lr=1e-3, critic_lr=1e35, critic_max_grad_norm=None, max_skipped_steps=3)
    trainer = make_trainer(max_epochs=20)
    with pytest.raises(DivergedError, match=r"steps in a row had a gradient that is not finite .*diverged\.ckpt"):
        trainer.fit(module, make_data(rows, rewards=[digits], passes=2))
    assert all(p.isfinite().all() for p in module.policy.parameters())
    saved = torch.load(tmp_path / "checkpoints" / "diverged.ckpt", weights_only=True)
    assert all(
        torch.equal(saved["state_dict"][f"policy.{name}"], value) for name, value in module.policy.state_dict().items()
    )


def test_a_single_bad_step_is_skipped_and_the_run_goes_on(
    make_trainer, make_data, policy_dir, rows, digits, watch, tmp_path
):
    class PoisonOnce(type(watch)):
        def on_advantages_end(self, trainer: Any, module: Any, rollout: Any) -> Any:
            super().on_advantages_end(trainer, module, rollout)
            if len(self.rollouts) == 2:
                return rollout.replace(advantages=rollout.advantages * float("nan"))
            return None

    poison = PoisonOnce()
    module = GRPOModule(policy_dir, lr=1e-3)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = make_trainer(callbacks=[poison], max_epochs=4, logger=logger, log_every_n_steps=1)
    trainer.fit(module, make_data(rows, rewards=[digits]))
    assert trainer.global_step == 4
    assert all(p.isfinite().all() for p in module.policy.parameters())
    table = pd.read_csv(Path(logger.log_dir) / "metrics.csv")
    assert table["policy/skipped_steps"].tolist() == [0.0, 1.0, 0.0, 0.0]
