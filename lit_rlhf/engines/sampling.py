"""Draw the next token by inverse CDF, and keep only its log-prob."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.engines.base import SamplingParams

# Tokens whose probabilities are summed before the search: the square root of a large vocabulary.
_BLOCK = 128
# Numbers handled at once; on a CPU they stay in its cache instead of going through memory five times.
_CHUNK = {"cpu": 2**20}
_CHUNK_ELSEWHERE = 2**28
# Candidates among which top-p is looked for before the whole vocabulary is sorted.
_CANDIDATES = 1024


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row; what a row draws does not depend on the others.

    Args:
        logits: ``(R, V)`` of any floating type.
        uniform: ``(R,)`` float64 in ``[0, 1)``.
        sampling: Temperature and restrictions.

    Returns:
        ``(R,)`` int64 ids and ``(R,)`` float32 log-probs under the unrestricted distribution.
    """
    rows = max(1, _CHUNK.get(logits.device.type, _CHUNK_ELSEWHERE) // logits.shape[-1])
    if len(logits) <= rows:
        return _sample(logits, uniform, sampling)
    parts = [_sample(*part, sampling) for part in zip(logits.split(rows), uniform.split(rows), strict=True)]
    ids, log_probs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if sampling.temperature == 0:
        ids = logits.argmax(dim=-1)
        return ids, logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
    largest = logits.amax(dim=-1, keepdim=True)
    weights = logits - largest
    if sampling.temperature != 1.0:
        weights /= sampling.temperature
    weights.exp_()
    sums = _block_sums(weights)
    total = sums.sum(dim=-1, keepdim=True)
    if sampling.restricted:
        weights = _restrict(weights, total, sampling)
        sums = _block_sums(weights)
    ids = _draw(weights, sums, uniform)
    log_probs = (logits.gather(-1, ids) - largest) / sampling.temperature - total.log()
    return ids[:, 0], log_probs[:, 0].float()


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of neighbouring tokens' weights; ``(R, V)`` to ``(R, V / block)``, float64."""
    whole = weights.shape[-1] // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)
    if whole < weights.shape[-1]:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    return sums.double()


def _draw(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in two levels, first a block, then a token in it; ``(R, 1)`` ids, never one of weight 0."""
    block, rest = _search(sums, uniform[:, None])
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = places < weights.shape[-1]
    candidates = weights.gather(-1, places.where(inside, 0)).where(inside, 0.0)
    place, _ = _search(candidates.double(), rest)
    return (block * _BLOCK + place).clamp_(max=weights.shape[-1] - 1)


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``uniform`` falls among weights laid end to end, and how far into that one, as a share of it.

    Float64 resolves single tokens of a flat tail, over which a float32 sum would stand still.
    """
    ends = weights.cumsum(dim=-1)
    total = ends[:, -1:]
    # Below the total even after rounding: the first end beyond the target is then one that some weight reached.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    # The clamps here and above are for a row of NaN, whose log-prob tells.
    place = torch.searchsorted(ends, target, right=True).clamp_(max=weights.shape[-1] - 1)
    width = weights.gather(-1, place)
    return place, ((target - (ends.gather(-1, place) - width)) / width).clamp_(min=0.0)


def _restrict(weights: Tensor, total: Tensor, sampling: SamplingParams) -> Tensor:
    """Zero what top-k, top-p and min-p leave out, each judged on the unrestricted distribution; at least one stays.

    Args:
        weights: ``(R, V)`` probabilities over the largest one.
        total: ``(R, 1)`` float64, their sum.
        sampling: The restrictions.
    """
    keep = torch.ones_like(weights, dtype=torch.bool)
    if sampling.min_p > 0:
        keep &= weights >= sampling.min_p
    if sampling.top_k > 0 or sampling.top_p < 1:
        keep &= _likeliest(weights, total, sampling)
    return weights * keep


def _likeliest(weights: Tensor, total: Tensor, sampling: SamplingParams) -> Tensor:
    """The tokens that both top-k and top-p keep, ties going to the lower id; ``(R, V)`` bool."""
    vocab = weights.shape[-1]
    candidates = min(sampling.top_k or _CANDIDATES, vocab)
    ordered = weights.topk(candidates, dim=-1).values
    count = _nucleus(ordered, total, sampling.top_p)
    if sampling.top_k == 0 and candidates < vocab and bool((count == candidates).any()):
        ordered = weights.sort(dim=-1, descending=True).values
        count = _nucleus(ordered, total, sampling.top_p)
    last = ordered.gather(-1, count - 1)
    if bool(((weights >= last).sum(dim=-1, keepdim=True) == count).all()):  # nothing left out ties with the last
        return weights >= last
    above, ties = weights > last, weights == last
    return above | (ties & (ties.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def _nucleus(ordered: Tensor, total: Tensor, top_p: float) -> Tensor:
    """How many of the likeliest tokens stay: those before which ``top_p`` was not reached yet; ``(R, 1)``."""
    if top_p >= 1:
        return torch.full_like(total, ordered.shape[-1], dtype=torch.long)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    return (before < top_p * total).sum(dim=-1, keepdim=True).clamp_(min=1)
