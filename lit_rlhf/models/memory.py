"""Memory that a run takes on each device, from shapes alone: no weights are loaded, nothing is run.

Weights, gradients and moments are counted exactly. Activations, cache and working memory are estimates for decoders of
attention and multilayer perceptrons with a fused activation function; one that is written out, as GPT-2's, keeps up to
half as many activations again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_rlhf.functional.vocabulary import CPU_TILE_BYTES, KEPT_BYTES, TILE_BYTES
from lit_rlhf.models.shape import ModelShape

Placement = Literal["one", "ddp", "fsdp2"]

GIB = 2**30
# Bytes per weight of a quantised linear layer: of NF4 with quantised constants, and of rows of int8.
_QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
# Bytes of AdamW's two moments in 8 bits, with a scale per 256 numbers.
_MOMENTS_8BIT = 2 * (1 + 4 / 256)
# Numbers in each layer and hidden feature that mixed precision keeps in float32: the residual stream and its norms.
_FLOAT32_KEPT = 3
# Prompt tokens of one pass of the engine, and numbers that its sampler handles at once.
_PREFILL_TOKENS, _SAMPLED_NUMBERS, _SAMPLED_NUMBERS_CPU = 8192, 2**28, 2**20


@dataclass(frozen=True)
class Workload:
    """What a run does, as far as its memory is concerned; counts are of one device.

    Args:
        shape: Of the policy.
        weight_bytes: Per number of the weights.
        compute_bytes: Per number of the arithmetic; fewer than ``weight_bytes`` with mixed precision.
        adapter_bytes: Per number of an adapter; peft keeps them in float32.
        lora_rank: 0 trains all weights.
        lora_targets: Layers with an adapter, as ``peft.LoraConfig`` has them.
        quantization: Of the frozen base.
        optimizer: As a recipe names it.
        reference: A ``copy`` of the weights, a frozen ``adapter``, or None where it costs nothing.
        critic: On an ``own`` backbone, the policy's (``shared``), on a second ``adapter``, or None.
        critic_shape: Of its own backbone.
        reward_bytes: Of the reward models' weights.
        checkpointing: Activations are recomputed in the backward pass.
        tokens: Of one forward and backward pass.
        rows: Completions that are sampled at once.
        prompts: Prompts whose keys and values are kept for them.
        prompt_length: Of the longest prompt.
        new_tokens: Longest completion.
        block: Completion tokens that the cache grows by.
        placement: On one device, or spread over several.
        devices: All of them.
        cpu: Whether they are CPUs.
    """

    shape: ModelShape
    weight_bytes: int = 4
    compute_bytes: int = 4
    adapter_bytes: int = 4
    lora_rank: int = 0
    lora_targets: str | tuple[str, ...] | None = "all-linear"
    quantization: str | None = None
    optimizer: str = "adamw"
    reference: Literal["copy", "adapter"] | None = None
    critic: Literal["own", "shared", "adapter"] | None = None
    critic_shape: ModelShape | None = None
    reward_bytes: int = 0
    checkpointing: bool = False
    tokens: int = 16_384
    rows: int = 512
    prompts: int = 64
    prompt_length: int = 512
    new_tokens: int = 256
    block: int = 256
    placement: Placement = "one"
    devices: int = 1
    cpu: bool = False

    @property
    def mixed(self) -> bool:
        """Whether autocast makes copies of the weights."""
        return self.compute_bytes < self.weight_bytes

    @property
    def base_bytes(self) -> int:
        """The policy's weights without adapters."""
        return model_bytes(self.shape.parameters, self.shape.linear_numbers, self.weight_bytes, self.quantization)

    @property
    def adapter_numbers(self) -> int:
        """Numbers of one adapter."""
        adapted = self.shape.adapted(self.lora_targets) if self.lora_rank else ()
        return sum(self.lora_rank * (linear.inputs + linear.outputs) for linear in adapted)

    @property
    def critic_backbone(self) -> int:
        """Numbers of a critic's own backbone, which has no vocabulary head."""
        shape = self.critic_shape or self.shape
        return shape.parameters - shape.head if self.critic == "own" else 0


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

    @property
    def resident(self) -> int:
        """There all the time."""
        return self.weights + self.reference + self.critic + self.reward_model + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """In an optimizer step."""
        return self.resident + self.activations + self.vocabulary + self.gathered

    @property
    def rollout(self) -> int:
        """In a rollout."""
        return self.resident + self.cache + self.sampling + self.gathered_rollout

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.training, self.rollout)


def model_bytes(numbers: int, linear: int, size: int, quantization: str | None) -> int:
    """Bytes of a model's weights.

    Args:
        numbers: All of them.
        linear: Those of linear layers, which are the ones that are quantised.
        size: Bytes of each of the others.
        quantization: ``8bit``, ``4bit`` or None.
    """
    if quantization is None:
        return numbers * size
    return (numbers - linear) * size + round(linear * _QUANTIZED_BYTES[quantization])


def memory_of(work: Workload) -> Memory:
    """Bytes on each device.

    Args:
        work: What is run.
    """
    shards = work.devices if work.placement == "fsdp2" else 1
    adapter = work.adapter_numbers * work.adapter_bytes
    critic, reference = _critic_bytes(work), _reference_bytes(work)
    trained = critic + (adapter if work.lora_rank else work.base_bytes)
    moments = 2 * trained
    if work.optimizer != "adamw":
        numbers = work.adapter_numbers * (1 + (work.critic == "adapter")) + work.critic_backbone
        moments = round(_MOMENTS_8BIT * (numbers if work.lora_rank else numbers + work.shape.parameters))
    return Memory(
        weights=_share(work.base_bytes + adapter, shards),
        reference=_share(reference, shards),
        critic=_share(critic, shards),
        reward_model=work.reward_bytes,
        gradients=_share(trained, shards) * (2 if work.placement == "ddp" else 1),
        optimizer=_share(moments, shards),
        activations=_activations(work),
        vocabulary=_vocabulary(work),
        gathered=_gathered(work),
        cache=cache_bytes(work),
        sampling=_sampling(work),
        gathered_rollout=_cast(work) + (whole_bytes(work) if shards > 1 else 0),
    )


def whole_bytes(work: Workload) -> int:
    """Weights of policy, reference and critic in one piece, which FSDP2 gathers on each device for a rollout.

    Args:
        work: What is run.
    """
    adapter = work.adapter_numbers * work.adapter_bytes
    return work.base_bytes + adapter + _critic_bytes(work) + _reference_bytes(work)


def _critic_bytes(work: Workload) -> int:
    head = (work.shape.hidden + 1) * 4 if work.critic else 0
    adapter = work.adapter_numbers * work.adapter_bytes if work.critic == "adapter" else 0
    return work.critic_backbone * work.weight_bytes + head + adapter


def _reference_bytes(work: Workload) -> int:
    adapter = work.adapter_numbers * work.adapter_bytes
    return {"copy": work.base_bytes, "adapter": adapter, None: 0}[work.reference]


def cache_bytes(work: Workload) -> int:
    """Keys and values of a decoding batch: each prompt's once, and the completions' in whole blocks.

    Args:
        work: What is run.
    """
    blocks = math.ceil(work.new_tokens / work.block)
    tokens = work.prompts * work.prompt_length + work.rows * blocks * work.block
    return tokens * work.shape.keys_and_values * work.compute_bytes


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
        kept = token_activations(work, shape)
        if work.checkpointing:  # each layer's input, and one whole layer at a time
            kept = shape.layers * shape.hidden * work.compute_bytes + kept // shape.layers
        total += kept * work.tokens
    return total + 3 * max(shape.widest for shape in passes) * work.compute_bytes * work.tokens


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
    critic = (work.critic_shape or work.shape) if work.critic == "own" else None
    numbers = work.shape.outside + 2 * work.shape.layer
    gradients = 0 if work.lora_rank else numbers
    if critic is not None:
        gradients += critic.outside - critic.head + 2 * critic.layer
        numbers += critic.outside - critic.head + 2 * critic.layer
    return (numbers + gradients) * work.weight_bytes


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
