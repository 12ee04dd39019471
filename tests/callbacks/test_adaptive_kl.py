from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import AdaptiveKL, RolloutCallback, WarmupCosine
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import adaptive_kl_coef
from lit_rlhf.modules.scoring import rollout_kl


def test_the_controllers_numbers():
    coef = 0.2
    for _ in range(3):
        coef = adaptive_kl_coef(coef, kl=0.3, target=0.1, num_completions=32, horizon=1000)
    assert round(coef, 6) == 0.203865
    assert adaptive_kl_coef(0.2, 0.11, 0.1, 100, 1000) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    with pytest.raises(ValueError, match="horizon at least num_completions"):
        adaptive_kl_coef(0.2, 0.3, 0.1, 32, 31)


class Coefficients(AdaptiveKL):
    """Notes the coefficient of each micro-batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.seen.append([])
        self.seen[-1].append(batch.rows.kl_coef)


def steer(make_trainer, make_data, policy_dir, folder, ckpt=None, max_epochs=6, placement="reward", **options):
    steering = Coefficients(**{"target": 0.02, "horizon": 24, **options})
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = make_trainer(callbacks=[steering, saving], max_epochs=6, enable_checkpointing=True)
    module = GRPOModule(policy_dir, lr=3e-3, kl_coef=0.1, kl_placement=placement)
    trainer.fit(module, make_data(micro_batch_size=5, passes=2), ckpt_path=ckpt)
    return steering, module, trainer


@pytest.mark.parametrize("placement", ["reward", "loss"])
@pytest.mark.parametrize("per", ["sequence", "token"])
def test_constant_inside_an_iteration_and_by_the_rule_between(
    make_trainer, make_data, policy_dir, watch, tmp_path, placement, per
):
    steering, module, trainer = steer(make_trainer, make_data, policy_dir, tmp_path, placement=placement, per=per)
    assert all(len(set(iteration)) == 1 for iteration in steering.seen)
    coefs = [iteration[0] for iteration in steering.seen]
    assert coefs[:2] == [0.1, pytest.approx(0.1 * 0.8)]  # KL 0 in the first rollout: down by a fifth
    assert max(coefs[2:]) > min(coefs), "the policy has drifted beyond the target: up again"
    rollout = trainer.datamodule.rollout
    kl = (rollout.old_log_probs - rollout.ref_log_probs)[rollout.completion_mask].double()
    measured = float(kl.sum()) / (len(rollout) if per == "sequence" else len(kl))
    assert module.kl_coef == pytest.approx(adaptive_kl_coef(coefs[-1], measured, 0.02, 24, 24))
    assert float(trainer.callback_metrics["kl/coef"]) == pytest.approx(coefs[-1])


def test_resume_continues_with_the_coefficient(make_trainer, make_data, policy_dir, tmp_path):
    whole, module, _ = steer(make_trainer, make_data, policy_dir, tmp_path / "a")
    again, resumed, _ = steer(make_trainer, make_data, policy_dir, tmp_path / "b", ckpt=tmp_path / "a" / "epoch=2.ckpt")
    assert again.seen == whole.seen[3:]
    assert all(torch.equal(p, q) for p, q in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True))


class FixedKL(RolloutCallback):
    """The rollout's KL is 0.3 nats per completion, whatever the policy does."""

    def on_rollout_end(self, trainer: Any, module: Any, rollout: Any) -> Any:
        share = 0.3 / rollout.completion_mask.sum(dim=1, keepdim=True)
        return rollout.replace(ref_log_probs=rollout.old_log_probs - share)


def test_the_worked_numbers_in_a_run_and_after_resume(make_trainer, make_data, policy_dir, rows, tmp_path):
    """0.2 after three updates by 1 + 0.2 * 32 / 1000 is 0.203865, and the first resumed iteration uses that."""

    def run(ckpt: Any, max_epochs: int) -> list[float]:
        steering = Coefficients(target=0.1, horizon=1000)
        saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [FixedKL(), steering, saving]
        trainer = make_trainer(callbacks=callbacks, max_epochs=max_epochs, enable_checkpointing=True)
        data = make_data([*rows, {"prompt": "8+8="}, {"prompt": "9+9="}], prompts_per_iteration=8)
        trainer.fit(GRPOModule(policy_dir, kl_coef=0.2), data, ckpt_path=ckpt)
        return [round(iteration[0], 6) for iteration in steering.seen]

    assert run(None, 3) == [0.2, round(0.2 * 1.0064, 6), round(0.2 * 1.0064**2, 6)]
    assert run(tmp_path / "epoch=2.ckpt", 5) == [0.203865, round(0.2 * 1.0064**4, 6)]


def test_a_checkpoint_without_a_coefficient_is_said(make_trainer, make_data, policy_dir, tmp_path):
    plain = make_trainer(max_epochs=1)
    plain.fit(GRPOModule(policy_dir, kl_coef=0.3), make_data())
    plain.save_checkpoint(tmp_path / "x.ckpt")
    steering = Coefficients(target=0.02, horizon=24)
    with pytest.warns(UserWarning, match="the checkpoint holds no coefficient, so it starts from the module's kl_coef"):
        make_trainer(callbacks=[steering], max_epochs=2).fit(
            GRPOModule(policy_dir, kl_coef=0.3), make_data(), ckpt_path=tmp_path / "x.ckpt"
        )
    assert steering.seen == [[0.3]]


def test_a_target_from_loose_to_tight(make_trainer, make_data, policy_dir):
    class Targets(Coefficients):
        def on_advantages_end(self, trainer: Any, module: Any, rollout: Any) -> None:
            self.targets.append(self.target_of(trainer))
            super().on_advantages_end(trainer, module, rollout)

    steering = Targets(target=0.5, horizon=24, final_target=0.1)
    steering.targets = []
    make_trainer(callbacks=[FixedKL(), steering], max_epochs=5).fit(GRPOModule(policy_dir), make_data())
    assert steering.targets == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    ratios = [after[0] / before[0] for before, after in zip(steering.seen, steering.seen[1:], strict=False)]
    assert ratios == pytest.approx([0.8, 0.8, 1.0, 1.2])  # a measured KL of 0.3 is below, at and above the target


@pytest.mark.parametrize("placement", ["reward", pytest.param("loss", marks=pytest.mark.slow)])
def test_half_and_twice_the_kl_of_a_fixed_coefficient_are_reached(
    make_trainer, make_data, policy_dir, watch, placement
):
    """The mean of the last 20 iterations comes within 30 % of each target."""

    def kl(callbacks: list[Any]) -> float:
        torch.manual_seed(1)
        watch.rollouts.clear()
        flat_rate = WarmupCosine(warmup_steps=3, floor=1.0)
        module = GRPOModule(policy_dir, lr=3e-4, kl_coef=0.2, kl_placement=placement)
        make_trainer(max_epochs=80, callbacks=[*callbacks, flat_rate, watch]).fit(module, make_data(group_size=8))
        sums = [float(rollout_kl(rollout).sum()) / len(rollout) for rollout in watch.rollouts[-20:]]
        return sum(sums) / len(sums)

    fixed = kl([])
    for target in (0.5 * fixed, 2 * fixed):
        assert kl([AdaptiveKL(target, horizon=3 * 48)]) == pytest.approx(target, rel=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, r"AdaptiveKL: target must be a number in \(0, inf\), got 0"),
        ({"target": 0.1, "horizon": 0}, "AdaptiveKL: horizon must be a number"),
        ({"target": 0.1, "final_target": -1}, "AdaptiveKL: final_target must be a number"),
        ({"target": 0.1, "per": "batch"}, "AdaptiveKL: per must be 'sequence' or 'token', got 'batch'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        AdaptiveKL(**options)


def test_refused_before_a_model_is_loaded(make_trainer, make_data, policy_dir):
    module = GRPOModule(policy_dir, kl_coef=0.0)
    with pytest.raises(ConfigurationError, match="scales kl_coef, which must be positive"):
        make_trainer(callbacks=[AdaptiveKL(0.1)]).fit(module, make_data())
    module = GRPOModule(policy_dir)
    with pytest.raises(ConfigurationError, match="horizon=23 is less than the 24 completions"):
        make_trainer(callbacks=[AdaptiveKL(0.1, horizon=23)]).fit(module, make_data())
    assert module.policy is None
    with pytest.raises(ConfigurationError, match="final_target is that of the end of the run: set"):
        make_trainer(callbacks=[AdaptiveKL(0.1, final_target=0.2)], max_epochs=-1).fit(module, make_data())
