"""Memory that a run takes on each device, from shapes alone: no weights are loaded, nothing is run.

Weights, gradients and moments are counted exactly. Activations, cache and working memory are estimates for decoders of
attention and multilayer perceptrons with a fused activation function; one that is written out, as GPT-2's, keeps up to
half as many activations again. Measured on a CPU; what differs elsewhere is not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lit_rlhf.functional.vocabulary import CPU_TILE_BYTES, KEPT_BYTES, TILE_BYTES
from lit_rlhf.models.shape import ModelShape
from lit_rlhf.models.workload import Workload

GIB = 2**30
# Bytes of AdamW's two moments in 8 bits, with a scale per 256 numbers.
_MOMENTS_8BIT = 2 * (1 + 4 / 256)
# Numbers in each layer and hidden feature that mixed precision keeps in float32: the residual stream and its norms.
_FLOAT32_KEPT = 3
# Prompt tokens of one pass of the engine, and numbers that its sampler handles at once.
_PREFILL_TOKENS, _SAMPLED_NUMBERS, _SAMPLED_NUMBERS_CPU = 8192, 2**28, 2**20
# Tokens of one block of vLLM's cache, and the size of the whole cache on a CPU.
_ENGINE_BLOCK, _CPU_ENGINE_CACHE = 16, GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: what is there all the time, and what comes on top in an optimizer step and in a rollout.

    Args:
        weights: Of the policy and its adapter.
        reference: A copy of its own, if it needs one.
        critic: Backbone, adapter and head.
        reward_model: Of the reward functions.
        gradients: Of everything that is trained; under DDP twice, once in the buckets that are sent.
        optimizer: Two moments of each trained number.
        activations: What the backward pass needs, and one layer's gradients of it.
        vocabulary: Tiles of logits, and the head's gradient while they add to it.
        gathered: Weights that are made whole, or cast, for an optimizer step.
        cache: Keys and values of the completions that are sampled at once.
        sampling: Logits and attention of one token of each of them.
        gathered_rollout: Weights that are made whole, or cast, for a rollout.
        engine: What vLLM has on the same device, for as long as the run lasts.
        engine_rollout: The same, for a rollout only.
    """

    weights: int
    reference: int
    critic: int
    reward_model: int
    gradients: int
    optimizer: int
    activations: int
    vocabulary: int
    gathered: int
    cache: int
    sampling: int
    gathered_rollout: int
    engine: int = 0
    engine_rollout: int = 0

    @property
    def resident(self) -> int:
        """There all the time."""
        learned = self.weights + self.critic + self.gradients + self.optimizer
        return learned + self.reference + self.reward_model + self.engine

    @property
    def training(self) -> int:
        """In an optimizer step."""
        return self.resident + self.activations + self.vocabulary + self.gathered

    @property
    def rollout(self) -> int:
        """In a rollout."""
        return self.resident + self.cache + self.sampling + self.gathered_rollout + self.engine_rollout

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.training, self.rollout)


def memory_of(work: Workload) -> Memory:
    """Bytes on each device.

    Args:
        work: What is run.
    """
    shards = work.devices if work.placement == "fsdp2" else 1
    adapter, critic = work.whole_adapter_bytes, _critic_bytes(work)
    trained = critic + (adapter if work.lora_rank else work.base_bytes)
    moments = 2 * trained
    if work.optimizer != "adamw":
        numbers = work.adapter_numbers * (1 + (work.critic == "adapter")) + work.critic_backbone
        moments = round(_MOMENTS_8BIT * (numbers if work.lora_rank else numbers + work.shape.parameters))
    samples, engine = work.sampler == "policy", _engine(work)
    return Memory(
        weights=_share(work.base_bytes + adapter, shards),
        reference=_share(_reference_bytes(work), shards),
        critic=_share(critic, shards),
        reward_model=work.reward_bytes,
        gradients=_share(trained, shards) * (2 if work.placement == "ddp" else 1),
        optimizer=_share(moments, shards),
        activations=_activations(work),
        vocabulary=_vocabulary(work),
        gathered=_gathered(work),
        cache=cache_bytes(work) if samples else 0,
        sampling=_sampling(work) if samples else 0,
        gathered_rollout=_gathered_rollout(work),
        engine=0 if work.sampler_sleeps else engine,
        engine_rollout=engine if work.sampler_sleeps else 0,
    )


def whole_bytes(work: Workload) -> int:
    """Weights of policy, reference and critic in one piece, which FSDP2 gathers on each device for a rollout.

    Args:
        work: What is run.
    """
    return work.base_bytes + work.whole_adapter_bytes + _critic_bytes(work) + _reference_bytes(work)


def _critic_bytes(work: Workload) -> int:
    head = (work.shape.hidden + 1) * 4 if work.critic else 0
    adapter = work.whole_adapter_bytes if work.critic == "adapter" else 0
    return work.critic_backbone * work.weight_bytes + head + adapter


def _reference_bytes(work: Workload) -> int:
    return {"copy": work.base_bytes, "adapter": work.whole_adapter_bytes, None: 0}[work.reference]


def cache_bytes(work: Workload) -> int:
    """Keys and values of a decoding batch: each prompt's once, and the completions' in whole blocks.

    Args:
        work: What is run.
    """
    blocks = math.ceil(work.new_tokens / work.block)
    tokens = work.prompts * work.prompt_length + work.rows * blocks * work.block
    return tokens * work.shape.keys_and_values * work.compute_bytes


def _engine(work: Workload) -> int:
    """Of vLLM on the same device: its share, and at least all weights and the keys and values of the rows."""
    if work.sampler != "vllm":
        return 0
    rows = replace(work, block=_ENGINE_BLOCK, compute_bytes=work.sampler_bytes)
    needed = work.shape.parameters * work.sampler_bytes + (_CPU_ENGINE_CACHE if work.cpu else cache_bytes(rows))
    return needed if work.cpu else max(needed, round(work.sampler_share * work.device_bytes))


def token_activations(work: Workload, shape: ModelShape) -> int:
    """Bytes of one token that the backward pass needs, without recomputation.

    Args:
        work: What is run.
        shape: Of the model that it runs through.
    """
    kept = shape.activations * work.compute_bytes
    if work.mixed:
        kept += _FLOAT32_KEPT * shape.layers * shape.hidden * 4
    adapted = shape.adapted(work.lora_targets) if work.lora_rank and shape is work.shape else ()
    if work.compute_bytes < work.adapter_bytes and not work.mixed:  # peft casts each adapter's input to its own type
        kept += sum(linear.inputs for linear in adapted) * work.adapter_bytes
    return kept + len(adapted) * work.lora_rank * work.adapter_bytes


def _activations(work: Workload) -> int:
    """Of every pass that a loss depends on: the policy's, and that of a critic with weights of its own."""
    passes = [work.shape]
    if work.critic == "own":
        passes.append(work.critic_shape or work.shape)
    elif work.critic == "adapter":
        passes.append(work.shape)
    total = 0
    for shape in passes:
        layer = token_activations(work, shape) * work.tokens // shape.layers + _copied_prompts(work, shape)
        inputs = shape.hidden * work.compute_bytes * work.tokens
        total += shape.layers * inputs + layer if work.checkpointing else shape.layers * layer
    return total + 3 * max(shape.widest for shape in passes) * work.compute_bytes * work.tokens


def _copied_prompts(work: Workload, shape: ModelShape) -> int:
    """Keys and values in one layer's attention, of each completion with its prompt; on a CPU nothing is copied."""
    if work.cpu:
        return 0
    rows = work.tokens / (work.prompt_length * work.prompts / work.rows + work.new_tokens)
    return round(2 * rows * (work.prompt_length + work.new_tokens) * shape.attention * work.compute_bytes)


def _vocabulary(work: Workload) -> int:
    shape, logits = work.shape, work.tokens * work.shape.vocabulary * 4
    tile = min(logits, CPU_TILE_BYTES if work.cpu else TILE_BYTES)
    weight = shape.vocabulary * shape.hidden
    gradient = 0 if work.lora_rank else weight * (4 if work.compute_bytes == 4 else 4 + work.compute_bytes)
    return min(logits, KEPT_BYTES) + 2 * tile + gradient + work.tokens * shape.hidden * 4


def _gathered(work: Workload) -> int:
    """Weights and gradients that FSDP2 makes whole, two layers and what is outside of them, and autocast's copies."""
    if work.placement != "fsdp2" or work.devices == 1:
        return _cast(work)
    numbers = work.shape.outside + 2 * work.shape.layer
    gradients = 0 if work.lora_rank else numbers
    if work.critic == "own":
        critic = work.critic_shape or work.shape
        numbers += critic.outside - critic.head + 2 * critic.layer
        gradients += critic.outside - critic.head + 2 * critic.layer
    return (numbers + gradients) * work.weight_bytes


def _gathered_rollout(work: Workload) -> int:
    """All weights at once, or of the largest model two layers and what is outside of them."""
    if work.placement != "fsdp2" or work.devices == 1:
        return _cast(work)
    if not work.sharded_rollouts:
        return _cast(work) + whole_bytes(work)
    shapes = [work.shape, *([work.critic_shape] if work.critic_shape else [])]
    return _cast(work) + max(shape.outside + 2 * shape.layer for shape in shapes) * work.weight_bytes


def _cast(work: Workload) -> int:
    """One dequantised layer, or the copies that autocast keeps; of sharded weights each layer's goes with it."""
    if work.quantization:
        return max(linear.inputs * linear.outputs for linear in work.shape.linears) * work.compute_bytes
    if not work.mixed or work.placement == "fsdp2":
        return 0
    trained = (0 if work.lora_rank else work.shape.parameters) + work.critic_backbone
    return trained * work.compute_bytes


def _sampling(work: Workload) -> int:
    shape, size = work.shape, work.compute_bytes
    numbers = work.rows * shape.vocabulary
    drawn = 2 * numbers * size + 8 * min(numbers, _SAMPLED_NUMBERS_CPU if work.cpu else _SAMPLED_NUMBERS)
    attention = 3 * work.rows * shape.heads * (work.prompt_length + work.new_tokens) * 4
    prefill = min(_PREFILL_TOKENS, work.prompts * work.prompt_length) * (4 * shape.hidden + 3 * shape.widest) * size
    return drawn + max(attention, prefill)


def _share(total: int, shards: int) -> int:
    return math.ceil(total / shards)
