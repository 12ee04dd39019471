"""The critic's loss, and how good a critic is."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional.masking import masked_sum


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float = 0.2) -> Tensor:
    r"""Squared error of the critic, per token, that does not reward leaving the trust region.

    .. math:: \tfrac12 \max\bigl((V - R)^2,\; (\mathrm{clip}(V, V_{old} - c, V_{old} + c) - R)^2\bigr)

    Source: the PPO2 baseline; Engstrom et al. (arXiv 2005.12729) and Huang et al. (ICLR blog track 2022) describe it.

    Args:
        values: ``(N, T)`` of the critic now.
        old_values: ``(N, T)`` of the critic at rollout.
        returns: ``(N, T)`` regression targets.
        clip_range: ``c``, in units of the reward.

    Returns:
        ``(N, T)``.

    >>> clipped_value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]))
    tensor([0.3200])
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def clipped_values(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float = 0.2) -> Tensor:
    """Tokens whose gradient the value clip removes.

    Args:
        values: ``(N, T)``.
        old_values: ``(N, T)``.
        returns: ``(N, T)``.
        clip_range: ``c``.

    Returns:
        ``(N, T)`` bool.
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    outside = (values - old_values).abs() > clip_range
    return outside & ((clipped - returns).square() > (values - returns).square())


def critic_moments(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """What critic error and explained variance need; those of several ranks add up.

    Args:
        returns: ``(N, T)`` Monte Carlo reward-to-go. (Lambda-returns contain the critic itself and flatter it.)
        values: ``(N, T)`` of the critic at rollout.
        mask: ``(N, T)`` bool.

    Returns:
        ``(5,)`` float64: count, sums of R and of R squared, sums of R - V and of (R - V) squared.
    """
    exact, error = returns.double(), (returns - values).double()
    sums = (exact, exact.square(), error, error.square())
    return torch.stack([mask.sum().double(), *(masked_sum(value, mask) for value in sums)])


def critic_error(moments: Tensor) -> Tensor:
    """Root mean square of R - V; NaN without tokens.

    Args:
        moments: ``(5,)`` of :func:`critic_moments`.
    """
    return (moments[4] / moments[0]).sqrt()


def explained_variance(moments: Tensor) -> Tensor:
    r"""Share of the returns' variance that the critic explains, :math:`1 - \mathrm{var}(R - V) / \mathrm{var}(R)`.

    1 is a perfect critic, 0 one as good as a constant, below 0 one that is worse.

    Args:
        moments: ``(5,)`` of :func:`critic_moments`.

    Returns:
        Scalar; NaN (missing) where the returns do not vary.

    >>> returns, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.75]])
    >>> explained_variance(critic_moments(returns, values, torch.ones(1, 2, dtype=torch.bool)))
    tensor(0.7500, dtype=torch.float64)
    """
    count, total, squares, error, error_squares = moments
    variance = squares / count - (total / count).square()
    unexplained = error_squares / count - (error / count).square()
    # Float64 sums leave about 1e-16 of a variance that is 0.
    varies = variance > 1e-12 * (squares / count).clamp(min=1e-30)
    return torch.where(varies, 1 - unexplained / variance, torch.nan)
