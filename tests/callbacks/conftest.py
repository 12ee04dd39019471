from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_rlhf import RolloutBatch


@pytest.fixture
def make_hand_made() -> Callable[..., RolloutBatch]:
    """Rows of three tokens with the given rewards and groups; row i has advantage i + 1."""

    def make(rewards: list[float], groups: list[int]) -> RolloutBatch:
        n = len(rewards)
        ones = torch.ones(n, 3, dtype=torch.long)
        return RolloutBatch(
            prompt_ids=ones,
            prompt_lengths=torch.full((n,), 3),
            completion_ids=ones,
            completion_lengths=torch.full((n,), 3),
            completion_mask=ones.bool(),
            finished=torch.ones(n, dtype=torch.bool),
            group_index=torch.tensor(groups),
            prompt_index=torch.tensor(groups),
            sampling_log_probs=torch.zeros(n, 3),
            rewards=torch.tensor(rewards),
            scored_mask=torch.ones(n, dtype=torch.bool),
            reward_components=torch.tensor(rewards)[:, None],
            outcome_mask=torch.ones(len(rewards), dtype=torch.bool),
            prompts=("p",) * n,
            completions=("c",) * n,
            advantages=(torch.arange(n) + 1.0)[:, None].expand(n, 3).clone(),
        )

    return make
