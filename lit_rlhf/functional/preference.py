"""Losses over pairs of answers of which one was preferred."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    r"""Negative log-likelihood, per pair, of the preference under a Bradley-Terry model.

    .. math:: P(\text{chosen} \succ \text{rejected}) = \sigma(r_c - r_r), \qquad L = -\log\sigma(r_c - r_r)

    Only the difference counts: adding a constant to all scores changes nothing.

    Sources: Bradley and Terry, *Rank Analysis of Incomplete Block Designs* (Biometrika 39, 1952); Ouyang et al.,
    *Training language models to follow instructions with human feedback* (arXiv 2203.02155), eq. 1 with K = 2.

    Args:
        chosen: ``(N,)`` scores of the preferred answers.
        rejected: ``(N,)`` scores of the others.

    Returns:
        ``(N,)`` in nats, float32 or wider; log 2 where the two are equal. Finite for any finite scores.

    >>> import torch
    >>> bradley_terry_loss(torch.tensor([1.0, 0.0, -200.0]), torch.tensor([1.0, -3.0, 200.0]))
    tensor([6.9315e-01, 4.8587e-02, 4.0000e+02])
    """
    if chosen.shape != rejected.shape:
        raise ValueError(f"as many chosen as rejected scores are wanted, got {chosen.shape} and {rejected.shape}")
    wide = [scores if scores.element_size() >= 4 else scores.float() for scores in (chosen, rejected)]
    return -F.logsigmoid(wide[0] - wide[1])
