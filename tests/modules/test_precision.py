"""Mixed precision and gradient checkpointing change the cost, not the algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import Callback

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.errors import ConfigurationError

ALGORITHMS = {
    "grpo": (GRPOModule, {}),
    "grpo_lora": (GRPOModule, {"lora_rank": 4}),
    "ppo_own": (PPOModule, {}),
    "ppo_shared": (PPOModule, {"critic": "shared"}),
    "ppo_adapter": (PPOModule, {"critic": "adapter", "lora_rank": 4}),
}


class Keep(Callback):
    """The gradient of the last step: adapters have left their zero start by then."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradient = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_checkpointing_gives_the_same_gradients(make_trainer, make_data, policy_dir, name):
    kind, options = ALGORITHMS[name]

    def gradient(checkpointing: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        keep = Keep()
        module = kind(policy_dir, lr=1e-3, gradient_checkpointing=checkpointing, **options)
        make_trainer(callbacks=[keep]).fit(module, make_data(passes=3))
        return keep.gradient

    plain, recomputed = gradient(False), gradient(True)
    assert plain.keys() == recomputed.keys()
    for parameter, expected in plain.items():
        assert (recomputed[parameter] - expected).norm() <= 1e-4 * expected.norm() + 1e-7, parameter


@pytest.mark.parametrize("name", ALGORITHMS)
def test_mixed_precision_samples_and_trains_with_the_same_policy(make_trainer, make_data, policy_dir, watch, name):
    """In bfloat16 two forwards of different shape differ by a few hundredths, but not by a precision."""
    kind, options = ALGORITHMS[name]
    module = kind(policy_dir, lr=1e-4, **options)
    make_trainer(callbacks=[watch], max_epochs=2, precision="bf16-mixed").fit(module, make_data(passes=2))
    assert watch.final["policy/first_step_ratio_gap"] < 0.02
    assert torch.isfinite(torch.tensor(watch.final["loss"]))
    assert watch.rollouts[-1].advantages.dtype == torch.float32
    assert next(module.policy.parameters()).dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_true_half_precision_is_refused_with_the_way_round(make_trainer, make_data, policy_dir, precision):
    with pytest.raises(ConfigurationError, match="set the module's dtype instead"):
        make_trainer(precision=precision).fit(GRPOModule(policy_dir), make_data())
