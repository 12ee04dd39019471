"""Majority vote over the sampled answers of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def majority_vote(answers: Tensor, correct: Tensor, answer_mask: Tensor) -> Tensor:
    r"""Chance that the answer most samples agree on is right, if ties are broken by drawing one of the tied answers.

    .. math:: \frac{\sum_i [n_i = m] \, c_i}{\sum_i [n_i = m]}, \qquad m = \max_i n_i

    over the samples that have an answer, with :math:`n_i` the number of samples with the answer of sample :math:`i`.
    Tied answers have as many samples each, so the mean over their samples is the mean over the answers.

    Source: Wang et al., *Self-Consistency Improves Chain of Thought Reasoning* (arXiv 2203.11171), section 2.

    Args:
        answers: ``(M, n)`` int64, equal within a prompt where the answers are.
        correct: ``(M, n)`` bool, whether each sample is right.
        answer_mask: ``(M, n)`` bool, True = this sample has an answer, and so a vote.

    Returns:
        ``(M,)`` float64 in ``[0, 1]``; 0 where no sample has an answer.

    >>> answers, right = torch.tensor([[7, 7, 8], [7, 8, 9]]), torch.tensor([[True, True, False], [True, False, False]])
    >>> majority_vote(answers, right, torch.ones(2, 3, dtype=torch.bool))
    tensor([1.0000, 0.3333], dtype=torch.float64)
    """
    agree = (answers[:, :, None] == answers[:, None, :]) & answer_mask[:, None, :]
    votes = agree.sum(dim=2).where(answer_mask, torch.zeros_like(answers))
    most = (votes == votes.amax(dim=1, keepdim=True)) & answer_mask
    return (most & correct).sum(dim=1).double() / most.sum(dim=1).clamp(min=1)
