"""How much completions repeat each other, and themselves. Token sequences are compared by a 64-bit hash."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional.masking import mask_from_lengths


def group_copies(completion_ids: Tensor, lengths: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""How often the completions of a prompt are the same, token for token.

    The share :math:`\sum_g \sum_c n_{g,c} (n_{g,c} - 1) / \sum_g G_g (G_g - 1)`, with :math:`n_{g,c}` copies of
    completion ``c`` in group ``g``, is the chance that two samples of one prompt agree. Unlike the number of distinct
    completions it does not depend on the size of the group.

    Args:
        completion_ids: ``(N, T)``.
        lengths: ``(N,)`` tokens of each completion.
        group_index: ``(N,)`` integers, equal for the completions of one prompt.

    Returns:
        Distinct completions inside each group, summed; pairs that are the same; all pairs. Each a scalar, int64.

    >>> ids = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 9]])
    >>> [int(count) for count in group_copies(ids, torch.tensor([2, 2, 2, 1]), torch.zeros(4, dtype=torch.long))]
    [3, 1, 6]
    """
    hashed = _hash(torch.where(mask_from_lengths(lengths, completion_ids.shape[1]), completion_ids + 1, 0))
    _, group, sizes = group_index.unique(return_inverse=True, return_counts=True)
    copies = torch.stack([group, hashed], dim=1).unique(dim=0, return_counts=True)[1]
    return copies.new_tensor(len(copies)), (copies * (copies - 1)).sum() // 2, (sizes * (sizes - 1)).sum() // 2


def repeated_ngrams(completion_ids: Tensor, lengths: Tensor, n: int = 4) -> tuple[Tensor, Tensor]:
    """Runs of ``n`` tokens that occurred before in the same completion, and all runs of ``n`` tokens.

    Args:
        completion_ids: ``(N, T)``.
        lengths: ``(N,)`` tokens of each completion.
        n: Length of a run.

    Returns:
        Two ``(N,)`` int64 counts; both 0 for a completion of fewer than ``n`` tokens.

    >>> repeated_ngrams(torch.tensor([[5, 6, 5, 6, 5, 6], [1, 2, 3, 4, 5, 0]]), torch.tensor([6, 5]), n=2)
    (tensor([3, 0]), tensor([5, 4]))
    """
    total = (lengths - n + 1).clamp(min=0)
    if completion_ids.shape[1] < n:
        return torch.zeros_like(total), total
    hashed = _hash(completion_ids.unfold(1, n, 1) + 1)
    exists = mask_from_lengths(total, hashed.shape[1])
    # Runs that do not exist are all the same one, sorted to one end; among the others neighbours are compared.
    ordered = torch.where(exists, hashed, torch.iinfo(torch.int64).max).sort(dim=1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & exists[:, 1:]).sum(dim=1), total


def _hash(ids: Tensor) -> Tensor:
    """Hash of the last dimension, int64 that wraps around."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (ids.shape[-1],), generator=generator)
    return (ids * weights.to(ids.device)).sum(dim=-1)
