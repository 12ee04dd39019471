"""Forward passes over the rows of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_rlhf.functional.kl import kl_k1
from lit_rlhf.functional.masking import masked_sum
from lit_rlhf.strategies import together

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch


@torch.no_grad()
def by_parts(
    rollout: RolloutBatch, parts: list[list[int]], forward: Callable[[RolloutBatch], Tensor], extra_columns: int = 0
) -> Tensor:
    """Run a no-grad forward pass over a rollout in micro-batches, and put the results back in place.

    Every rank has to take part, if only with no rows.

    Args:
        rollout: ``N`` rows of completion width ``T``.
        parts: Rows of each pass.
        forward: From trimmed rows to ``(n, t + extra_columns)``.
        extra_columns: Columns beyond the completion's.

    Returns:
        ``(N, T + extra_columns)`` float32, 0 where nothing was computed.
    """
    n, width = rollout.completion_ids.shape
    result = torch.zeros(n, width + extra_columns, device=rollout.completion_ids.device)
    with together():
        for rows in parts:
            values = forward(rollout.select(rows).trim())
            result[torch.tensor(rows, device=result.device), : values.shape[1]] = values
    return result


def rollout_kl(rollout: RolloutBatch) -> Tensor | None:
    """Per-token k1 of the rollout against the reference, ``(N, T)``, 0 outside the mask; ``None`` without one.

    Args:
        rollout: Scored rows.
    """
    if rollout.ref_log_probs is None:
        return None
    old = rollout.sampling_log_probs if rollout.old_log_probs is None else rollout.old_log_probs
    zero = torch.zeros((), device=old.device)
    return torch.where(rollout.completion_mask, kl_k1(old, rollout.ref_log_probs), zero)


def outcome_rewards(rollout: RolloutBatch) -> Tensor:
    """The part of the task reward that belongs to the whole completion, ``(N,)``.

    Args:
        rollout: Scored rows.
    """
    if rollout.token_rewards is None:
        return rollout.rewards
    return rollout.rewards - rollout.token_rewards.sum(dim=1)


def penalised_token_rewards(rollout: RolloutBatch, kl_in_reward: bool) -> Tensor:
    """Rewards of single tokens, less the KL penalty where it is in the reward, ``(N, T)``.

    Args:
        rollout: Scored rows.
        kl_in_reward: Whether the penalty is part of the reward.
    """
    rewards = rollout.token_rewards
    if rewards is None:
        rewards = torch.zeros_like(rollout.sampling_log_probs)
    kl = rollout_kl(rollout)
    return rewards if kl is None or not kl_in_reward else rewards - rollout.kl_coef * kl


def masked_total(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count over the tokens that count, for the metrics.

    Args:
        values: ``(N, T)``.
        mask: ``(N, T)`` bool.
    """
    return masked_sum(values.detach(), mask), mask.sum()
