"""What the sampling loop needs of a policy, and the plain way to get it: padded rows over the Hugging Face cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lit_rlhf.functional.masking import position_ids
from lit_rlhf.models.forward import model_inputs
from lit_rlhf.models.layouts import base_of


class Decoder(Protocol):
    """Runs a policy on prompts and then token by token, for ``R`` rows that become fewer."""

    def prefill(self) -> Tensor:
        """Run each prompt once; ``(R, V)`` logits of each row's first token."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Run one token per row; ``(R, V)`` logits of each row's next token.

        Args:
            ids: ``(R,)`` the newest tokens.
        """
        ...

    def keep(self, order: Tensor) -> None:
        """Drop rows.

        Args:
            order: ``(R',)`` the row that each place holds from now on.
        """
        ...


class PaddedDecoder:
    """Left-padded prompts, whose cache is copied for each completion: for models that cannot run on layouts.

    Args:
        policy: Any Hugging Face causal language model.
        prompts: Token ids of ``B`` prompts.
        num_samples: ``G``.
    """

    def __init__(self, policy: nn.Module, prompts: Sequence[Sequence[int]], num_samples: int) -> None:
        from transformers import DynamicCache

        self.model = base_of(policy)  # a sharded one gathers its weights when it is called, inside of peft's it is not
        self.num_samples = num_samples
        # What stands on padding is masked.
        self.prompt_ids, self.mask = left_pad(prompts, 0, next(policy.parameters()).device)
        self.cache = DynamicCache(config=self.model.config)

    def prefill(self) -> Tensor:
        """Logits of each row's first token, ``(R, V)``."""
        positions = position_ids(self.mask)
        inputs = model_inputs(self.model, self.prompt_ids, self.mask, positions, logits_to_keep=1, cache=self.cache)
        logits: Tensor = self.model(**inputs).logits[:, -1]
        self.cache.batch_repeat_interleave(self.num_samples)
        self.mask = self.mask.repeat_interleave(self.num_samples, dim=0)
        self.positions = positions[:, -1:].repeat_interleave(self.num_samples, dim=0)
        return logits.repeat_interleave(self.num_samples, dim=0)

    def step(self, ids: Tensor) -> Tensor:
        """Logits of each row's next token, ``(R, V)``.

        Args:
            ids: ``(R,)`` the newest tokens.
        """
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        inputs = model_inputs(self.model, ids[:, None], self.mask, self.positions, logits_to_keep=1, cache=self.cache)
        logits: Tensor = self.model(**inputs).logits[:, -1]
        return logits

    def keep(self, order: Tensor) -> None:
        """Drop rows.

        Args:
            order: ``(R',)`` the row that each place holds from now on.
        """
        self.cache.batch_select_indices(order)
        self.mask, self.positions = self.mask[order], self.positions[order]


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor, their ends aligned.

    Args:
        prompts: ``B`` lists of ids.
        pad_token_id: Fills the left.
        device: Of the result.

    Returns:
        ``(B, P)`` int64 ids and ``(B, P)`` bool mask, True = a real token.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = True
    return ids.to(device), mask.to(device)
