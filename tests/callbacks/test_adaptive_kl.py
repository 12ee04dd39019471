from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import AdaptiveKL
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import adaptive_kl_coef


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


def test_the_drift_follows_the_target(make_trainer, make_data, policy_dir, watch):
    """A small and a large target. (In the loss the penalty acts on groups without a signal, too.)"""

    def drift(target: float) -> float:
        steering = AdaptiveKL(target=target, horizon=48)
        module = GRPOModule(policy_dir, lr=3e-4, kl_coef=0.1, kl_placement="loss")
        make_trainer(callbacks=[steering, watch], max_epochs=50).fit(module, make_data(group_size=8))
        kls = []
        for rollout in watch.rollouts[-10:]:
            per_token = (rollout.sampling_log_probs - rollout.ref_log_probs)[rollout.completion_mask]
            kls.append(float(per_token.sum()) / len(rollout))
        return sum(kls) / len(kls)

    assert drift(0.1) < 0.75 * drift(0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, r"AdaptiveKL: target must be a number in \(0, inf\), got 0"),
        ({"target": 0.1, "horizon": 0}, "AdaptiveKL: horizon must be a number"),
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
