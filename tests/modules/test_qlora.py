"""A low-rank adapter on a base in 8 or 4 bits, trained on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lit_rlhf import GRPOModule, PPOModule, SFTModule
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.head import vocabulary_head
from lit_rlhf.models.lora import without_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
BOTH = pytest.mark.parametrize("kind", ["4bit", "8bit"])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def state(module: nn.Module) -> dict[str, Tensor]:
    """Every number of a policy, the scales of quantised weights among them."""
    return {name: value.clone() for name, value in module.policy.state_dict().items() if torch.is_tensor(value)}


def train(make_trainer: Any, make_data: Any, watch: Any, module: Any, epochs: int = 8) -> Any:
    options = {"max_epochs": epochs, "callbacks": [watch]}
    make_trainer(**options).fit(module, make_data(passes=2, micro_batch_size=8))
    return module


@BOTH
def test_only_the_adapter_learns_and_the_reward_rises(make_trainer, make_data, policy_dir, watch, kind):
    module = GRPOModule(policy_dir, lr=2e-2, lora_rank=4, quantization=kind, kl_coef=0.01)
    module.configure_model()
    before, start = state(module), logits(module.policy)
    train(make_trainer, make_data, watch, module)

    rewards = [float(rollout.rewards.mean()) for rollout in watch.rollouts]
    assert rewards[-1] > rewards[0] + 0.2
    changed = {name for name, value in state(module).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    with without_adapter(module.policy):
        assert torch.equal(logits(module.policy), start)

    # Completions share their prompt's pass, the head is the plain one, and the rollout's log-probs are the trainer's.
    assert module.shares_prompts
    assert vocabulary_head(module.policy) is not None
    assert watch.final["policy/first_step_ratio_gap"] <= 1e-5
    assert watch.final["sampling/log_prob_gap"] <= 1e-4


@BOTH
def test_the_export_is_merged_onto_the_base_that_was_trained_on(
    make_trainer, make_data, policy_dir, watch, tmp_path, kind
):
    module = train(make_trainer, make_data, watch, GRPOModule(policy_dir, lr=2e-2, lora_rank=4, quantization=kind))
    before, trained = state(module), logits(module.policy)
    with without_adapter(module.policy):
        base = logits(module.policy)
    plain = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path))
    assert not list(tmp_path.glob("adapter*"))
    assert getattr(plain.config, "quantization_config", None) is None
    assert {type(layer) for layer in plain.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    assert (logits(plain) - trained).abs().max() <= 1e-3
    assert (trained - base).abs().max() > 0.1
    # The original weights would not do.
    original = AutoModelForCausalLM.from_pretrained(policy_dir)
    assert (logits(original) - base).abs().max() > 0.01
    after = state(module)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("critic", ["shared", "adapter"])
def test_ppo_with_a_critic_on_the_quantised_base(make_trainer, make_data, policy_dir, watch, critic):
    module = PPOModule(policy_dir, lr=1e-2, critic=critic, critic_lr=1e-2, lora_rank=4, quantization="4bit")
    module.configure_model()
    before = state(module)
    train(make_trainer, make_data, watch, module, epochs=2)
    changed = {name for name, value in state(module).items() if not torch.equal(value, before[name])}
    assert all("lora_" in name for name in changed)
    assert bool((module.critic.head.linear.weight != 0).any())


@BOTH
@pytest.mark.parametrize("algorithm", [GRPOModule, SFTModule])
def test_a_checkpoint_holds_the_adapter_and_no_base(policy_dir, tmp_path, make_trainer, kind, algorithm):
    """Also without reinforcement learning: nothing of the base has to be written, and nothing of it is missed."""
    module = algorithm(policy_dir, lora_rank=4, quantization=kind)
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    checkpoint = {"state_dict": dict(module.state_dict())}
    module.on_save_checkpoint(checkpoint)
    policy = [name for name in checkpoint["state_dict"] if name.startswith("policy.")]
    assert policy
    assert all("lora_" in name for name in policy)
    other = algorithm(policy_dir, lora_rank=4, quantization=kind)
    other.configure_model()
    other.load_state_dict(checkpoint["state_dict"], strict=True)
    assert torch.equal(logits(other.policy), logits(module.policy))
    del checkpoint["state_dict"][policy[0]]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(checkpoint["state_dict"], strict=True)


@BOTH
def test_resumed_as_if_it_had_never_stopped(make_trainer, make_data, policy_dir, tmp_path, weights, kind):
    def run(ckpt_path: str | None = None) -> Any:
        torch.manual_seed(4)
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = make_trainer(max_epochs=4, callbacks=[saving], enable_checkpointing=True)
        module = GRPOModule(policy_dir, lr=1e-2, lora_rank=4, quantization=kind)
        trainer.fit(module, make_data(), ckpt_path=ckpt_path)
        return module

    whole = run()
    resumed = run(str(tmp_path / "epoch=1.ckpt"))
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "4bit"}, "quantization: 4bit makes weights that cannot be trained: train an adapter"),
        ({"quantization": "2bit", "lora_rank": 4}, "quantization must be one of 8bit, 4bit, got '2bit'"),
    ],
)
def test_what_cannot_be(policy_dir, options, message):
    with pytest.raises(ConfigurationError, match=message):
        GRPOModule(policy_dir, **options)


def test_weights_in_bits_are_not_sharded(make_trainer, make_data, policy_dir, fsdp2_of_one):
    module = GRPOModule(policy_dir, lora_rank=4, quantization="4bit")
    with pytest.raises(ConfigurationError, match="quantization: 4bit cannot go with ModelParallelStrategy"):
        make_trainer(strategy=fsdp2_of_one).fit(module, make_data())
    assert module.policy is None


def test_without_bitsandbytes_the_option_is_refused(monkeypatch, policy_dir):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="quantization: 8bit needs bitsandbytes, which is not installed"):
        GRPOModule(policy_dir, lora_rank=4, quantization="8bit")


def test_a_trained_adapter_goes_on_over_a_quantised_base(make_trainer, make_data, policy_dir, watch, tmp_path):
    """Its reference is a second adapter of the same base; only the first one learns."""
    start = GRPOModule(policy_dir, lora_rank=4, quantization="4bit")
    start.configure_model()
    with torch.no_grad():
        for name, parameter in start.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    start.policy.save_pretrained(tmp_path)
    module = GRPOModule(policy_dir, lr=1e-2, adapter=str(tmp_path), quantization="4bit", kl_coef=0.1)
    module.configure_model()
    assert torch.equal(logits(module.policy), logits(start.policy))
    before = state(module)
    train(make_trainer, make_data, watch, module, epochs=2)
    changed = {name for name, value in state(module).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".default." in name for name in changed)
    first = watch.rollouts[0]
    assert (first.old_log_probs - first.ref_log_probs).abs().max() <= 1e-5
