"""Draw the next token by inverse CDF, and keep only its log-prob."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.engines.base import SamplingParams


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``(R, V)`` of any floating type.
        uniform: ``(R,)`` float64 in ``[0, 1)``.
        sampling: Temperature and restrictions.

    Returns:
        ``(R,)`` int64 ids and ``(R,)`` float32 log-probs under the unrestricted distribution.
    """
    scaled = logits.float()
    if sampling.temperature == 0:
        ids = scaled.argmax(dim=-1)
        return ids, scaled.gather(-1, ids[:, None])[:, 0] - scaled.logsumexp(dim=-1)
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    log_total = scaled.logsumexp(dim=-1)
    probs = (scaled - log_total[:, None]).exp()
    if sampling.restricted:
        probs = _restrict(probs, sampling)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    # The first index whose cumulative sum exceeds u * total: never a token of probability 0.
    ids = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    ids = ids.clamp(max=logits.shape[-1] - 1)
    return ids[:, 0], scaled.gather(-1, ids)[:, 0] - log_total


def _restrict(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Zero what top-k, top-p and min-p leave out, each judged on the unrestricted distribution; at least one stays."""
    keep = torch.ones_like(probs, dtype=torch.bool)
    if sampling.min_p > 0:
        keep &= probs >= sampling.min_p * probs.amax(dim=-1, keepdim=True)
    if sampling.top_k > 0 or sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[-1], device=probs.device)
        kept = torch.ones_like(keep)
        if sampling.top_k > 0:
            kept &= rank < sampling.top_k
        if sampling.top_p < 1:
            # A token stays while the likelier ones have not yet reached top_p.
            kept &= ordered.cumsum(dim=-1) - ordered < sampling.top_p
        keep &= torch.zeros_like(keep).scatter(-1, order, kept)
    return torch.where(keep, probs, 0.0)
