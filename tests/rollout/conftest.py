from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lit_rlhf import RolloutBatch


@pytest.fixture
def make_rollout() -> Callable[..., RolloutBatch]:
    """A rollout with the given lengths and groups; every other number says which row (and column) it stands in."""

    def make(
        prompt_lengths: Sequence[int], completion_lengths: Sequence[int], groups: Sequence[int], **changes: Any
    ) -> RolloutBatch:
        n, prompt_width, width = len(groups), max(prompt_lengths, default=1), max(completion_lengths, default=1)
        columns = torch.arange(width).expand(n, width)
        numbered = torch.arange(n)[:, None] * 100 + columns
        lengths = torch.tensor(completion_lengths, dtype=torch.long)
        fields: dict[str, Any] = {
            "prompt_ids": torch.arange(n)[:, None] * 100 + torch.arange(prompt_width),
            "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.long),
            "completion_ids": numbered,
            "completion_lengths": lengths,
            "completion_mask": columns < lengths[:, None],
            "finished": torch.ones(n, dtype=torch.bool),
            "group_index": torch.tensor(groups, dtype=torch.long),
            "prompt_index": torch.tensor(groups, dtype=torch.long) + 50,
            "sampling_log_probs": -numbered.float(),
            "rewards": torch.arange(n).float(),
            "scored_mask": torch.ones(n, dtype=torch.bool),
            "reward_components": torch.arange(n).float()[:, None],
            "prompts": tuple(f"p{row}" for row in range(n)),
            "completions": tuple(f"c{row}" for row in range(n)),
            "reward_names": ("r",),
        }
        return RolloutBatch(**{**fields, **changes})

    return make


@pytest.fixture
def eos_policy(policy_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """A GPT-2 whose first token is always, or never, the end of the sequence."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    def make(at_once: bool) -> str:
        folder = tmp_path_factory.mktemp("eos")
        tokenizer = AutoTokenizer.from_pretrained(policy_dir)
        tokenizer.save_pretrained(folder)
        eos = tokenizer.eos_token_id
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64)
        config.update({"bos_token_id": eos, "eos_token_id": eos, "tie_word_embeddings": False})
        model = GPT2LMHeadModel(config)
        # The last layer norm's output sums to its bias, 32; so this row alone decides.
        model.transformer.ln_f.bias.data.fill_(1.0)
        model.lm_head.weight.data[eos] = 5.0 if at_once else -5.0
        model.save_pretrained(folder)
        return str(folder)

    return make
