r"""The clipped policy loss and its explicit denominators.

A micro-batch returns a *sum*; the denominator belongs to the whole optimizer step, over all micro-batches and ranks.
So neither the number of micro-batches nor that of ranks changes the gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.functional.masking import masked_sum

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``exp(clip(log_probs - old_log_probs, -20, 20))``; exactly 1, with a gradient, where the two are equal.

    Args:
        log_probs: Any shape, nats, under the policy now.
        old_log_probs: Same shape, under the policy that sampled the tokens.
    """
    return (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    r"""Clipped surrogate, per token, to be minimised.

    .. math:: -\min\bigl(r_t A_t,\; \mathrm{clip}(r_t, 1-\epsilon_{low}, 1+\epsilon_{high})\, A_t\bigr)

    Source: Schulman et al., *Proximal Policy Optimization* (arXiv 1707.06347), eq. 7; two ranges as in DAPO
    (arXiv 2503.14476).

    Args:
        ratio: ``(N, T)``, see :func:`importance_ratio`.
        advantages: ``(N, T)``.
        clip_low: ``epsilon_low``, in ``[0, 1)``.
        clip_high: ``epsilon_high``, not negative.

    Returns:
        ``(N, T)``.

    >>> clipped_policy_loss(torch.tensor([0.5, 0.9, 1.0, 1.5]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    tensor([-0.5000, -0.9000, -1.0000, -1.2000])
    >>> clipped_policy_loss(torch.tensor([0.5, 0.9, 1.0, 1.5]), torch.tensor([-1.0, -1.0, -1.0, -1.0]))
    tensor([0.8000, 0.9000, 1.0000, 1.5000])
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_tokens(ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Tokens whose gradient the clip removes: above the range with a positive advantage, below it with a negative one.

    Args:
        ratio: ``(N, T)``.
        advantages: ``(N, T)``.
        clip_low: ``epsilon_low``.
        clip_high: ``epsilon_high``.

    Returns:
        ``(N, T)`` bool.

    >>> clipped_tokens(torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    tensor([ True, False, False,  True])
    """
    return ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))


def aggregate(per_token: Tensor, mask: Tensor, denominator: float, aggregation: Aggregation = "token_mean") -> Tensor:
    r"""Weighted sum of a per-token loss over one micro-batch, divided by the optimizer step's denominator.

    ===================  ====================  =================================================
    aggregation          weight of a token     denominator (see :func:`loss_denominator`)
    ===================  ====================  =================================================
    ``token_mean``       1                     tokens of the step
    ``sequence_mean``    1 / its row's tokens  non-empty rows of the step
    ``constant``         1                     rows of the step times ``max_new_tokens``
    ===================  ====================  =================================================

    Sources: DAPO (arXiv 2503.14476) for ``token_mean``; DeepSeekMath (arXiv 2402.03300) for ``sequence_mean``;
    *Understanding R1-Zero-Like Training* (arXiv 2503.20783) for ``constant``.

    Args:
        per_token: ``(N, T)``.
        mask: ``(N, T)`` bool, may have holes.
        denominator: Of the whole optimizer step, over all ranks; 0 gives a loss of exactly 0.
        aggregation: See the table.

    Returns:
        Scalar, with a graph even if no token counts.

    >>> losses = torch.tensor([[1.0, 1, 0, 0, 0, 0], [4, 4, 4, 4, 4, 4]])
    >>> mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    >>> for mode in AGGREGATIONS:
    ...     print(mode, aggregate(losses, mask, loss_denominator(mask, mode, max_new_tokens=8), mode).item())
    token_mean 3.25
    sequence_mean 2.5
    constant 1.625
    """
    _check_aggregation(aggregation)
    if aggregation == "sequence_mean":
        row_sums = masked_sum(per_token, mask, dim=-1)
        total = (row_sums / mask.sum(dim=-1).clamp(min=1)).sum()
    else:
        total = masked_sum(per_token, mask)
    return total / denominator if denominator > 0 else total * 0.0


def loss_denominator(mask: Tensor, aggregation: Aggregation = "token_mean", max_new_tokens: int = 0) -> float:
    """This mask's share of an optimizer step's denominator; shares of micro-batches and ranks add up.

    Args:
        mask: ``(N, T)`` bool. Empty rows are no sequences.
        aggregation: See :func:`aggregate`.
        max_new_tokens: The sampling limit, needed for ``constant``, which counts every row.
    """
    _check_aggregation(aggregation)
    if aggregation == "token_mean":
        return float(mask.sum())
    if aggregation == "sequence_mean":
        return float(mask.any(dim=-1).sum())
    if max_new_tokens < 1:
        raise ValueError(f"aggregation 'constant' needs max_new_tokens of at least 1, got {max_new_tokens}")
    return float(mask.shape[0] * max_new_tokens)


def _check_aggregation(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
