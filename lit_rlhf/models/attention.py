"""One attention function, registered with transformers, that lets a batch say how its tokens see each other.

A model that calls its attention through transformers' attention interface, and hands unknown keyword arguments down to
it, can be run on any layout of tokens without touching its code: the forward pass is given ``attention_layout=...``,
and the layout computes the attention. Without a layout the function is plain SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

NAME = "lit_rlhf"


@dataclass(frozen=True)
class Scores:
    """How a layer's attention scores are made from queries and keys.

    Args:
        scaling: Multiplies the products.
        sliding_window: A token sees itself and this many tokens less one before it; all by default.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None

    def within(self, length: int) -> Scores:
        """The same for sequences of at most so many tokens: a window that hides nothing is none.

        Args:
            length: Of the longest sequence.
        """
        unseen = self.sliding_window is not None and self.sliding_window < length
        return self if unseen or self.sliding_window is None else replace(self, sliding_window=None)


class AttentionLayout(Protocol):
    """How the tokens of a forward pass see each other."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention of one layer.

        Args:
            layer: Its number.
            query: ``(B, H, L, D)`` of the tokens of this forward pass, positions applied.
            key: ``(B, K, L, D)`` of the same tokens, ``K`` a divisor of ``H``.
            value: ``(B, K, L, D)``.
            scores: How the scores are made.

        Returns:
            ``(B, L, H, D)``.
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_layout: AttentionLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function in the signature of transformers; see :class:`AttentionLayout` for the tensors."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_layout is None:
        return _plain_attention(module, query, key, value, attention_mask, dropout, scale, softcap, options), None
    unknown = [name for name in ("position_bias", "s_aux") if options.get(name) is not None]
    if dropout or unknown:
        raise NotImplementedError(f"a layout cannot compute attention with {unknown or 'dropout'}")
    if torch.is_autocast_enabled(query.device.type):  # as SDPA itself does: queries may come in float32, values not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    layer: Any = module.layer_idx
    return attention_layout.attend(layer, query, key, value, Scores(scale, sliding_window, softcap)), None


def _plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    softcap: float | None,
    options: dict[str, Any],
) -> Tensor:
    if softcap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **options)[0]
    if mask is None:
        length, total = query.shape[2], key.shape[2]
        mask = torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)
    return capped_attention(query, key, value, mask, scaling, softcap).transpose(1, 2).contiguous()


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    r"""Attention with scores ``softcap * tanh(scores / softcap)``, which SDPA does not offer.

    Source: Gemma 2 (arXiv 2408.00118), section 2.

    Args:
        query: ``(B, H, L, D)``.
        key: ``(B, K, S, D)``, ``K`` a divisor of ``H``.
        value: ``(B, K, S, D)``.
        mask: Broadcastable to ``(B, H, L, S)``, bool, True = seen.
        scaling: Multiplies the scores.
        softcap: Limit of the scores.

    Returns:
        ``(B, H, L, D)``.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    products = query @ key.transpose(-1, -2)
    products = products.to(torch.promote_types(products.dtype, torch.float32))
    scores = softcap * torch.tanh(products * (scaling / softcap))
    # Finite: a padding token that sees nothing would be NaN, and reach other tokens as 0 * NaN.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1).to(query.dtype)
    return weights @ value


def layout_inputs(layout: AttentionLayout, like: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward pass that give it a layout.

    Args:
        layout: Computes the attention.
        like: A tensor on the model's device.
    """
    # A mask of four dimensions is taken as it is: no mask is built that the layout would not read.
    return {"attention_layout": layout, "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=like.device)}


def register() -> None:
    """Make :func:`attention` known to transformers under :data:`NAME`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
