"""What else a run could be: with other algorithms and other ways to hold its weights, or made to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lit_rlhf.models.memory import memory_of
from lit_rlhf.models.workload import Workload

RANK = 16
"""Of an adapter where the recipe has none."""

ADAPTER = "--model.lora_rank"
"""How the change from all weights to an adapter begins."""

_MOST_DEVICES = 1024
_FEW_TOKENS, _FEW_ROWS = 2048, 64  # enough to keep a device busy


def variants(work: Workload) -> dict[str, Workload]:
    """The same rollouts with both algorithms and three ways to hold the weights.

    Args:
        work: Of the recipe.
    """
    rank = work.lora_rank or RANK
    full = replace(
        work, weight_bytes=4, compute_bytes=min(4, work.compute_bytes), lora_rank=0, quantization=None, critic=None
    )
    if not work.mixed:
        full = replace(full, compute_bytes=4)
    low = {"weight_bytes": 2, "compute_bytes": 2, "lora_rank": rank, "reference": None, "critic": None}
    penalised = work.reference == "copy" or work.lora_rank  # with an adapter the recipe does not show it
    ways: dict[str, dict[str, Any]] = {
        "full": {"reference": "copy" if penalised else None},
        "LoRA": low,
        # Weights of bitsandbytes cannot be sharded.
        "QLoRA": {**low, "quantization": "4bit", "placement": "ddp" if work.devices > 1 else "one"},
    }
    critics = {"full": "own", "LoRA": "adapter", "QLoRA": "adapter"}
    grpo = {f"GRPO {way}": replace(full, **changes) for way, changes in ways.items()}
    ppo = {f"PPO {way}": replace(grpo[f"GRPO {way}"], critic=critics[way]) for way in ways}  # type: ignore[arg-type]
    return {**grpo, **ppo}


def changes(work: Workload) -> Iterator[tuple[str, Workload]]:
    """What makes a run smaller, cheapest first, each on top of those before.

    Args:
        work: As it is.
    """
    memory = memory_of(work)
    if not work.checkpointing and memory.training >= memory.rollout:
        work = replace(work, checkpointing=True)
        yield "--model.gradient_checkpointing true", work
    longest = work.prompt_length + work.new_tokens
    tokens = max(longest, min(work.tokens, _FEW_TOKENS))
    if tokens < work.tokens:
        work = replace(work, tokens=tokens)
        yield f"--data.micro_batch_tokens {tokens}", work
    if work.sampler == "vllm" and not work.sampler_sleeps and not work.cpu:
        work = replace(work, sampler_sleeps=True)
        yield "sleep: true of data.engine", work
    group = work.rows // work.prompts
    rows = max(group, min(work.rows, _FEW_ROWS) // group * group)
    if rows < work.rows and work.sampler == "policy":
        work = replace(work, rows=rows, prompts=rows // group)
        yield f"max_rows: {rows} of data.engine, a TransformersEngine", work
    for change, sharded in _sharded(work):
        if memory_of(sharded).peak < memory_of(work).peak:  # which the gathered weights of a rollout may undo
            work = sharded
            yield change, work
    if not work.lora_rank and work.optimizer == "adamw" and work.placement != "fsdp2":
        yield "--model.optimizer adamw_8bit", replace(work, optimizer="adamw_8bit")
    if not work.lora_rank:
        critic = work.critic and "adapter"
        low: dict[str, Any] = {"weight_bytes": 2, "compute_bytes": 2, "reference": None, "critic": critic}
        work = replace(work, lora_rank=RANK, optimizer="adamw", **low)
        yield f"{ADAPTER} {RANK} --model.dtype bfloat16" + (" --model.critic adapter" if critic else ""), work
    if work.quantization is None:
        strategy = " --trainer.strategy ddp" if work.placement == "fsdp2" else ""
        work = replace(work, quantization="4bit", placement="ddp" if work.devices > 1 else "one")
        yield f"--model.quantization 4bit{strategy}", work


def _sharded(work: Workload) -> Iterator[tuple[str, Workload]]:
    """Weights in shards, while training and in rollouts too."""
    if work.devices == 1 or work.quantization is not None:
        return
    fragment, option = "-c recipes/trainer/fsdp2.yaml", "--model.rollout_weights sharded"
    shards = replace(work, placement="fsdp2", optimizer="adamw")
    always = replace(shards, sharded_rollouts=True)
    if work.placement == "fsdp2":
        yield option, always
    elif memory_of(shards).peak < memory_of(work).peak:
        yield fragment, shards
        yield option, always
    else:
        yield f"{fragment} {option}", always


def fewest_devices(work: Workload, budget: float) -> int | None:
    """On how many devices FSDP2 makes a run fit, doubling those it has; None where no number does.

    Args:
        work: As it is.
        budget: Bytes of one device.
    """
    devices = max(2, work.devices)
    while devices <= _MOST_DEVICES and work.quantization is None:
        if memory_of(replace(work, placement="fsdp2", devices=devices, optimizer="adamw")).peak <= budget:
            return devices
        devices *= 2
    return None
