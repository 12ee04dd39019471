"""The vocabulary head of a causal language model by itself: from hidden states to log-probs without the logits.

What a model does to its logits after the head (a factor, a soft cap, under a dozen names in as many configurations) is
not looked up but measured, once: the model runs on a few tokens, and known numbers stand in for its head's output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_rlhf.functional.logit_tiles import EntropyMode
from lit_rlhf.functional.vocabulary import KEPT_BYTES, hidden_log_probs
from lit_rlhf.models.layouts import base_of, decoder_of


@dataclass(frozen=True)
class VocabularyHead:
    """The last layer of a model: ``logits = softcap * tanh(scale * (W h + b) / softcap)``.

    Args:
        linear: The model's own layer. Its weights are read when they are used: those of a sharded model are whole only
            inside a forward pass.
        scale: Factor of the logits.
        softcap: Bound of the logits, if they have one.
    """

    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        temperature: float = 1.0,
        entropy: EntropyMode = "none",
        kept_bytes: int = KEPT_BYTES,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and on request exact entropies, of tokens; see :func:`hidden_log_probs`.

        Args:
            hidden: ``(..., H)`` last hidden states of the decoder, before each token.
            token_ids: ``(...)``.
            temperature: The one the tokens were sampled with.
            entropy: ``none``, ``detached`` or ``train``.
            kept_bytes: Of logits that the backward pass need not recompute.

        Returns:
            ``(...)`` and ``(...)`` or None, in nats.
        """
        return hidden_log_probs(
            hidden,
            self.linear.weight,
            token_ids,
            self.linear.bias,
            temperature=temperature,
            scale=self.scale,
            softcap=self.softcap,
            entropy=entropy,
            kept_bytes=kept_bytes,
        )


_Found = tuple[float, float | None] | str
# Scale and soft cap by head, or why they are unknown; and the models that the log was told of.
_measured: WeakKeyDictionary[nn.Module, _Found] = WeakKeyDictionary()
_told: WeakSet[nn.Module] = WeakSet()

# Zero, the unit that shows the scale, ordinary logits, and two far beyond any bound.
_PROBES = (0.0, 1.0, -1.0, 8.0, -8.0, 64.0, -64.0, 1e6, 2e6)


def vocabulary_head(model: nn.Module) -> VocabularyHead | None:
    """The head of a model, or None where only the model itself can compute its logits; one log line says why.

    None for a head that is no plain linear layer (adapters on it, quantised), and for a model that hands its head
    something else than its decoder's last hidden state or makes more of the logits than a scale and a soft cap. Ask
    for the first time before the model is sharded.

    Args:
        model: A Hugging Face causal language model, or a peft model around one.
    """
    base = base_of(model)
    head: Any = getattr(base, "get_output_embeddings", lambda: None)()
    found = _obstacle(head) or _measured.get(head)
    if found is None:
        found = _measured[head] = _measure(base, head)
    if isinstance(found, str):
        if base not in _told:
            rank_zero_info(f"{type(base).__name__}: every forward pass makes the whole tensor of logits, since {found}")
            _told.add(base)
        return None
    return VocabularyHead(head, *found)


def _obstacle(head: nn.Module | None) -> str | None:
    """Why a head does more, or other, than multiply with its weight; None for a plain linear layer."""
    # Exact types: layers with adapters, quantised or sharded ones and parametrizations are subclasses.
    if type(head) is not nn.Linear:
        return f"its vocabulary head is no plain linear layer but of type {type(head).__name__}"
    if not (type(head.weight) is nn.Parameter or _is_sharded(head)):
        return f"its vocabulary head has weights of type {type(head.weight).__name__}"
    if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
        return "something is hooked to its vocabulary head"
    return None


def _is_sharded(head: nn.Linear) -> bool:
    return hasattr(head.weight, "full_tensor")


def _measure(base: Any, head: nn.Linear) -> _Found:
    """Scale and soft cap, from the model's answer to known logits; or what is in the way."""
    if _is_sharded(head):
        return "it was sharded before it could be tried out"
    ids = torch.arange(len(_PROBES), device=head.weight.device).remainder(head.out_features).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    received: list[Tensor] = []
    known: list[Tensor] = []

    def stand_in(head: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Every column of the vocabulary shows every number. In float64: what follows is measured, not its rounding.
        values = torch.tensor(_PROBES, dtype=torch.float64, device=output.device)
        tokens, columns = (torch.arange(size, device=output.device) for size in output.shape[-2:])
        received.append(arguments[0])
        known.append(values[(tokens[:, None] + columns) % len(values)].expand(output.shape))
        return known[-1].clone()

    try:
        with torch.no_grad():
            hidden = decoder_of(base)(**inputs).last_hidden_state
            with head.register_forward_hook(stand_in):
                logits = base(**inputs).logits.double()
    except Exception as error:  # an architecture may do anything, and its own logits still work
        return f"its vocabulary head cannot be tried out ({type(error).__name__}: {error})"
    if len(known) != 1 or logits.shape != known[0].shape or not _agree(hidden, received[0]):
        return "its vocabulary head does not see just the last hidden state of the decoder"

    by_value = dict(zip(_PROBES, logits[0, :, 0].tolist(), strict=True))
    unit, far, farther = by_value[1.0], by_value[1e6], by_value[2e6]
    softcap = far if far > 0 and math.isclose(far, farther, rel_tol=1e-6) else None
    scale = unit if softcap is None else softcap * math.atanh(min(max(unit / softcap, -0.99), 0.99))
    expected = scale * known[0]
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
        return "it makes more of its vocabulary head's output than a scale and a soft cap"
    return scale, softcap


def _agree(hidden: Tensor, received: Tensor) -> bool:
    """Whether two passes gave the same states, to rounding."""
    if hidden.shape != received.shape:
        return False
    tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((hidden - received).abs().max() <= tolerance * received.abs().max())
