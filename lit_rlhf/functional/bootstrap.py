"""How far a mean over held-out prompts can be trusted: bootstrap intervals, without any assumption on the values."""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers drawn at a time: 32 MB of indices, whatever the number of prompts.
_DRAWN = 1 << 22


def bootstrap_interval(
    sums: Tensor,
    counts: Tensor,
    confidence: float = 0.95,
    share_mask: Tensor | None = None,
    strata: Tensor | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Interval of the mean :math:`\sum_i s_i / \sum_i c_i` if other prompts of the same kind had been drawn.

    Prompts are drawn anew with replacement, each with all its completions; the quantiles of the means are corrected for
    bias and skewness (BCa), since plain ones miss too often where nearly all or nearly no prompts are solved:

    .. math:: \Phi\left(z_0 + \frac{z_0 + z}{1 - a (z_0 + z)}\right), \qquad
              a = \frac{\sum_i l_i^3}{6 \left(\sum_i l_i^2\right)^{3/2}}

    with :math:`z_0` the normal quantile of the share of means below the one found (ties count half) and :math:`l_i` the
    influence of a prompt. Where all prompts of a set have the same value :math:`v` there is nothing to draw. Of shares
    the exact argument remains: a prompt has that value with a chance of :math:`q = (\alpha/2)^{1/P}` at least, so the
    mean is between :math:`q v` and :math:`q v + 1 - q`. Of other quantities nothing is known.

    Source: Efron, *Better Bootstrap Confidence Intervals*, JASA 82 (1987), eq. 2.3 and 6.6.

    Args:
        sums: ``(P, C)`` sum of each of ``C`` quantities over what there is of it in each of ``P`` prompts.
        counts: ``(P, C)`` how much there is; 0 where a prompt has none of it. One column with ones is a plain mean.
        confidence: Chance that such an interval holds the true mean.
        share_mask: ``(C,)`` bool, True where a quantity can only be between 0 and 1; none by default.
        strata: ``(P,)`` int64 number of each prompt's data set: as many prompts of each are drawn as there are.
        resamples: How often all prompts are drawn anew.
        seed: Of the drawing. The same one and the same number of prompts draw the same prompts.

    Returns:
        Lower and upper ends, each ``(C,)`` float64; NaN where there is no value, or none can be said.

    >>> right = (torch.arange(100) < 80).double()[:, None]
    >>> low, high = bootstrap_interval(right, torch.ones(100, 1))
    >>> round(low.item(), 2), round(high.item(), 2)
    (0.71, 0.87)
    """
    sums, counts = sums.double().cpu(), counts.double().cpu()
    columns = sums.shape[1]
    if not len(sums):
        return torch.full((columns,), torch.nan).double(), torch.full((columns,), torch.nan).double()
    shares = torch.zeros(columns, dtype=torch.bool) if share_mask is None else share_mask.cpu()
    tail = (1 - confidence) / 2
    means = sums.sum(dim=0) / counts.sum(dim=0)
    groups = [torch.arange(len(sums))]
    if strata is not None:
        groups = [(strata.cpu() == stratum).nonzero()[:, 0] for stratum in strata.cpu().unique()]
    influences = torch.zeros_like(sums)
    exact = torch.zeros(2, columns, dtype=torch.float64)
    drawn = torch.zeros(resamples, 2 * columns, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for group in groups:
        own = sums[group] - means * counts[group]
        influences[group] = own - own.mean(dim=0)
        chance = tail ** (1 / len(group))
        exact[0] += chance * sums[group].sum(dim=0)
        exact[1] += chance * sums[group].sum(dim=0) + (1 - chance) * counts[group].sum(dim=0)
        drawn += _drawn_sums(torch.cat([sums[group], counts[group]], dim=1), resamples, generator)
    replicates = drawn[:, :columns] / drawn[:, columns:]
    replicates = replicates.where(drawn[:, columns:] > 0, means)  # no prompt that has any of it was drawn
    low, high = _corrected_quantiles(replicates, means, influences, tail)
    same = influences.abs().amax(dim=0) <= 1e-9 * (1 + means.abs())
    exact = (exact / counts.sum(dim=0)).where(shares, torch.nan)
    low, high = low.where(~same, exact[0]), high.where(~same, exact[1])
    return low.where(~means.isnan(), torch.nan), high.where(~means.isnan(), torch.nan)


def _drawn_sums(values: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """``(R, K)`` sums over ``P`` rows of ``(P, K)`` values drawn with replacement, ``R`` times."""
    size = len(values)
    parts = []
    at_once = max(1, _DRAWN // max(1, size))
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        chosen = torch.randint(size, (count, size), generator=generator) + size * torch.arange(count)[:, None]
        times = torch.bincount(chosen.flatten(), minlength=count * size).reshape(count, size)
        parts.append(times.double() @ values)
    return torch.cat(parts)


def _corrected_quantiles(replicates: Tensor, means: Tensor, influences: Tensor, tail: float) -> tuple[Tensor, Tensor]:
    """BCa's two quantiles of each column."""
    total = len(replicates)
    nearly = 1e-9 * (1 + means.abs())
    below = (replicates < means - nearly).double() + 0.5 * ((replicates - means).abs() <= nearly).double()
    bias = torch.special.ndtri(below.mean(dim=0).clamp(0.5 / total, 1 - 0.5 / total))
    spread = influences.square().sum(dim=0)
    skewness = influences.pow(3).sum(dim=0) / (6 * spread.pow(1.5)).clamp(min=1e-300)
    ordered = replicates.sort(dim=0).values
    ends = []
    for share in (tail, 1 - tail):
        shifted = bias + torch.special.ndtri(torch.tensor(share, dtype=torch.float64))
        level = torch.special.ndtr(bias + shifted / (1 - skewness * shifted).clamp(min=1e-3))
        place = level.nan_to_num(nan=0.5) * (total - 1)
        under = place.floor().long()
        over = (under + 1).clamp(max=total - 1)
        lower, upper = ordered.gather(0, under[None])[0], ordered.gather(0, over[None])[0]
        ends.append(lower + (upper - lower) * (place - under))
    return ends[0], ends[1]
