r"""The surrogate losses of a policy and their explicit denominators.

A micro-batch returns a *sum*; the denominator belongs to the whole optimizer step, over all micro-batches and ranks.
So neither the number of micro-batches nor that of ranks changes the gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.functional.masking import masked_sum

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``exp(clip(log_probs - old_log_probs, -20, 20))``; exactly 1, with a gradient, where the two are equal.

    Args:
        log_probs: Any shape, nats, under the policy now.
        old_log_probs: Same shape, under the policy that sampled the tokens.
    """
    return bounded_exp(log_probs - old_log_probs)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Ratio that belongs to a log-ratio, limited to ``exp(±20)``.

    Args:
        log_ratio: Any shape, nats.
    """
    return log_ratio.clamp(-20.0, 20.0).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    r"""Length-normalised ratio of whole completions, at each of their tokens.

    .. math:: s_{i,t} = \mathrm{sg}(s_i)\, \frac{\pi(y_{i,t})}{\mathrm{sg}(\pi(y_{i,t}))}, \qquad
        s_i = \Bigl(\frac{\pi(y_i)}{\pi_{old}(y_i)}\Bigr)^{1/|y_i|}

    with ``sg`` stopping the gradient. The value is that of ``s_i`` and the gradient goes to the token's own log-prob.
    Where a completion's tokens share one advantage, value and gradient of the loss are those of ``s_i`` itself; where
    they do not, each token still answers for its own.

    Source: Zheng et al., *Group Sequence Policy Optimization* (arXiv 2507.18071), eq. 7 and 14.

    Args:
        log_probs: ``(N, T)`` nats, under the policy now.
        old_log_probs: ``(N, T)``, under the policy that sampled the tokens.
        mask: ``(N, T)`` bool, may have holes.

    Returns:
        ``(N, T)``; exactly 1 where the policies are equal.

    >>> now, old = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-1.5, -1.1, 9.0]])
    >>> sequence_ratio(now, old, torch.tensor([[True, True, False]]))[0, :2].log()
    tensor([0.3000, 0.3000])
    """
    gap = masked_sum(log_probs.detach() - old_log_probs, mask, dim=-1) / mask.sum(dim=-1).clamp(min=1)
    return bounded_exp(gap)[:, None] * (log_probs - log_probs.detach()).exp()


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0
) -> Tensor:
    r"""Clipped surrogate, per token, to be minimised.

    .. math:: -\min\bigl(r_t A_t,\; \mathrm{clip}(r_t, 1-\epsilon_{low}, 1+\epsilon_{high})\, A_t\bigr)

    With ``dual_clip`` = c a negative advantage costs at most :math:`-c A_t`, however likely its token has become.

    Source: Schulman et al., *Proximal Policy Optimization* (arXiv 1707.06347), eq. 7; two ranges as in DAPO
    (arXiv 2503.14476); ``dual_clip``: Ye et al. (arXiv 1912.09729).

    Args:
        ratio: ``(N, T)``, see :func:`importance_ratio`.
        advantages: ``(N, T)``.
        clip_low: ``epsilon_low``, in ``[0, 1]``.
        clip_high: ``epsilon_high``, not negative.
        dual_clip: ``c``, above ``1 + clip_high``; 0 is off.

    Returns:
        ``(N, T)``.

    >>> clipped_policy_loss(torch.tensor([0.5, 0.9, 1.0, 1.5]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    tensor([-0.5000, -0.9000, -1.0000, -1.2000])
    >>> clipped_policy_loss(torch.tensor([0.5, 0.9, 1.0, 1.5]), torch.tensor([-1.0, -1.0, -1.0, -1.0]))
    tensor([0.8000, 0.9000, 1.0000, 1.5000])
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip > 0:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def clipped_weight_loss(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    r"""Policy gradient whose importance weight is clipped and constant, per token, to be minimised.

    .. math:: -\mathrm{sg}\bigl(\mathrm{clip}(r_t, 1-\epsilon_{low}, 1+\epsilon_{high})\bigr)\, A_t \log \pi(y_t)

    with ``sg`` stopping the gradient: the clip bounds a token's weight and never silences it.

    Source: *MiniMax-M1* (arXiv 2506.13585), section 3.

    Args:
        ratio: ``(N, T)``, of tokens or of sequences.
        log_probs: ``(N, T)`` nats.
        advantages: ``(N, T)``.
        clip_low: ``epsilon_low``; 1 is no lower bound.
        clip_high: ``epsilon_high``.

    Returns:
        ``(N, T)``.

    >>> log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    >>> clipped_weight_loss(torch.tensor([0.9, 1.5]), log_probs, torch.tensor([1.0, 1.0])).sum().backward()
    >>> log_probs.grad
    tensor([-0.9000, -1.2000])
    """
    return -ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * log_probs


def clipped_tokens(
    ratio: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0
) -> Tensor:
    """Tokens whose gradient the clip removes: above the range with a positive advantage, below it with a negative one.

    Args:
        ratio: ``(N, T)``.
        advantages: ``(N, T)``.
        clip_low: ``epsilon_low``.
        clip_high: ``epsilon_high``.
        dual_clip: Above this with a negative advantage, too; 0 is off.

    Returns:
        ``(N, T)`` bool.

    >>> clipped_tokens(torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]))
    tensor([ True, False, False,  True])
    """
    removed = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))
    return removed | ((ratio > dual_clip) & (advantages < 0)) if dual_clip > 0 else removed


def aggregate(per_token: Tensor, mask: Tensor, denominator: float, aggregation: Aggregation = "token_mean") -> Tensor:
    r"""Weighted sum of a per-token loss over one micro-batch, divided by the optimizer step's denominator.

    ===================  ====================  =================================================
    aggregation          weight of a token     denominator (see :func:`loss_denominator`)
    ===================  ====================  =================================================
    ``token_mean``       1                     tokens of the step
    ``sequence_mean``    1 / its row's tokens  non-empty rows of the step
    ``sequence_sum``     1                     non-empty rows of the step
    ``constant``         1                     rows of the step times ``max_new_tokens``
    ===================  ====================  =================================================

    Sources: DAPO (arXiv 2503.14476) for ``token_mean``; DeepSeekMath (arXiv 2402.03300) for ``sequence_mean``;
    REINFORCE as in arXiv 2402.14740 for ``sequence_sum``; *Understanding R1-Zero-Like Training* (arXiv 2503.20783) for
    ``constant``.

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
    sequence_sum 13.0
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
    if aggregation in ("sequence_mean", "sequence_sum"):
        return float(mask.any(dim=-1).sum())
    if max_new_tokens < 1:
        raise ValueError(f"aggregation 'constant' needs max_new_tokens of at least 1, got {max_new_tokens}")
    return float(mask.shape[0] * max_new_tokens)


def _check_aggregation(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {aggregation!r}")
