"""Whole runs on one CUDA device."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lit_rlhf import GRPOModule, PPOModule
from lit_rlhf.models.lora import without_adapter

pytestmark = pytest.mark.gpu
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
ALGORITHMS: dict[str, tuple[type, dict[str, Any]]] = {
    "grpo": (GRPOModule, {}),
    "grpo_lora": (GRPOModule, {"lora_rank": 4}),
    "ppo_own": (PPOModule, {}),
    "ppo_shared": (PPOModule, {"critic": "shared"}),
    "ppo_adapter": (PPOModule, {"critic": "adapter", "lora_rank": 4}),
}


class Keep(L.Callback):
    """The first step's gradient, on the CPU."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.gradient is None:
            gradients = [p.grad.flatten().cpu() for p in pl_module.parameters() if p.grad is not None]
            self.gradient = torch.cat(gradients)


def on(device: torch.device, **options: Any) -> dict[str, Any]:
    """Options of a Trainer on one device."""
    return {"accelerator": device.type, "devices": [device.index] if device.type == "cuda" else 1, **options}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS.to(next(model.parameters()).device)).logits.float().cpu()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_equals_the_cpus(cuda, make_trainer, make_data, policy_dir, name):
    kind, options = ALGORITHMS[name]
    seen = {}
    for device in (torch.device("cpu"), cuda):
        torch.manual_seed(5)
        keep, module, data = Keep(), kind(policy_dir, lr=1e-3, **options), make_data(passes=2)
        make_trainer(**on(device), callbacks=[keep]).fit(module, data)
        tokens = data.rollout.completion_ids.tolist()
        weights = torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
        seen[device.type] = tokens, keep.gradient, weights
    (tokens, gradient, weights), (other_tokens, other_gradient, other_weights) = seen["cpu"], seen[cuda.type]
    assert other_tokens == tokens
    assert (other_gradient - gradient).norm() <= 1e-4 * gradient.norm()
    assert (other_weights - weights).abs().max() <= 2e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_mixed_precision(cuda, make_trainer, make_data, policy_dir, watch, name):
    kind, options = ALGORITHMS[name]
    module = kind(policy_dir, lr=1e-4, **options)
    make_trainer(**on(cuda, precision="bf16-mixed"), callbacks=[watch], max_epochs=2).fit(module, make_data(passes=2))
    assert watch.final["policy/first_step_ratio_gap"] < 0.02
    assert torch.isfinite(torch.tensor(watch.final["loss"]))


def test_weights_in_bfloat16(cuda, make_trainer, make_data, policy_dir, watch):
    module = GRPOModule(policy_dir, lr=1e-3, dtype="bfloat16", gradient_checkpointing=True)
    make_trainer(**on(cuda), callbacks=[watch], max_epochs=2).fit(module, make_data(passes=2))
    assert {p.dtype for p in module.policy.parameters()} == {torch.bfloat16}
    assert watch.final["policy/first_step_ratio_gap"] < 0.05


def test_resumed_from_a_checkpoint(cuda, make_trainer, make_data, policy_dir, tmp_path):
    def run(ckpt_path: str | None = None) -> Any:
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = make_trainer(**on(cuda), max_epochs=4, callbacks=[saving], enable_checkpointing=True)
        module = GRPOModule(policy_dir, lr=1e-2)
        trainer.fit(module, make_data(), ckpt_path=ckpt_path)
        return logits(module.policy)

    whole = run()
    torch.testing.assert_close(run(str(tmp_path / "epoch=1.ckpt")), whole, rtol=1e-3, atol=1e-3)


def test_fsdp2_on_one_device(cuda, make_trainer, make_data, policy_dir, tmp_path):
    """Sharded over one: gathering, sampling, steps and export run through the same calls as on eight."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    module = GRPOModule(policy_dir, lr=1e-3)
    make_trainer(**on(cuda), strategy=strategy, max_epochs=2).fit(module, make_data())
    single = GRPOModule(policy_dir, lr=1e-3)
    make_trainer(**on(cuda), max_epochs=2).fit(single, make_data())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(logits(plain), logits(single.policy), rtol=1e-3, atol=1e-3)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_qlora(cuda, make_trainer, make_data, policy_dir, watch, tmp_path, kind):
    module = GRPOModule(policy_dir, lr=2e-2, lora_rank=4, quantization=kind, optimizer="paged_adamw_8bit")
    make_trainer(**on(cuda), callbacks=[watch], max_epochs=8).fit(module, make_data(passes=2))
    rewards = [float(rollout.rewards.mean()) for rollout in watch.rollouts]
    assert rewards[-1] > rewards[0] + 0.2
    assert watch.final["policy/first_step_ratio_gap"] <= (1e-3 if kind == "4bit" else 0.05)
    trained = logits(module.policy)
    with without_adapter(module.policy):
        base = logits(module.policy)
    fresh = GRPOModule(policy_dir, lora_rank=4, quantization=kind)
    fresh.configure_model()
    assert (logits(fresh.policy) - base).abs().max() <= 0.1 * base.abs().max()  # the CPU rounds no activations
    plain = AutoModelForCausalLM.from_pretrained(module.save_pretrained(tmp_path / "export"))
    limit = 1e-3 if kind == "4bit" else 0.1 * float(trained.abs().max())
    assert (logits(plain) - trained).abs().max() <= limit
    assert (trained - base).abs().max() > limit


def test_speed_of_a_small_model(cuda, make_trainer, make_data, policy_dir, tmp_path, watch, note):
    """Nothing is asserted about the speed: it goes into the table, to be compared between machines and versions."""
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    module = GRPOModule(str(tmp_path), lr=1e-6)
    data = make_data(max_new_tokens=256, group_size=16)
    start = time.perf_counter()
    make_trainer(**on(cuda, precision="bf16-mixed"), max_epochs=3, callbacks=[watch]).fit(module, data)
    seconds = time.perf_counter() - start
    tokens = [int(rollout.completion_lengths.sum()) for rollout in watch.rollouts]
    assert len(tokens) == 3
    assert torch.isfinite(torch.tensor(watch.final["loss"]))
    speeds = [f"{name} {value:,.0f}" for name, value in watch.final.items() if "per_second" in name]
    note(f"110 M parameters, {sum(tokens):,} tokens sampled and trained in {seconds:.1f} s; {'; '.join(speeds)}")
