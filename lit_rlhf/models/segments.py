"""Attention over packed groups: one prompt, then its completions, none of which sees another.

A row of tokens holds groups one after the other, each a prompt and its completions without padding. The prompt is
causal; a completion sees the prompt and itself. So the prompt is computed once for all of its completions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rlhf.models.attention import Scores, capped_attention

# Up to this many tokens a group is computed whole, with a mask: calling a kernel for each piece would cost more than
# the scores that the mask throws away.
MOST_MASKED = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Group:
    """Where a prompt and its completions stand in the packed row.

    Args:
        prompt: First place, and the place after the last.
        completions: The same of each completion; they follow the prompt and each other without a gap.
    """

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Prompt and completions, without the empty ones."""
        return [(start, end) for start, end in (self.prompt, *self.completions) if start < end]

    @property
    def shares_prompt(self) -> bool:
        """Whether there are tokens of a prompt and of completions that see it."""
        return self.prompt[0] < self.prompt[1] and self.answers[0] < self.answers[1]

    @property
    def answers(self) -> tuple[int, int]:
        """Places of all completions together."""
        return self.prompt[1], self.completions[-1][1] if self.completions else self.prompt[1]


class SharedPromptLayout:
    """Attention of packed groups; see :class:`~lit_rlhf.models.attention.AttentionLayout`.

    Args:
        groups: They cover the packed row from its first place to its last.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._masks: dict[int | None, Tensor] = {}
        self.widest = max(group.answers[1] - group.prompt[0] for group in self.groups)
        self.longest = max(
            group.prompt[1] - group.prompt[0] + max([0, *(end - start for start, end in group.completions)])
            for group in self.groups
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention of one layer over the packed row; the batch holds that one row."""
        scores = scores.within(self.longest)
        if self.widest <= MOST_MASKED:
            return self._attend_by_groups(query, key, value, scores)
        if query.device.type == "cpu" and scores.sliding_window is None and scores.softcap is None:
            return _SharedPromptAttention.apply(query, key, value, self.groups, scores.scaling)
        pieces = [_masked_group(query, key, value, group, scores) for group in self.groups]
        out = torch.cat([piece for pair in pieces for piece in pair], dim=2)
        return out.transpose(1, 2).contiguous()

    def _attend_by_groups(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """All groups side by side, padded to the widest.

        On a CPU in float64, which costs little here: in float32 a token's last digits would depend on how wide its
        group is, and so the gradient on how a step is cut into micro-batches.
        """
        if self._places.device != query.device:  # once per forward pass, not once per layer
            self._places, self._valid = self._places.to(query.device), self._valid.to(query.device)
        places, valid, mask = self._places, self._valid, self._mask(scores.sliding_window, query.device)
        dtype = torch.float64 if query.device.type == "cpu" else query.dtype
        q, k, v = (tensor[0].transpose(0, 1)[places].transpose(1, 2).to(dtype) for tensor in (query, key, value))
        return _masked_attention(q, k, v, mask, scores).transpose(1, 2)[valid][None].to(query.dtype)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Tokens of each prompt and completion, in the order of the packed row, on the CPU."""
        return torch.tensor([end - start for group in self.groups for start, end in (group.prompt, *group.completions)])

    @functools.cached_property
    def pieces(self) -> Tensor:
        """``(L,)`` 0 for a prompt's token, else the number of the completion in its group, on the CPU."""
        numbers = [number for group in self.groups for number in range(len(group.completions) + 1)]
        return torch.tensor(numbers).repeat_interleave(self.lengths)

    @functools.cached_property
    def positions(self) -> Tensor:
        """``(L,)`` of each token in its own sequence, on the CPU."""
        origins = []
        for group in self.groups:
            start, end = group.prompt
            origins += [start, *(first - (end - start) for first, _ in group.completions)]
        places = torch.arange(int(self.lengths.sum()))
        return places - torch.tensor(origins).repeat_interleave(self.lengths)

    @functools.cached_property
    def _places(self) -> Tensor:
        """``(B, W)`` places of each group's tokens; what is beyond its end is never used."""
        starts = torch.tensor([group.prompt[0] for group in self.groups])
        return (starts[:, None] + torch.arange(self.widest)).clamp(max=self.groups[-1].answers[1] - 1)

    @functools.cached_property
    def _valid(self) -> Tensor:
        """``(B, W)`` which of these places are the group's own."""
        lengths = torch.tensor([group.answers[1] - group.prompt[0] for group in self.groups])
        return torch.arange(self.widest) < lengths[:, None]

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        """``(B, 1, W, W)`` bool: which tokens of its group a token sees."""
        if window not in self._masks:
            places = self._places.cpu()
            pieces, positions = self.pieces[places], self.positions[places]
            seen = (pieces[:, None, :] == 0) | (pieces[:, :, None] == pieces[:, None, :])
            seen &= torch.ones(self.widest, self.widest, dtype=torch.bool).tril()
            if window is not None:
                seen &= positions[:, :, None] - positions[:, None, :] < window
            self._masks[window] = seen[:, None].to(device)
        return self._masks[window]


class _SharedPromptAttention(torch.autograd.Function):
    """Flash attention piece by piece, merged by log-sum-exp.

    A completion's attention over prompt and itself is the mean of the two pieces weighted by their normalisers. In the
    backward pass each piece is given the merged output and normaliser, with which its own gradients are exact: the
    identity that ring attention rests on (Liu et al., arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: tuple[Group, ...], scaling: float
    ) -> Tensor:
        q, k, v = _by_key_head(query, key, value)
        heads, repeats, length, dim = q.shape
        # In memory (L, K, H / K, D), which is what the model reads next.
        out = query.new_empty(length, heads, repeats, dim).permute(1, 2, 0, 3)
        # bfloat16 keeps its normalisers in float32.
        lse = query.new_empty(heads, repeats, length, dtype=torch.promote_types(query.dtype, torch.float32))
        for group in groups:
            for start, end in group.segments:
                here = slice(start, end)
                piece, normaliser = _flash(q[:, :, here], k[:, :, here], v[:, :, here], 0.0, True, scale=scaling)
                out[:, :, here] = piece
                lse[:, :, here] = normaliser
            prompt, answers = slice(*group.prompt), slice(*group.answers)
            if prompt.start == prompt.stop or answers.start == answers.stop:
                continue
            piece, normaliser = _flash(q[:, :, answers], k[:, :, prompt], v[:, :, prompt], 0.0, False, scale=scaling)
            _merge(out[:, :, answers], lse[:, :, answers], piece, normaliser)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.groups, ctx.scaling = groups, scaling
        return out.permute(2, 0, 1, 3).reshape(1, length, heads * repeats, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _by_key_head(query, key, value)
        heads, repeats, length, dim = q.shape
        grad = grad_output.reshape(length, heads, repeats, dim).permute(1, 2, 0, 3)
        grad_q = query.new_empty(length, heads, repeats, dim).permute(1, 2, 0, 3)
        grad_k, grad_v = (query.new_empty(length, heads, dim).transpose(0, 1) for _ in range(2))

        def piece(rows: slice, columns: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            inputs = grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows]
            dq, dk, dv = _flash_backward(*inputs, lse[:, :, rows].contiguous(), 0.0, causal, scale=ctx.scaling)
            return dq, dk.sum(dim=1), dv.sum(dim=1)

        for group in ctx.groups:
            for start, end in group.segments:
                here = slice(start, end)
                grad_q[:, :, here], grad_k[:, here], grad_v[:, here] = piece(here, here, causal=True)
            prompt, answers = slice(*group.prompt), slice(*group.answers)
            if prompt.start == prompt.stop or answers.start == answers.stop:
                continue
            dq, dk, dv = piece(answers, prompt, causal=False)
            grad_q[:, :, answers] += dq
            grad_k[:, prompt] += dk
            grad_v[:, prompt] += dv
        shape = 1, heads * repeats, length, dim
        return grad_q.reshape(shape), grad_k[None], grad_v[None], None, None


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(K, H / K, L, D)`` views of each: query heads beside the key head they read, without copies."""
    heads = key.shape[1]
    q = query[0].unflatten(0, (heads, -1))
    shape = -1, q.shape[1], -1, -1
    return q, key[0][:, None].expand(shape), value[0][:, None].expand(shape)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention over two sets of keys from the attention over each, in place of the first."""
    total = torch.logaddexp(lse, other_lse)
    share = (other_lse - total).exp_().unsqueeze(-1).to(out.dtype)
    out.lerp_(other, share.expand_as(out))
    lse.copy_(total)


def _masked_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """``(1, H, P, D)`` of a prompt and ``(1, H, sum T, D)`` of its completions, for any device, window and soft cap."""
    attend, window = functools.partial(_masked_attention, scores=scores), scores.sliding_window
    prompt = slice(*group.prompt)
    q, k, v = (tensor[:, :, prompt] for tensor in (query, key, value))
    length = prompt.stop - prompt.start
    places = torch.arange(length, device=query.device)
    of_prompt = attend(q, k, v, _sees(places, places, window)) if length else q
    if group.answers[0] == group.answers[1]:
        return of_prompt, query[:, :, :0]
    starts = torch.tensor([start for start, _ in group.completions], device=query.device)
    ends = torch.tensor([end for _, end in group.completions], device=query.device)
    width = int((ends - starts).max())
    steps = torch.arange(width, device=query.device)
    taken = (starts[:, None] + steps).clamp(max=query.shape[2] - 1)  # (G, T); beyond a completion's end: anything
    valid = steps < (ends - starts)[:, None]
    q_own, k_own, v_own = (tensor[0][:, taken].transpose(0, 1) for tensor in (query, key, value))
    count = len(group.completions)
    keys, values = (
        torch.cat([shared.expand(count, -1, -1, -1), own], dim=2) for shared, own in ((k, k_own), (v, v_own))
    )
    of_completions = attend(q_own, keys, values, _sees(length + steps, torch.arange(length + width).to(steps), window))
    return of_prompt, of_completions.transpose(1, 2)[valid].transpose(0, 1)[None]


def _sees(rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
    """Causal mask between positions, ``(rows, columns)`` bool, narrowed to a sliding window."""
    distance = rows[:, None] - columns
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    if scores.softcap is not None:
        return capped_attention(query, key, value, mask, scores.scaling, scores.softcap)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scaling)
