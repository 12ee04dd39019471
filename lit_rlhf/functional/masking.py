"""Masks over completions and reductions that respect them.

House rule: ``True`` means *this token counts*. A mask comes from lengths or from the engine's finish reason, never from
comparing ids with the padding id, which is often the end-of-sequence id as well.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_from_lengths(lengths: Tensor, width: int) -> Tensor:
    """Mask of the first ``lengths[i]`` positions of each row.

    Args:
        lengths: ``(N,)`` number of tokens in each row, integers.
        width: ``T``, columns of the mask.

    Returns:
        ``(N, T)`` bool.

    >>> mask_from_lengths(torch.tensor([2, 0]), 3)
    tensor([[ True,  True, False],
            [False, False, False]])
    """
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def lengths_to_first_eos(completion_ids: Tensor, eos_ids: tuple[int, ...]) -> Tensor:
    """Length of each row up to and including its first end-of-sequence token; the full width where there is none.

    Args:
        completion_ids: ``(N, T)`` sampled ids.
        eos_ids: Every id that ends a completion.

    Returns:
        ``(N,)`` int64.

    >>> lengths_to_first_eos(torch.tensor([[11, 12, 2, 2, 2], [2, 2, 2, 2, 2], [7, 8, 9, 9, 9]]), (2,))
    tensor([3, 1, 5])
    """
    width = completion_ids.shape[1]
    is_eos = torch.isin(completion_ids, torch.tensor(eos_ids, device=completion_ids.device, dtype=completion_ids.dtype))
    position = torch.arange(1, width + 1, device=completion_ids.device)
    return torch.where(is_eos, position, width).amin(dim=1) if width else position.new_zeros(len(completion_ids))


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions counted over the real tokens, so that left padding does not shift a row.

    Args:
        attention_mask: ``(N, L)`` bool, True = a real token.

    Returns:
        ``(N, L)`` int64; 0 on padding.

    >>> position_ids(torch.tensor([[False, False, True, True]]))
    tensor([[0, 0, 0, 1]])
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the tokens that count; exactly 0 where none do, whatever stands in the masked places (NaN included).

    Args:
        values: Any shape.
        mask: Same shape, bool.
        dim: Dimension to reduce; all of them by default.
    """
    kept = torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count; exactly 0 if none do.

    Args:
        values: Any shape.
        mask: Same shape, bool.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return masked_sum(values, mask) / mask.sum().clamp(min=1)
