r"""Weights of tokens that are fixed before the first optimizer step on a rollout.

Two reasons to weigh a token: it was sampled by an engine whose probabilities are not quite the policy's, or it is one
of the few where the policy had a choice at all.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.functional.losses import bounded_exp

SamplingCorrection = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SAMPLING_CORRECTIONS: tuple[str, ...] = get_args(SamplingCorrection)


def sampling_weights(
    old_log_probs: Tensor,
    sampling_log_probs: Tensor,
    mask: Tensor,
    correction: SamplingCorrection = "token_truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    r"""Importance weights from the engine that sampled to the policy that is trained, kept in a range.

    .. math:: w_{i,t} = \frac{\pi_{old}(y_{i,t})}{\mu(y_{i,t})}, \qquad w_i = \prod_t w_{i,t}

    ``token_*`` weighs every token by its own, ``sequence_*`` every token by its completion's (the product, not a mean:
    only that one is unbiased). ``*_truncate`` brings a weight back into ``[low, high]``, ``*_mask`` sets a weight
    outside of it to 0.

    Sources: Ionides, *Truncated Importance Sampling* (2008); Yao et al., *Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training* (2025) for its use between engine and trainer.

    Args:
        old_log_probs: ``(N, T)`` nats, of the training forward before the first step.
        sampling_log_probs: ``(N, T)``, of the engine.
        mask: ``(N, T)`` bool, may have holes.
        correction: What is weighed, and what happens outside the range. ``off`` gives 1 everywhere.
        low: Smallest weight.
        high: Largest weight.

    Returns:
        ``(N, T)`` weights, 0 outside the mask, and ``(N, T)`` bool: tokens whose weight was outside the range.

    >>> old, engine = torch.tensor([[0.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    >>> sampling_weights(old, engine, torch.ones(1, 2, dtype=torch.bool))[0]
    tensor([[2., 1.]])
    >>> sampling_weights(old, engine, torch.ones(1, 2, dtype=torch.bool), "sequence_mask")[0]
    tensor([[0., 0.]])
    """
    if correction not in SAMPLING_CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(SAMPLING_CORRECTIONS)}, got {correction!r}")
    if correction == "off":
        return mask.to(old_log_probs.dtype), torch.zeros_like(mask)
    gap = torch.where(mask, old_log_probs - sampling_log_probs, 0.0)
    if correction.startswith("sequence"):
        gap = gap.sum(dim=-1, keepdim=True).expand_as(gap)
    weights = bounded_exp(gap)
    outside = mask & ((weights < low) | (weights > high))
    kept = weights.clamp(low, high) if correction.endswith("truncate") else torch.where(outside, 0.0, weights)
    return torch.where(mask, kept, 0.0), outside


def top_entropy_threshold(entropies: Tensor, share: float) -> float:
    r"""Entropy from which on a token is among the given share of tokens with the most of it.

    Source: *Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL* (arXiv 2506.01939); the
    share there is 0.2.

    Args:
        entropies: ``(M,)`` nats, of all tokens that compete: those of every row and rank.
        share: In ``(0, 1]``; at least one token is kept, and so are those that tie with the last.

    Returns:
        The smallest entropy kept; infinite where there is no token.

    >>> top_entropy_threshold(torch.tensor([0.1, 2.0, 0.3, 1.0, 0.0]), share=0.4)
    1.0
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    count = len(entropies)
    if count == 0:
        return math.inf
    # Rounded first: 0.2 of 15 tokens are three, though 0.2 * 15 is a little more than 3.
    kept = max(1, math.ceil(round(share * count, 6)))
    return entropies.sort(descending=True).values[kept - 1].item()
