r"""Bring rewards of different scale to mean 0 and deviation 1, inside groups, sources or the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def standard_scores(
    values: Tensor,
    population: Tensor,
    populations: int,
    eps: float = 1e-4,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> tuple[Tensor, Tensor]:
    r"""Standard scores of each column inside each population.

    .. math:: z_{i,f} = \frac{x_{i,f} - \mu_{p(i),f}}{\sigma_{p(i),f} + \epsilon}

    Statistics are population statistics (``ddof = 0``) in float64, over the values that are there. Equal values give
    exactly 0.

    Args:
        values: ``(N, F)``, NaN where there is none.
        population: ``(N,)`` int64 in ``[0, populations)``: which values are compared with each other.
        populations: ``P``, the same on all ranks where sums go over ranks.
        eps: Added to the deviation.
        sum_over_ranks: Adds up ``(P, 2 F)`` and ``(P, F)`` float64 sums over ranks; of this one alone by default.

    Returns:
        ``(N, F)`` float32 scores, NaN where there is no value, and ``(N, F)`` float64 divisors ``sigma + eps``.

    >>> scores, _ = standard_scores(torch.tensor([[0.0], [10.0], [5.0]]), torch.tensor([0, 0, 1]), 2, eps=0)
    >>> scores[:2].flatten()
    tensor([-1.,  1.])
    """
    given = ~values.isnan()
    exact = torch.where(given, values, 0.0).double()

    def by_population(columns: Tensor) -> Tensor:
        sums = torch.zeros(populations, columns.shape[1], dtype=torch.float64, device=values.device)
        return sum_over_ranks(sums.index_add_(0, population, columns))

    totals, counts = by_population(torch.cat([exact, given.double()], dim=1)).chunk(2, dim=1)
    deviation = torch.where(given, exact - (totals / counts.clamp(min=1))[population], 0.0)
    spread = (by_population(deviation**2) / counts.clamp(min=1)).sqrt()
    divisor = spread[population] + eps
    scores = torch.where(deviation == 0, 0.0, deviation / divisor)
    return torch.where(given, scores, torch.nan).float(), divisor
