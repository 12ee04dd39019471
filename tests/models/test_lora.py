from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_rlhf.models.loading import load_causal_lm
from lit_rlhf.models.lora import POLICY_ADAPTER, VALUE_ADAPTER, active_adapter, add_lora, without_adapter


@pytest.fixture
def adapted(policy_dir: str) -> nn.Module:
    """A policy with two adapters that both change it."""
    model = add_lora(load_causal_lm(policy_dir), rank=4)
    add_lora(model, rank=4, adapter_name=VALUE_ADAPTER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1 if POLICY_ADAPTER in name else 0.3)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits


def state(model: nn.Module) -> dict[str, tuple[bool, bool]]:
    return {name: (p.requires_grad, model.training) for name, p in model.named_parameters()}


def test_a_new_adapter_changes_nothing_and_freezes_the_rest(policy_dir):
    plain = load_causal_lm(policy_dir)
    before = logits(plain)
    model = add_lora(plain, rank=4)
    assert torch.equal(logits(model), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_adapters_are_switched_and_restored(adapted, policy_dir):
    base = logits(load_causal_lm(policy_dir))
    policy, before = logits(adapted), state(adapted)
    with active_adapter(adapted, VALUE_ADAPTER):
        value = logits(adapted)
    with without_adapter(adapted):
        reference = logits(adapted)
    assert torch.equal(reference, base)
    assert (policy - base).abs().max() > 1e-3
    assert (value - policy).abs().max() > 1e-3
    assert torch.equal(logits(adapted), policy)
    assert state(adapted) == before


def test_state_is_restored_when_the_pass_raises(adapted):
    policy, before = logits(adapted), state(adapted)
    for context in (without_adapter(adapted), active_adapter(adapted, VALUE_ADAPTER)):
        with pytest.raises(RuntimeError, match="midway"), context:
            raise RuntimeError("midway")
        assert state(adapted) == before
        assert torch.equal(logits(adapted), policy)


def test_each_adapter_gets_its_own_gradient(adapted):
    with active_adapter(adapted, VALUE_ADAPTER):
        loss = adapted(input_ids=torch.tensor([[3, 4, 5]])).logits.square().mean()
    loss.backward()
    touched = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert touched
    assert all(f".{VALUE_ADAPTER}." in name for name in touched)


def test_reference_and_critic_of_a_half_billion_model_cost_next_to_nothing():
    """Shapes of Qwen2-0.5B, on the meta device: no second copy, and a critic below 2 % of the base."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        base = sum(p.numel() for p in model.parameters())
        adapted = add_lora(model, rank=16)
        with_policy = sum(p.numel() for p in adapted.parameters())
        add_lora(adapted, rank=16, adapter_name=VALUE_ADAPTER)
        with_critic = sum(p.numel() for p in adapted.parameters())
    assert 490e6 < base < 500e6
    critic = with_critic - with_policy + config.hidden_size + 1
    assert 0 < critic < 0.02 * base


def test_exported_adapter_loads_with_peft(adapted, policy_dir, tmp_path: Path):
    from peft import PeftModel

    adapted.save_pretrained(tmp_path, selected_adapters=[POLICY_ADAPTER])
    assert not (tmp_path / VALUE_ADAPTER).exists()
    loaded = PeftModel.from_pretrained(load_causal_lm(policy_dir), tmp_path)
    assert torch.allclose(logits(loaded), logits(adapted), atol=1e-6)
