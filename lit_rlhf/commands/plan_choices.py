"""What else a run could be: with other algorithms and other ways to hold its weights, or made to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lit_rlhf.models.memory import Workload, memory_of

RANK = 16
"""Of an adapter where the recipe has none."""

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
    ways: dict[str, dict[str, Any]] = {
        "full": {"reference": "copy"},
        "LoRA": low,
        "QLoRA": {**low, "quantization": "4bit"},
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
    group = work.rows // work.prompts
    rows = max(group, min(work.rows, _FEW_ROWS) // group * group)
    if rows < work.rows:
        work = replace(work, rows=rows, prompts=rows // group)
        yield f"max_rows: {rows} of data.engine, a TransformersEngine", work
    if work.devices > 1 and work.placement == "ddp" and work.quantization is None:
        work = replace(work, placement="fsdp2", optimizer="adamw")
        yield "-c recipes/trainer/fsdp2.yaml", work
    if work.optimizer == "adamw" and work.placement != "fsdp2":
        yield "--model.optimizer adamw_8bit", replace(work, optimizer="adamw_8bit")
    if not work.lora_rank:
        critic = work.critic and "adapter"
        work = replace(
            work, lora_rank=RANK, weight_bytes=2, compute_bytes=2, reference=None, critic=critic, optimizer="adamw"
        )
        yield f"--model.lora_rank {RANK} --model.dtype bfloat16" + (" --model.critic adapter" if critic else ""), work
    if work.quantization is None and work.placement != "fsdp2":
        yield "--model.quantization 4bit", replace(work, quantization="4bit")


def fewest_devices(work: Workload, budget: float) -> int | None:
    """The smallest power of two of devices on which FSDP2 makes a run fit, if there is one.

    Args:
        work: As it is.
        budget: Bytes of one device.
    """
    devices = 2
    while devices <= _MOST_DEVICES and work.quantization is None:
        if memory_of(replace(work, placement="fsdp2", devices=devices, optimizer="adamw")).peak <= budget:
            return devices
        devices *= 2
    return None
