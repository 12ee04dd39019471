"""Which models can be run on packed groups: those whose attention goes through transformers' attention interface."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_rlhf.models.attention import NAME, Scores, register
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.packing import pack
from lit_rlhf.models.segments import SharedPromptLayout

# What layers a layout can stand for; others (chunked attention, convolutions, recurrences) look beyond attention.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def base_of(model: nn.Module) -> Any:
    """The Hugging Face model inside a peft model, or the model itself; adapters inside it stay in place.

    Args:
        model: A Hugging Face model or a peft model.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def decoder_of(model: nn.Module) -> Any:
    """The part of a language model below its vocabulary head; a backbone is its own.

    Args:
        model: A Hugging Face model or a peft model.
    """
    return base_of(model).base_model


def runs_layouts(model: nn.Module) -> bool:
    """Whether a model's forward pass takes an ``attention_layout`` and gives the same numbers.

    The first call switches the model's attention to :func:`lit_rlhf.models.attention.attention` and compares a packed
    group with its padded rows; a model that differs is left as it was, and one line says so.

    Args:
        model: A Hugging Face model, or a peft model around one.
    """
    inner = base_of(model)
    if inner not in _known:
        _known[inner] = _switch(inner)
        if not _known[inner]:
            rank_zero_info(
                f"{type(inner).__name__}: completions do not share their prompt's forward pass, every row is padded "
                f"and run on its own (its attention, {_attention_name(inner)}, cannot be given a layout)"
            )
    return _known[inner]


def _attention_name(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def _switch(model: Any) -> bool:
    config = model.config.get_text_config()
    before = _attention_name(model)
    if before == NAME:  # a copy of a model that was switched
        return True
    # Soft-capped models choose eager attention themselves, since SDPA cannot do it.
    usual = before == "sdpa" or (before == "eager" and getattr(config, "attn_logit_softcapping", None) is not None)
    layers = set(getattr(config, "layer_types", None) or ())
    if not usual or not layers <= _LAYER_TYPES or not getattr(model, "_supports_attention_backend", False):
        return False
    # Autocast would round the two differently.
    with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
        padded = _probe(model, packed=False)
        register()
        model.set_attn_implementation(NAME)
        try:
            packed = _probe(model, packed=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, KeyError):
            packed = None
    exact = padded.dtype in (torch.float32, torch.float64)
    tolerance = (1e-4 if exact else 5e-2) * padded.abs().max().clamp(min=1.0)
    if packed is not None and bool((packed - padded).abs().max() <= tolerance):
        return True
    model.set_attn_implementation(before)
    return False


class _Windows(SharedPromptLayout):
    """Notes which layers ask for a sliding window."""

    def __init__(self, layout: SharedPromptLayout) -> None:
        super().__init__(layout.groups)
        self.layers: set[int] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        if scores.sliding_window is not None:
            self.layers.add(layer)
        return super().attend(layer, query, key, value, scores)


def _probe(model: Any, packed: bool) -> Tensor:
    """Hidden states of two completions of one prompt, ``(5, H)``.

    Raises:
        NotImplementedError: Layers that should have a sliding window did not say so to their attention.
    """
    decoder, config = decoder_of(model), model.config.get_text_config()
    device = next(model.parameters()).device
    prompt = torch.arange(3, 8, device=device).expand(2, -1) % config.vocab_size
    completions = torch.tensor([[9, 10, 11], [12, 13, 0]], device=device) % config.vocab_size
    lengths = torch.tensor([3, 2], device=device)
    same = torch.zeros_like(lengths)
    rows = pack(Completions(prompt, torch.full_like(lengths, 5), completions, lengths, same))
    if not packed:
        ids = torch.cat([prompt, completions], dim=1)
        hidden = decoder(ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
        return torch.cat([hidden[0, 5:], hidden[1, 5:7]])
    layout = _Windows(rows.layout)
    hidden = decoder(**{**rows.inputs(), "attention_layout": layout}).last_hidden_state[0]
    if len(layout.layers) < _sliding_layers(config):
        raise NotImplementedError("a sliding window that only the mask knows")
    places = [place for span in rows.layout.groups[0].completions for place in range(*span)]
    return hidden[places]


def _sliding_layers(config: Any) -> int:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds).count("sliding_attention")
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return int(config.num_hidden_layers) if slides else 0
