"""Unbiased pass@k over prompts and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_rlhf.functional.pass_at_k import pass_at_k


class PassAtK(Metric):
    """Mean over prompts of the unbiased pass@k.

    Args:
        k: Samples of which one must be right.

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([[False, True, False, False], [True, True, True, True]]))
    >>> metric.compute()
    tensor(0.7500, dtype=torch.float64)
    """

    full_state_update = False
    total: Tensor
    prompts: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, correct: Tensor) -> None:
        """Add prompts.

        Args:
            correct: ``(M, n)`` bool, whether each of the ``n >= k`` samples of each prompt is right.
        """
        self.total += pass_at_k(correct.shape[1], correct.sum(dim=1), self.k).sum().to(self.total)
        self.prompts += correct.shape[0]

    def compute(self) -> Tensor:
        """Scalar in ``[0, 1]``; NaN without prompts."""
        return self.total / self.prompts
