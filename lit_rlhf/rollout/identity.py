"""What decides which completions an iteration draws and what they are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_rlhf.checkpointing.fingerprint import prompts_identity

if TYPE_CHECKING:
    from lit_rlhf.rollout.datamodule import RolloutDataModule

_OPTIONS = ("seed", "shuffle", "prompts_per_iteration", "group_size", "passes", "steps_per_pass", "staleness")
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")


def data_fingerprint(data: RolloutDataModule) -> dict[str, Any]:
    """Plain values by name. How a step is cut into micro-batches is not among them: it changes no gradient.

    Args:
        data: With its prompts.
    """
    train = data.prompts.get("train")
    weights = [float(weight) for weight in data.scorer.weights]
    return {
        **{name: getattr(data, name) for name in _OPTIONS},
        **{name: getattr(data.sampling, name) for name in _SAMPLING},
        "rewards": dict(zip(data.scorer.names, weights, strict=True)),
        "training prompts": None if train is None else f"{len(train)} prompts ({prompts_identity(train)})",
    }
