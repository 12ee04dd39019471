r"""Group-relative advantages: the completions of one prompt are each other's baseline.

Groups are named by an index per row, so rows may be shuffled, dropped or re-ordered without losing their group.
All statistics are taken in float64 on differences from the group's first reward: eight equal rewards give exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["mean", "median", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
BASELINES: tuple[str, ...] = get_args(Baseline)
SCALES: tuple[str, ...] = get_args(Scale)


def group_advantages(
    rewards: Tensor,
    group_index: Tensor,
    scored_mask: Tensor | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 0,
    batch_std: Tensor | None = None,
) -> Tensor:
    r"""Advantage of each completion against the completions of the same prompt.

    .. math:: A_i = \frac{r_i - b_g}{\sigma_g + \epsilon}

    with the group's mean as ``b_g`` and its population standard deviation as ``sigma_g`` by default.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; ``leave_one_out``: arXiv 2402.14740; ``scale="none"``:
    arXiv 2503.20783. The deviation is always taken about the mean, with ``median`` as well.

    Args:
        rewards: ``(N,)``, the penalised ones if KL is in the reward.
        group_index: ``(N,)`` integers, equal for the completions of one prompt.
        scored_mask: ``(N,)`` bool, False where every reward function abstained: such a row enters no statistic and its
            advantage is 0. All rows count by default.
        baseline: ``mean``, ``median`` (mean of the two middle values in even groups), ``leave_one_out`` (mean of the
            *others*) or ``none``.
        scale: Divide by the deviation of the ``group``, of the whole ``batch`` of rewards, or not at all (``none``).
        eps: Added to the deviation; with 0, equal rewards still have an advantage of 0.
        ddof: 0 for the population deviation, 1 for Bessel's correction.
        batch_std: Scalar deviation for ``scale="batch"``, of the rows of all ranks; of these alone by default.

    Returns:
        ``(N,)`` float32. A group with fewer than two scored rows gets 0 wherever a group statistic is needed.

    >>> group = torch.zeros(4, dtype=torch.long)
    >>> group_advantages(torch.tensor([2.0, 4.0, 6.0, 8.0]), group).round(decimals=2)
    tensor([-1.3400, -0.4500,  0.4500,  1.3400])
    """
    _check(rewards, group_index, scored_mask)
    _check_options(baseline, scale)
    stats = _group_statistics(rewards, group_index, scored_mask)
    deviation = _deviation(stats, rewards, baseline) / _divisor(stats, rewards, scale, eps, ddof, batch_std)
    return torch.where(_usable(stats, baseline, scale), deviation, 0.0).float()


def return_to_go_advantages(
    returns_to_go: Tensor,
    group_index: Tensor,
    mask: Tensor,
    scored_mask: Tensor | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-4,
    ddof: int = 0,
    batch_std: Tensor | None = None,
    unscaled: Tensor | None = None,
) -> Tensor:
    r"""Token-level decomposition of the group advantage: a token answers for what came after it only.

    .. math:: A_{i,t} = \frac{G_{i,t} - b_g}{\sigma_g + \epsilon}, \qquad
        G_{i,t} = r_i + \sum_{s \ge t} (r_{i,s} - \beta\, k1_{i,s})

    Baseline and deviation are those of the whole-sequence returns ``G_{i,0}``, so the first token's advantage is
    :func:`group_advantages` of them.

    Args:
        returns_to_go: ``(N, T)``: outcome plus the token rewards (less the KL penalty) from each token on.
        group_index: ``(N,)`` integers, equal for the completions of one prompt.
        mask: ``(N, T)`` bool.
        scored_mask: ``(N,)`` bool.
        baseline: See :func:`group_advantages`.
        scale: See :func:`group_advantages`.
        eps: Added to the deviation.
        ddof: 0 for the population deviation.
        batch_std: See :func:`group_advantages`.
        unscaled: ``(N,)`` bool, rows of groups whose whole task rewards agree while their steps do not. They are
            centred only: their deviation is 0, or KL noise, and dividing by it would blow the steps up thousandfold.

    Returns:
        ``(N, T)`` float32, 0 outside the mask.

    >>> to_go = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    >>> return_to_go_advantages(to_go, torch.zeros(2, dtype=torch.long), to_go > 0, scale="none")
    tensor([[ 1., -1.],
            [-1., -1.]])
    """
    first = torch.where(mask.any(dim=1), mask.float().argmax(dim=1), 0)
    whole = returns_to_go.gather(1, first[:, None])[:, 0]
    _check(whole, group_index, scored_mask)
    _check_options(baseline, scale)
    stats = _group_statistics(whole, group_index, scored_mask)
    divisor = _divisor(stats, whole, scale, eps, ddof, batch_std)
    if unscaled is not None:
        divisor = torch.where(unscaled, 1.0, divisor)
    later = returns_to_go.double() - whole.double()[:, None]
    advantages = (_deviation(stats, whole, baseline)[:, None] + later) / divisor[:, None]
    return torch.where(mask & _usable(stats, baseline, scale)[:, None], advantages, 0.0).float()


def group_std(rewards: Tensor, group_index: Tensor, scored_mask: Tensor | None = None) -> Tensor:
    """Population standard deviation of each row's group, exactly 0 for equal rewards.

    Args:
        rewards: ``(N,)``.
        group_index: ``(N,)`` integers.
        scored_mask: ``(N,)`` bool; rows that are False enter no statistic.

    Returns:
        ``(N,)`` float64: every row carries its group's value.

    >>> group_std(torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.zeros(4, dtype=torch.long))[0].item()
    2.23606797749979
    """
    _check(rewards, group_index, scored_mask)
    stats = _group_statistics(rewards, group_index, scored_mask)
    return stats.std(ddof=0)[stats.group]


def dead_groups(
    raw_rewards: Tensor, group_index: Tensor, scored_mask: Tensor | None = None, threshold: float = 1e-6
) -> Tensor:
    """Rows whose group's raw task rewards do not differ: nothing can be learned from comparing them.

    Looks at the task reward *before* any KL penalty: with KL in the reward a dead group still has a tiny deviation
    made of KL noise, and dividing by it would turn noise into signal.

    Args:
        raw_rewards: ``(N,)`` task rewards.
        group_index: ``(N,)`` integers.
        scored_mask: ``(N,)`` bool.
        threshold: A population deviation up to and including this is dead.

    Returns:
        ``(N,)`` bool.

    >>> dead_groups(torch.tensor([0.7, 0.7, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])
    """
    return group_std(raw_rewards, group_index, scored_mask) <= threshold


def _deviation(stats: _GroupStatistics, rewards: Tensor, baseline: Baseline) -> Tensor:
    """``(N,)`` float64 reward minus baseline."""
    if baseline == "none":
        return rewards.double()
    if baseline == "median":
        return stats.centred - _group_median(stats)[stats.group]
    from_mean = stats.centred - stats.mean[stats.group]
    if baseline == "mean":
        return from_mean
    n = stats.count[stats.group]
    return from_mean * n / (n - 1).clamp(min=1)


def _usable(stats: _GroupStatistics, baseline: Baseline, scale: Scale) -> Tensor:
    """``(N,)`` bool, scored rows whose group is large enough for the statistics it needs."""
    needs_group = baseline != "none" or scale == "group"
    return stats.scored & (stats.count[stats.group] >= 2) if needs_group else stats.scored


def _divisor(
    stats: _GroupStatistics, rewards: Tensor, scale: Scale, eps: float, ddof: int, batch_std: Tensor | None
) -> Tensor:
    """``(N,)`` what each row's deviation is divided by; infinite instead of 0."""
    if scale == "none":
        return torch.ones_like(rewards, dtype=torch.float64)
    if scale == "group":
        spread = stats.std(ddof)[stats.group]
    elif batch_std is not None:
        spread = batch_std.double().expand(len(rewards))
    else:
        values = rewards.double()[stats.scored]
        spread = (values.std(correction=ddof) if len(values) > 1 else values.new_zeros(())).expand(len(rewards))
    return torch.where(spread + eps > 0, spread + eps, torch.inf)


def _check_options(baseline: Baseline, scale: Scale) -> None:
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")


def _check(rewards: Tensor, group_index: Tensor, scored_mask: Tensor | None) -> None:
    for name, value in (("group_index", group_index), ("scored_mask", scored_mask)):
        if value is not None and value.shape != rewards.shape:
            raise ValueError(f"{name} must have the shape of rewards {tuple(rewards.shape)}, got {tuple(value.shape)}")
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be (N,), got {tuple(rewards.shape)}")


@dataclass(frozen=True)
class _GroupStatistics:
    group: Tensor  # (N,) number of each row's group, from 0 without gaps
    scored: Tensor  # (N,) bool
    centred: Tensor  # (N,) float64, reward minus the group's first scored reward; 0 where not scored
    mean: Tensor  # (groups,) of `centred`
    count: Tensor  # (groups,) scored rows

    def std(self, ddof: int) -> Tensor:
        """``(groups,)``."""
        squares = torch.where(self.scored, (self.centred - self.mean[self.group]).square(), 0.0)
        return (_group_sum(squares, self.group, len(self.count)) / (self.count - ddof).clamp(min=1)).sqrt()


def _group_statistics(rewards: Tensor, group_index: Tensor, scored_mask: Tensor | None) -> _GroupStatistics:
    scored = torch.ones_like(rewards, dtype=torch.bool) if scored_mask is None else scored_mask
    unique, group = group_index.unique(return_inverse=True)
    num_groups = len(unique)
    # Differences from the group's first scored reward are exact for equal rewards, unlike a mean of them.
    origin = _first_scored(rewards.double(), scored, group, num_groups)
    centred = torch.where(scored, rewards.double() - origin[group], 0.0)
    count = _group_sum(scored.double(), group, num_groups)
    mean = _group_sum(centred, group, num_groups) / count.clamp(min=1)
    return _GroupStatistics(group, scored, centred, mean, count)


def _group_sum(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, group, values)


def _first_scored(values: Tensor, scored: Tensor, group: Tensor, num_groups: int) -> Tensor:
    row = torch.where(scored, torch.arange(len(values), device=values.device), len(values))
    first = torch.full((num_groups,), len(values), device=values.device).scatter_reduce_(0, group, row, "amin")
    padded = torch.cat([values, values.new_zeros(1)])
    return padded[first]


def _group_median(stats: _GroupStatistics) -> Tensor:
    median = torch.zeros_like(stats.count)
    for index in range(len(stats.count)):
        members = stats.centred[(stats.group == index) & stats.scored].sort().values
        if len(members):
            middle = len(members) // 2
            median[index] = members[middle] if len(members) % 2 else (members[middle - 1] + members[middle]) / 2
    return median
