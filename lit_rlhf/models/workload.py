"""What a run does, as far as its memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_rlhf.models.shape import ModelShape

Placement = Literal["one", "ddp", "fsdp2"]

# Bytes per weight of a quantised linear layer: of NF4 with quantised constants, and of rows of int8.
_QUANTIZED_BYTES = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}


@dataclass(frozen=True)
class Workload:
    """Models, options and counts; the latter are of one device.

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
        sharded_rollouts: Of weights that FSDP2 shards: a rollout gathers them layer by layer, not all at once.
        cpu: Whether they are CPUs.
        sampler: The policy itself, ``vllm`` beside it on the same device, or ``servers`` on others.
        sampler_bytes: Per number of what vLLM computes in.
        sampler_share: Of a device's memory, which vLLM takes whatever it needs.
        sampler_sleeps: vLLM gives it back between rollouts.
        device_bytes: Of each device, where that is known.
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
    sharded_rollouts: bool = False
    cpu: bool = False
    sampler: Literal["policy", "vllm", "servers"] = "policy"
    sampler_bytes: int = 4
    sampler_share: float = 0.0
    sampler_sleeps: bool = False
    device_bytes: int = 0

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
    def whole_adapter_bytes(self) -> int:
        """Bytes of one adapter."""
        return self.adapter_numbers * self.adapter_bytes

    @property
    def critic_backbone(self) -> int:
        """Numbers of a critic's own backbone, which has no vocabulary head."""
        shape = self.critic_shape or self.shape
        return shape.parameters - shape.head if self.critic == "own" else 0


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
