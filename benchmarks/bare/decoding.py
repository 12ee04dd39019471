"""Sampling: prompts run once, keys and values in place, finished rows dropped, tokens drawn by inverse CDF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bare.attention import Packed, hidden_states, layout

DROP_BELOW = 0.85  # of the rows alive: the others cost, and so does dropping them
GROW_BY = 32  # positions


class Decoding:
    """Attention of one new token per row: over the group's prompt, stored once, and the row's own tokens.

    Args:
        prompt_cache: Keys and values ``(1, H, sum P, D)`` of the prompts one after the other, by layer.
        lengths: ``B`` tokens of each prompt.
        group: ``G``.
    """

    def __init__(self, prompt_cache: list[tuple[Tensor, Tensor]], lengths: list[int], group: int) -> None:
        heads, dim = prompt_cache[0][0].shape[1], prompt_cache[0][0].shape[3]
        self.group_of_row = torch.arange(len(lengths)).repeat_interleave(group)
        longest = max(lengths)
        self.bias = torch.zeros(len(lengths), heads, 1, longest)
        for number, length in enumerate(lengths):
            self.bias[number, ..., length:] = -torch.inf
        self.bias = self.bias.flatten(0, 1)
        self.prompts: list[Sequence[Tensor]] = [
            (_by_prompt(keys, lengths), _by_prompt(values, lengths)) for keys, values in prompt_cache
        ]
        shape = len(lengths) * group, heads, GROW_BY, dim
        self.own = [(torch.empty(shape), torch.empty(shape)) for _ in prompt_cache]
        self.step = 0
        self.groups = len(lengths)
        self._place_rows()

    def _place_rows(self) -> None:
        """Give each row a slot among its group's, as many per group as the largest has."""
        counts = self.group_of_row.bincount(minlength=self.groups)
        self.slots = int(counts.max())
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(self.group_of_row)) - starts[self.group_of_row]
        self.slot_of_row = self.group_of_row * self.slots + within
        self.all_filled = len(self.group_of_row) == self.groups * self.slots

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (ascending), and prompts that no row is left of."""
        kept, self.group_of_row = self.group_of_row[rows].unique(return_inverse=True)
        self.own = [(keys[rows], values[rows]) for keys, values in self.own]
        if len(kept) < self.groups:
            self.bias, *_ = self._of_groups(kept, self.bias)
            self.prompts = [self._of_groups(kept, *pair) for pair in self.prompts]
            self.groups = len(kept)
        self._place_rows()

    def _of_groups(self, kept: Tensor, *tensors: Tensor) -> list[Tensor]:
        return [tensor.unflatten(0, (self.groups, -1))[kept].flatten(0, 1) for tensor in tensors]

    def advance(self) -> None:
        """Go to the next position; the rows' own caches grow with it.

        A cache as long as the limit from the start would be read in strides: half the speed.
        """
        self.step += 1
        if self.step == self.own[0][0].shape[2]:
            pad = 0, 0, 0, GROW_BY
            self.own = [(F.pad(keys, pad), F.pad(values, pad)) for keys, values in self.own]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """``(R, H, 1, D)`` each; gives ``(R, 1, H, D)``."""
        rows, heads, _, dim = query.shape
        keys, values = self.own[layer]
        keys[:, :, self.step], values[:, :, self.step] = key[:, :, 0], value[:, :, 0]
        keys, values = (cache.flatten(0, 1)[:, : self.step + 1] for cache in (keys, values))
        prompt_keys, prompt_values = self.prompts[layer]
        width = prompt_keys.shape[1]

        scores = query.new_empty(rows, heads, width + self.step + 1)
        on_prompt = torch.baddbmm(self.bias, self._by_group(query[:, :, 0]), prompt_keys.mT, alpha=scaling)
        scores[..., :width] = self._by_row(on_prompt, heads)
        on_own = torch.bmm(query.flatten(0, 1), keys.mT).view(rows, heads, -1)
        torch.mul(on_own, scaling, out=scores[..., width:])
        weights = scores.softmax(dim=-1)
        out = torch.bmm(self._by_group(weights[..., :width]), prompt_values)
        out = self._by_row(out, heads).reshape(rows * heads, 1, dim)
        out = torch.baddbmm(out, weights.flatten(0, 1)[:, None, width:], values)
        return out.view(rows, 1, heads, dim)

    def _by_group(self, values: Tensor) -> Tensor:
        """From ``(R, H, X)`` to ``(B * H, slots, X)``; slots without a row hold zeros."""
        if not self.all_filled:
            slots = values.new_zeros(self.slots * self.groups, *values.shape[1:])
            values = slots.index_copy_(0, self.slot_of_row, values)
        return values.unflatten(0, (self.groups, self.slots)).transpose(1, 2).flatten(0, 1)

    def _by_row(self, values: Tensor, heads: int) -> Tensor:
        """Back again."""
        values = values.unflatten(0, (self.groups, heads)).transpose(1, 2).flatten(0, 1)
        return values if self.all_filled else values.index_select(0, self.slot_of_row)


def _by_prompt(cache: Tensor, lengths: list[int]) -> Tensor:
    """From ``(1, H, sum P, D)`` to ``(B * H, P, D)``, padded on the right."""
    parts = [part.transpose(0, 1) for part in cache[0].split(lengths, dim=1)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2).flatten(0, 1)


def draw(logits: Tensor, uniform: Tensor, block: int = 128) -> Tensor:
    """One token per row by inverse CDF: first the block of the vocabulary, then the token in it."""
    probs = logits.softmax(dim=-1)
    probs = F.pad(probs, (0, -probs.shape[-1] % block)).unflatten(-1, (-1, block))
    mass = probs.sum(dim=-1).cumsum(dim=-1)
    target = uniform[:, None] * mass[:, -1:]
    chosen = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)
    before = torch.where(chosen > 0, mass.gather(1, (chosen - 1).clamp_(min=0)), 0.0)
    inside = probs[torch.arange(len(probs)), chosen[:, 0]].cumsum(dim=-1)
    within = torch.searchsorted(inside, target - before, right=True).clamp_(max=block - 1)
    return (chosen * block + within)[:, 0].clamp_(max=logits.shape[-1] - 1)


@torch.no_grad()
def generate(
    model: Any,
    prompts: list[list[int]],
    group: int,
    lengths: list[int],
    limit: int,
    eos: int,
    other: int,
    watch: Callable[[Tensor], None] | None = None,
) -> list[list[int]]:
    """Sample ``G`` completions of each prompt, ended exactly at the given lengths.

    Args:
        model: A causal language model whose attention goes through ``bare.attention``.
        prompts: ``B`` lists of ids.
        group: ``G``.
        lengths: ``N`` tokens; rows of ``limit`` tokens do not end with ``eos``.
        limit: ``T``.
        eos: End-of-sequence id.
        other: Takes the place of an ``eos`` that comes too early.
        watch: Is given the ``(N,)`` log-probs of each position's tokens; those of rows that have ended are 0.
    """
    sizes = [len(prompt) for prompt in prompts]
    ends = torch.tensor(sizes).cumsum(0)
    spans = [(end - size, end) for end, size in zip(ends.tolist(), sizes, strict=True)]
    prefill = Packed([(span, []) for span in spans], keep=True)
    positions = torch.cat([torch.arange(size) for size in sizes])
    with layout(prefill):
        hidden = hidden_states(
            model, torch.tensor([[token for prompt in prompts for token in prompt]]), positions[None]
        )
    assert prefill.kept is not None
    decoding = Decoding(prefill.kept, sizes, group)
    hidden = hidden[0, ends - 1].repeat_interleave(group, dim=0)
    position = torch.tensor(sizes).repeat_interleave(group)
    last = torch.tensor(lengths) - 1
    ends_with_eos = last < limit - 1
    rows = torch.arange(len(lengths))
    out = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    uniform = torch.rand(len(lengths), max(lengths))
    with layout(decoding):
        for step in range(max(lengths)):
            logits = model.lm_head(hidden)
            drawn = draw(logits, uniform[rows, step])
            due = last[rows] == step
            drawn = torch.where(drawn == eos, other, drawn)
            drawn = torch.where(due & ends_with_eos[rows], eos, drawn)
            out[rows, step] = drawn
            if watch is not None:
                log_probs = logits.log_softmax(dim=-1).gather(1, drawn[:, None])[:, 0]
                watch(torch.zeros(len(lengths)).index_copy(0, rows, log_probs))
            alive = last[rows] > step
            count = int(alive.sum())
            if count == 0:
                break
            if count < DROP_BELOW * len(rows):
                kept = alive.nonzero()[:, 0]
                decoding.keep(kept)
                rows, drawn, position = rows[kept], drawn[kept], position[kept]
            hidden = hidden_states(model, drawn[:, None], position[:, None])[:, 0]
            position = position + 1
            decoding.advance()
    return [row[:length] for row, length in zip(out.tolist(), lengths, strict=True)]
