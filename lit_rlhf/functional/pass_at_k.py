"""Unbiased pass@k."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor, k: int) -> Tensor:
    r"""Chance that at least one of ``k`` of the ``n`` samples drawn is right, without the bias of ``1 - (1 - c/n)**k``.

    .. math:: 1 - \binom{n-c}{k} \Big/ \binom{n}{k} = 1 - \prod_{i=n-c+1}^{n} (1 - k/i)

    Source: Chen et al., *Evaluating Large Language Models Trained on Code* (arXiv 2107.03374), eq. 1.

    Args:
        num_samples: ``n``, an integer or ``(M,)``.
        num_correct: ``c`` of each prompt, ``(M,)``, in ``[0, n]``.
        k: At least 1 and at most ``n``.

    Returns:
        ``(M,)`` float64; average it over prompts.

    Raises:
        ValueError: ``n < k``, ``k < 1`` or ``c`` outside ``[0, n]``.

    >>> pass_at_k(4, torch.tensor([0, 1, 4]), k=2)
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    correct = num_correct.double()
    total = torch.as_tensor(num_samples, dtype=torch.float64, device=correct.device).expand_as(correct)
    if k < 1 or bool((total < k).any()):
        smallest = int(total.min()) if total.numel() else 0
        raise ValueError(f"pass@k needs 1 <= k <= samples per prompt, got k={k} with {smallest} samples")
    if bool(((correct < 0) | (correct > total)).any()):
        raise ValueError("num_correct must lie between 0 and num_samples")
    wrong = total - correct
    # C(n-c, k) / C(n, k) as a product of k factors below 1: no factorial overflows.
    i = torch.arange(k, dtype=torch.float64, device=correct.device)
    factors = (wrong.unsqueeze(-1) - i).clamp(min=0) / (total.unsqueeze(-1) - i)
    return 1.0 - factors.prod(dim=-1)
