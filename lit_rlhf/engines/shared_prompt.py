"""Decoding where the completions of one prompt share its keys and values; the model's code is not touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lit_rlhf.engines.cache import GroupCache
from lit_rlhf.engines.decode_layout import DecodeLayout
from lit_rlhf.models.attention import AttentionLayout, Scores, layout_inputs
from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.segments import Group, SharedPromptLayout

# Prompt tokens of one forward pass: enough to fill the matrix units, few enough to bound the activations.
PREFILL_TOKENS = 8192


class SharedPromptDecoder:
    """Runs the policy on prompts and then token by token; see :class:`~lit_rlhf.engines.decoding.Decoder`.

    Args:
        policy: A model that runs on layouts.
        prompts: Token ids of ``B`` prompts.
        num_samples: ``G``.
    """

    def __init__(self, policy: nn.Module, prompts: Sequence[Sequence[int]], num_samples: int) -> None:
        device = next(policy.parameters()).device
        self.model = base_of(policy)  # a sharded one gathers its weights when it is called, inside of peft's it is not
        self.prompts = prompts
        self.cache = GroupCache([len(prompt) for prompt in prompts], num_samples, device)
        self.layout = DecodeLayout(self.cache)
        self.positions = self.cache.prompt_lengths[self.cache.groups, None]

    def prefill(self) -> Tensor:
        """Logits of each row's first token, ``(R, V)``."""
        logits = [self._prefill(first, prompts) for first, prompts in _batches(self.prompts)]
        return torch.cat(logits).index_select(0, self.cache.groups)

    def _prefill(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = self.positions.device
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
        spans = [(end - len(prompt), end) for prompt, end in zip(prompts, ends.tolist(), strict=True)]
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)[None]
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device)[None]
        return self._run(ids, positions, PrefillLayout(self.cache, first, spans), (ends - 1).to(device))[0]

    def step(self, ids: Tensor) -> Tensor:
        """Logits of each row's next token, ``(R, V)``.

        Args:
            ids: ``(R,)`` the newest tokens.
        """
        logits = self._run(ids[:, None], self.positions, self.layout, 1)[:, -1]
        self.positions = self.positions + 1
        self.layout.advance()
        return logits

    def keep(self, order: Tensor) -> None:
        """Drop rows.

        Args:
            order: ``(R',)`` the row that each place holds from now on.
        """
        self.cache.keep(order)
        self.layout.regroup()
        self.positions = self.positions[order]

    def _run(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | int) -> Tensor:
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, "logits_to_keep": keep}
        logits: Tensor = self.model(**inputs, **layout_inputs(layout, ids)).logits
        if isinstance(keep, Tensor) and logits.shape[1] != len(keep):  # an architecture that gives all of them
            logits = logits[:, keep]
        return logits


def _batches(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """Neighbouring prompts of at most ``PREFILL_TOKENS`` together, with the number of the first."""
    first = tokens = 0
    for index, prompt in enumerate(prompts):
        if index > first and tokens + len(prompt) > PREFILL_TOKENS:
            yield first, prompts[first:index]
            first, tokens = index, 0
        tokens += len(prompt)
    yield first, prompts[first:]


class PrefillLayout:
    """Attention of packed prompts, whose keys and values go to the cache.

    Args:
        cache: Where to.
        first: Number of the first prompt.
        spans: First place of each prompt in the packed row, and the place after its last.
    """

    def __init__(self, cache: GroupCache, first: int, spans: Sequence[tuple[int, int]]) -> None:
        self.cache, self.first, self.spans = cache, first, spans
        self.layout = SharedPromptLayout([Group(span, ()) for span in spans])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See :class:`~lit_rlhf.models.attention.AttentionLayout`."""
        self.cache.write_prompts(layer, self.first, self.spans, key, value)
        return self.layout.attend(layer, query, key, value, scores)
