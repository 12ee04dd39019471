r"""Generalized advantage estimation over completions with padding and holes."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional.masking import masked_sum


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    r"""Advantage of each token over the critic's expectation.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}

    ``V_t`` is the critic's expectation *before* token ``t`` is sampled, and ``t + 1`` the next token that counts:
    across a hole in the mask (a tool's output) the next value and lambda are carried. The value after the last token is
    0, also for a truncated completion: its outcome reward covers the whole of it.

    Source: Schulman et al., *High-Dimensional Continuous Control Using Generalized Advantage Estimation*
    (arXiv 1506.02438), eqs. 11-16.

    Args:
        token_rewards: ``(N, T)``, the reward received for each token; what stands outside the mask is ignored.
        values: ``(N, T)``.
        mask: ``(N, T)`` bool.
        gamma: Discount per token, in ``[0, 1]``.
        gae_lambda: ``lambda`` in ``[0, 1]``; 1 gives return minus value, 0 the one-step error.
        bootstrap_values: ``(N,)`` value after the last token, only for rows that were given no outcome reward.

    Returns:
        ``(N, T)``, 0 outside the mask. Returns for the critic are these plus ``values``.

    >>> gae_advantages(torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5), torch.ones(1, 3, dtype=torch.bool))
    tensor([[0.4512, 0.4750, 0.5000]])
    """
    if token_rewards.shape != values.shape or mask.shape != values.shape:
        raise ValueError(
            f"token_rewards, values and mask must have one shape, got {tuple(token_rewards.shape)}, "
            f"{tuple(values.shape)}, {tuple(mask.shape)}"
        )
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap_values is None else bootstrap_values
    next_advantage = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        counts = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(counts, advantage, advantages[:, t])
        next_value = torch.where(counts, values[:, t], next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
    return advantages


def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    r"""Monte Carlo return from each token on, :math:`\sum_{s \ge t} \gamma^{s-t} r_s` over the tokens that count.

    Args:
        token_rewards: ``(N, T)``.
        mask: ``(N, T)`` bool, may have holes.
        gamma: Discount per token.

    Returns:
        ``(N, T)``, 0 outside the mask.

    >>> reward_to_go(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([[3., 2., 0.]])
    """
    return gae_advantages(token_rewards, torch.zeros_like(token_rewards), mask, gamma, gae_lambda=1.0)


def place_outcome(outcome: Tensor, mask: Tensor) -> Tensor:
    """Token rewards with the outcome at the last token that counts.

    Args:
        outcome: ``(N,)``.
        mask: ``(N, T)`` bool; an empty row gets nothing.

    Returns:
        ``(N, T)``.

    >>> place_outcome(torch.tensor([1.0]), torch.tensor([[True, True, False]]))
    tensor([[0., 1., 0.]])
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1)
    return torch.where(positions == last[:, None], outcome[:, None], torch.zeros((), device=outcome.device))


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over the tokens that count; those of several ranks add up.

    Args:
        values: ``(N, T)``.
        mask: ``(N, T)`` bool.

    Returns:
        ``(3,)`` float64.
    """
    exact = values.double()
    return torch.stack([mask.sum().double(), masked_sum(exact, mask), masked_sum(exact.square(), mask)])


def standardize(values: Tensor, mask: Tensor, moments: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Whitened values: mean 0 and (population) variance 1 over the tokens that count.

    Args:
        values: ``(N, T)``.
        mask: ``(N, T)`` bool.
        moments: ``(3,)`` of :func:`masked_moments`, summed over ranks; this batch's own by default.
        eps: Added to the variance.

    Returns:
        ``(N, T)`` float32, 0 outside the mask; only centred if all values are equal.

    >>> standardize(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]]))
    tensor([[-1.,  1.,  0.]])
    """
    count, total, squares = masked_moments(values, mask) if moments is None else moments
    mean = total / count.clamp(min=1)
    variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    white = (values.double() - mean) / (variance + eps).sqrt()
    return torch.where(mask, white, 0.0).float()
