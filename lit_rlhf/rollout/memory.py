"""From the options of a module and its rollouts to what they take of each device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_rlhf.engines.base import AheadEngine
from lit_rlhf.engines.cache import BLOCK, BLOCK_ELSEWHERE
from lit_rlhf.engines.vllm import VLLMEngine
from lit_rlhf.models.loading import load_config
from lit_rlhf.models.memory import GIB, Memory
from lit_rlhf.models.shape import ModelShape, classifier_numbers, shape_of
from lit_rlhf.models.workload import Placement, Workload, model_bytes
from lit_rlhf.rewards.reward_model import RewardModel

if TYPE_CHECKING:
    from lit_rlhf.modules.base import PolicyModule
    from lit_rlhf.rewards.combine import RewardScorer
    from lit_rlhf.rollout.datamodule import RolloutDataModule


def workload(
    module: PolicyModule,
    data: RolloutDataModule,
    prompt_length: int,
    *,
    shape: ModelShape | None = None,
    placement: Placement = "one",
    devices: int = 1,
    precision: str = "32-true",
    cpu: bool = False,
) -> Workload:
    """What a run does on each of its devices; neither module nor data need be set up.

    Args:
        module: The policy and its critic.
        data: The rollouts, their rewards, and how they are cut.
        prompt_length: Of the longest prompt, in tokens.
        shape: Of the policy; that of the module's own configuration by default.
        placement: How the run is spread over devices.
        devices: All of them.
        precision: The Trainer's.
        cpu: Whether they are CPUs.

    Raises:
        ConfigurationError: The configuration of a model cannot be loaded.
    """
    size = getattr(torch, module.dtype_name).itemsize
    true = {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(precision)
    size = true or size
    critic = getattr(module, "critic_kind", None)
    critic_model = getattr(module, "critic_model", None)
    adapted, penalised = bool(module.lora_rank), module.kl_coef > 0
    targets = module.lora_target_modules
    rows, prompts = _decoded(data, prompt_length, devices)
    return Workload(
        shape=shape_of(module.model_config) if shape is None else shape,
        weight_bytes=size,
        compute_bytes=2 if precision.endswith("mixed") else size,
        adapter_bytes=true or max(4, size),
        lora_rank=module.lora_rank,
        lora_targets=tuple(targets) if isinstance(targets, list) else targets,
        quantization=module.quantization,
        optimizer=module.optimizer_name,
        reference=("adapter" if module.adapter else None) if adapted else "copy" if penalised else None,
        critic=critic,
        critic_shape=shape_of(load_config(critic_model)) if critic_model else None,
        reward_bytes=_reward_bytes(data.scorer),
        checkpointing=module.gradient_checkpointing,
        tokens=_pass_tokens(data, prompt_length, devices),
        rows=rows,
        prompts=prompts,
        prompt_length=prompt_length,
        new_tokens=data.sampling.max_new_tokens,
        block=BLOCK["cpu"] if cpu else BLOCK_ELSEWHERE,
        placement=placement if devices > 1 else "one",
        devices=devices,
        sharded_rollouts=module.rollout_weights == "sharded",
        cpu=cpu,
        **_sampler(data.engine, size, cpu),
    )


def _sampler(engine: Any, size: int, cpu: bool) -> dict[str, Any]:
    """Whose memory rollouts take, besides the policy's, the numbers of whose weights have a size."""
    if isinstance(engine, VLLMEngine):
        return {
            "sampler": "vllm",
            "sampler_bytes": size if engine.dtype == "auto" else getattr(torch, engine.dtype).itemsize,
            "sampler_share": engine.gpu_memory_utilization,
            "sampler_sleeps": engine.sleep and not cpu,
        }
    return {"sampler": "servers"} if isinstance(engine, AheadEngine) else {}


def memory_line(memory: Memory) -> str:
    """The banner's line.

    Args:
        memory: Of one device.
    """
    parts = {
        "weights": memory.weights,
        "reference": memory.reference,
        "critic": memory.critic,
        "reward model": memory.reward_model,
        "gradients and moments": memory.gradients + memory.optimizer,
        "vLLM": memory.engine,
        "training": memory.training - memory.resident,
        "rollout instead": memory.rollout - memory.resident,
    }
    unit, word = (GIB, "GiB") if memory.peak >= GIB else (2**20, "MiB")
    listed = ", ".join(f"{name} {size / unit:.1f}" for name, size in parts.items() if size)
    return f"about {memory.peak / unit:.1f} {word} at most: {listed}"


def _pass_tokens(data: RolloutDataModule, prompt_length: int, devices: int) -> int:
    """Tokens of the largest micro-batch of one device, the prompt of a group's completions run once."""
    prompts = -(-data.prompts_per_iteration // devices)
    prompts = -(-prompts // data.steps_per_pass)
    rows = prompts * data.group_size
    if data.micro_batch_size is not None:
        rows = min(rows, data.micro_batch_size)
    elif data.micro_batches is not None:
        rows = -(-rows // data.micro_batches)
    tokens = -(-rows // data.group_size) * prompt_length + rows * data.sampling.max_new_tokens
    return tokens if data.token_limit is None else min(tokens, data.token_limit)


def _decoded(data: RolloutDataModule, prompt_length: int, devices: int) -> tuple[int, int]:
    """Completions that one device samples at once, and their prompts; a prompt's completions stay together."""
    engine: Any = data.engine
    prompts = -(-data.prompts_per_iteration // devices)
    group = data.group_size
    prompts = min(prompts, max(1, getattr(engine, "max_rows", prompts * group) // group))
    max_tokens = getattr(engine, "max_tokens", None)
    if max_tokens is not None:
        prompts = min(prompts, max(1, max_tokens // (prompt_length + group * data.sampling.max_new_tokens)))
    return prompts * group, prompts


def _reward_bytes(scorer: RewardScorer) -> int:
    models = [function for function in scorer.functions if isinstance(function, RewardModel)]
    total = 0
    for model in models:
        size = getattr(torch, model.dtype).itemsize
        total += model_bytes(*classifier_numbers(load_config(model.model_name)), size, model.quantization)
    return total
