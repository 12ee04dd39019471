"""Attention of a stock Hugging Face model, computed by whatever layout is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "bare"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Layout(Protocol):
    """Says which tokens of a forward pass see which."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """``(B, H, L, D)`` each; gives ``(B, L, H, D)``."""
        ...


_in_force: list[Layout] = []


@contextlib.contextmanager
def layout(chosen: Layout) -> Iterator[None]:
    """Put a layout in force for the forward passes (and their backward passes) inside the block."""
    _in_force.append(chosen)
    try:
        yield
    finally:
        _in_force.pop()


def take_over(model: nn.Module) -> None:
    """Route a model's attention through here; transformers offers the door, no model code is touched."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(NAME)  # type: ignore[operator]


def hidden_states(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states ``(B, L, hidden)``; the layout in force keeps whatever keys and values it wants."""
    # A mask of four dimensions is passed through as it is, so none is built.
    mask = torch.empty(1, 1, 0, 0, dtype=torch.bool)
    return model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _in_force[-1].attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


Span = tuple[int, int]


class Packed:
    """Prompts and their completions in one row without padding: a completion sees its prompt and itself.

    Args:
        groups: For each prompt its span of places, and the spans of the completions that follow it.
        keep: Also keep the keys and values of the whole row, by layer.
    """

    def __init__(self, groups: list[tuple[Span, list[Span]]], keep: bool = False) -> None:
        self.groups = groups
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """``(1, H, L, D)`` each; gives ``(1, L, H, D)``."""
        if self.kept is not None:
            self.kept.append((key, value))
        return _PackedAttention.apply(query, key, value, self.groups, scaling)


class _PackedAttention(torch.autograd.Function):
    """Flash attention in pieces. The backward pass of a piece, given the merged output and log-sum-exp, is exact."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: Any, scaling: float) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:3])
        for prompt, completions in groups:
            for start, end in (prompt, *completions):
                q, k, v = (x[:, :, start:end] for x in (query, key, value))
                out[:, :, start:end], lse[:, :, start:end] = _flash(q, k, v, 0.0, True, scale=scaling)
            if not completions:
                continue
            p, c = slice(*prompt), slice(completions[0][0], completions[-1][1])
            shared, shared_lse = _flash(query[:, :, c], key[:, :, p], value[:, :, p], 0.0, False, scale=scaling)
            total = torch.logaddexp(lse[:, :, c], shared_lse)
            out[:, :, c].lerp_(shared, (shared_lse - total).exp_()[..., None])
            lse[:, :, c] = total
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.groups, ctx.scaling = groups, scaling
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.transpose(1, 2)
        d_query, d_key, d_value = (torch.empty_like(out) for _ in range(3))

        def piece(rows: slice, columns: slice, causal: bool) -> Any:
            q, o, g, s = (x[:, :, rows] for x in (query, out, grad, lse))
            k, v = key[:, :, columns], value[:, :, columns]
            return _flash_backward(g, q, k, v, o, s.contiguous(), 0.0, causal, scale=ctx.scaling)

        for prompt, completions in ctx.groups:
            for start, end in (prompt, *completions):
                s = slice(start, end)
                d_query[:, :, s], d_key[:, :, s], d_value[:, :, s] = piece(s, s, True)
            if not completions:
                continue
            p, c = slice(*prompt), slice(completions[0][0], completions[-1][1])
            for total, part, where in zip((d_query, d_key, d_value), piece(c, p, False), (c, p, p), strict=True):
                total[:, :, where] += part
        return d_query, d_key, d_value, None, None
