"""Memory from shapes: published sizes of real models, exact counts, and what each choice changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_outputs
from lit_rlhf.models.lora import add_lora, enable_gradient_checkpointing
from lit_rlhf.models.memory import GIB, cache_bytes, memory_of, token_activations, whole_bytes
from lit_rlhf.models.shape import classifier_numbers, shape_of
from lit_rlhf.models.workload import Workload, model_bytes

MODELS = Path(__file__).parents[2] / "recipes" / "models"
TINY = LlamaConfig(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=352,
    vocab_size=64,
    max_position_embeddings=256,
)


def published(name):
    return shape_of(AutoConfig.for_model(**json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("qwen2.5_0.5b", 494_032_768, 24),
        ("qwen2.5_7b", 7_615_616_512, 28),
        ("llama3_70b", 70_553_706_496, 80),
    ],
)
def test_the_sizes_of_published_models(name, parameters, layers):
    shape = published(name)
    assert (shape.parameters, shape.layers) == (parameters, layers)
    assert shape.layers * shape.layer + shape.outside == parameters


def test_a_7b_llama_is_counted_without_its_weights():
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    shape = shape_of(LlamaConfig(vocab_size=32_000, **sizes))
    assert shape.parameters == 6_738_415_616
    assert shape.head == 32_000 * 4096
    assert shape.keys_and_values == 2 * 32 * 4096
    full = memory_of(Workload(shape, reference="copy"))
    assert full.weights == full.reference == full.gradients == 4 * shape.parameters
    assert full.optimizer == 8 * shape.parameters
    # The mission's question: no 80 GB device holds it, an adapter on it does.
    assert full.resident > 120 * GIB
    adapter = memory_of(Workload(shape, weight_bytes=2, compute_bytes=2, lora_rank=16, tokens=4096, rows=64))
    assert adapter.resident < 14 * GIB


@pytest.mark.parametrize("config", [TINY, GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=50, n_positions=64)])
def test_a_shape_is_that_of_the_built_model(config):
    shape = shape_of(config)
    model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = add_lora(model, 4)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert Workload(shape, lora_rank=4).adapter_numbers == trained


def test_layers_with_an_adapter_are_found_as_peft_finds_them():
    shape = shape_of(TINY)
    for targets in (["q_proj", "up_proj"], r".*\.(k|v)_proj"):
        adapted = add_lora(AutoModelForCausalLM.from_config(TINY), 4, target_modules=targets)
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        given = targets if isinstance(targets, str) else tuple(targets)
        assert Workload(shape, lora_rank=4, lora_targets=given).adapter_numbers == trained


def test_an_architecture_without_attention_is_refused():
    with pytest.raises(ConfigurationError, match="the shape of a MambaConfig cannot be read"):
        shape_of(MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=10))


def saved_bytes(model, rows):
    """Bytes that autograd keeps for the backward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        completion_outputs(model, rows)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_rank": 4},
        {"weight_bytes": 2, "compute_bytes": 2},
        {"weight_bytes": 2, "compute_bytes": 2, "lora_rank": 4},
        {"checkpointing": True},
    ],
    ids=["all", "adapter", "bfloat16", "bfloat16-adapter", "checkpointing"],
)
def test_activations_are_about_what_autograd_keeps(options):
    work = Workload(shape_of(TINY), **options)
    model = AutoModelForCausalLM.from_config(TINY, dtype=torch.float32 if work.weight_bytes == 4 else torch.bfloat16)
    if work.checkpointing:
        enable_gradient_checkpointing(model)
    if work.lora_rank:
        model = add_lora(model, work.lora_rank)
    ids = torch.randint(2, 64, (8, 48))
    full = torch.full((8,), 48)
    rows = Completions(ids[:2].repeat_interleave(4, 0), full, ids, full, torch.arange(2).repeat_interleave(4))
    tokens = 2 * 48 + 8 * 48
    found = saved_bytes(model.train(), rows) / tokens
    kept = token_activations(work, work.shape)
    if work.checkpointing:
        kept = work.shape.layers * work.shape.hidden * 4
    # Around them stand states, token ids and log-probs of the head, which weigh more in a small model.
    assert 0.85 * kept < found < 1.3 * kept + 8 * work.shape.hidden * 4


def test_what_is_spread_over_devices():
    work = Workload(published("qwen2.5_7b"), reference="copy", critic="own")
    alone, ddp, sharded = (
        memory_of(replace(work, placement=placement, devices=8)) for placement in ("one", "ddp", "fsdp2")
    )
    assert ddp.weights == alone.weights
    assert ddp.gradients == 2 * alone.gradients  # and the buckets that are sent
    for part in ("weights", "reference", "critic", "gradients", "optimizer"):
        assert abs(8 * getattr(sharded, part) - getattr(alone, part)) < 8
    assert sharded.activations == alone.activations
    # For a rollout every device has whole weights of all three models.
    assert sharded.gathered_rollout == whole_bytes(work) == alone.weights + alone.reference + alone.critic
    assert alone.gathered == alone.gathered_rollout == 0


def test_a_critic_adds_what_it_trains():
    shape = published("qwen2.5_7b")
    grpo = memory_of(Workload(shape, reference="copy"))
    own = memory_of(Workload(shape, reference="copy", critic="own"))
    shared = memory_of(Workload(shape, reference="copy", critic="shared"))
    backbone = 4 * (shape.parameters - shape.head)
    assert own.critic == backbone + 4 * (shape.hidden + 1)
    assert own.gradients - grpo.gradients == own.critic
    assert own.optimizer - grpo.optimizer == 2 * own.critic
    assert shared.resident - grpo.resident == 4 * 4 * (shape.hidden + 1)
    assert own.activations > 1.5 * grpo.activations
    assert shared.activations == grpo.activations
    small = Workload(shape, critic="own", critic_shape=published("qwen2.5_0.5b"))
    assert memory_of(small).critic < 0.1 * own.critic


def test_a_quantised_base():
    shape = published("qwen2.5_7b")
    low = Workload(shape, weight_bytes=2, compute_bytes=2, lora_rank=16)
    four, eight = (replace(low, quantization=kind) for kind in ("4bit", "8bit"))
    assert four.base_bytes < eight.base_bytes < low.base_bytes
    outside = 2 * (shape.parameters - shape.linear_numbers)
    assert four.base_bytes - outside == pytest.approx(4.13 / 8 * shape.linear_numbers, rel=1e-2)
    assert model_bytes(100, 60, 2, None) == 200
    assert model_bytes(100, 60, 2, "8bit") == 140


def test_a_quantised_base_is_what_bitsandbytes_makes_of_it(tmp_path):
    from lit_rlhf.models.loading import load_causal_lm

    config = LlamaConfig(**{**TINY.to_dict(), "hidden_size": 256, "intermediate_size": 1024})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), quantization="4bit")
    kept = 0
    for parameter in model.parameters():
        kept += parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            kept += state.absmax.nbytes + state.state2.absmax.nbytes
    assert Workload(shape_of(config), quantization="4bit", lora_rank=1).base_bytes == pytest.approx(kept, rel=1e-3)


def test_moments_in_eight_bits():
    work = Workload(published("qwen2.5_0.5b"))
    whole, eight = (memory_of(replace(work, optimizer=name)).optimizer for name in ("adamw", "paged_adamw_8bit"))
    assert eight == pytest.approx(whole / 4, rel=0.02)


def test_a_cache_holds_each_prompt_once_and_whole_blocks_of_completions():
    shape = shape_of(TINY)
    work = Workload(shape, rows=8, prompts=2, prompt_length=10, new_tokens=33, block=32)
    assert cache_bytes(work) == (2 * 10 + 8 * 64) * 2 * 3 * 2 * 32 * 4
    assert cache_bytes(replace(work, compute_bytes=2)) == cache_bytes(work) // 2


def test_the_vocabulary_costs_a_few_tiles_however_many_tokens_there_are():
    work = Workload(published("qwen2.5_7b"), lora_rank=8)
    logits = work.tokens * work.shape.vocabulary * 4
    tiles = memory_of(work).vocabulary - work.tokens * work.shape.hidden * 4
    assert tiles == (128 + 2 * 256) * 2**20 < 0.1 * logits
    more = replace(work, tokens=2 * work.tokens)
    assert memory_of(more).vocabulary - memory_of(work).vocabulary == work.tokens * work.shape.hidden * 4


def test_mixed_precision_halves_activations_and_copies_weights():
    work = Workload(published("qwen2.5_7b"))
    mixed = memory_of(replace(work, compute_bytes=2))
    assert 0.5 < mixed.activations / memory_of(work).activations < 0.75
    assert mixed.gathered == 2 * work.shape.parameters
    assert mixed.weights == memory_of(work).weights


def test_recomputation_saves_activations_alone():
    work = Workload(published("qwen2.5_7b"))
    before, after = memory_of(work), memory_of(replace(work, checkpointing=True))
    assert after.activations < 0.2 * before.activations
    assert replace(after, activations=before.activations) == before
    assert before.peak == before.training > before.rollout


def test_a_reward_model_is_counted_without_its_weights():
    numbers, linear = classifier_numbers(LlamaConfig(**{**TINY.to_dict(), "num_labels": 1}))
    shape = shape_of(TINY)
    assert numbers == shape.parameters - shape.head + shape.hidden
    assert linear == shape.linear_numbers


@pytest.mark.parametrize("critic", [None, "own"])
def test_sharded_rollouts_gather_no_more_than_two_layers_and_what_is_outside(critic):
    shape = published("llama3_70b")
    work = Workload(shape, reference="copy", critic=critic, placement="fsdp2", devices=8)
    gathered, sharded = memory_of(work), memory_of(replace(work, sharded_rollouts=True))
    assert gathered.gathered_rollout == whole_bytes(work)
    assert sharded.gathered_rollout == 4 * (shape.outside + 2 * shape.layer)
    assert sharded == replace(gathered, gathered_rollout=sharded.gathered_rollout)
    for placement, devices in (("ddp", 8), ("fsdp2", 1)):  # nothing is sharded
        alone = replace(work, placement=placement, devices=devices)
        assert memory_of(alone) == memory_of(replace(alone, sharded_rollouts=True))
