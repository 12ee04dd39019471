"""One way to run a causal language model on completions, for the trainer, the reference and a critic alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlhf.functional.log_probs import entropy as exact_entropy
from lit_rlhf.functional.log_probs import token_log_probs
from lit_rlhf.functional.masking import mask_from_lengths, position_ids
from lit_rlhf.functional.vocabulary import EntropyMode
from lit_rlhf.models.completions import CompletionCells, CompletionOutputs, CompletionRows, CompletionStates
from lit_rlhf.models.head import vocabulary_head
from lit_rlhf.models.layouts import base_of, decoder_of, runs_layouts
from lit_rlhf.models.packing import pack
from lit_rlhf.strategies import run_inside


def completion_states(model: nn.Module, rows: CompletionRows) -> CompletionStates:
    """Hidden states of completions, from one forward pass of the layers below the vocabulary head.

    Args:
        model: A Hugging Face language model or backbone, or a peft model around one.
        rows: What to run. Where the architecture can, neighbouring rows of a group share their prompt's pass.
    """
    base = base_of(model)
    # A backbone's own forward pass is all there is; a sharded one cannot be entered twice.
    alone = decoder_of(model) is base
    before, after = _states(model, rows) if alone else run_inside(base, lambda: _states(model, rows))
    return CompletionStates(before, after, CompletionCells.of(rows))


def completion_outputs(
    model: nn.Module,
    rows: CompletionRows,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    with_states: bool = False,
) -> CompletionOutputs:
    """Log-probs, and on request entropies and hidden states, of completions.

    Args:
        model: A Hugging Face causal language model, or a peft model around one.
        rows: What to run. Where the architecture can, neighbouring rows of a group share their prompt's pass.
        temperature: The one that the tokens were sampled with.
        entropy: Also give the exact entropy of each token's distribution: ``detached``, or with a graph (``train``).
        with_states: Also give the last hidden states.
    """
    head = vocabulary_head(model)
    cells = CompletionCells.of(rows)

    def run() -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        if head is None:
            logits, before, after = _logits(model, rows, with_states)
            return (
                token_log_probs(logits, cells.token_ids, temperature),
                _entropy(logits, temperature, entropy),
                before,
                after,
            )
        before, after = _states(model, rows)
        return *head.log_probs(before, cells.token_ids, temperature, entropy), before, after

    # A head used by itself is outside of the model's own forward pass, where a sharded model has no whole weights.
    log_probs, entropies, before, after = run() if head is None else run_inside(base_of(model), run)
    return CompletionOutputs(
        cells.unpack(log_probs),
        None if entropies is None else cells.unpack(entropies),
        CompletionStates(before, after, cells) if with_states and before is not None and after is not None else None,
    )


def _states(model: nn.Module, rows: CompletionRows) -> tuple[Tensor, Tensor]:
    """``(M, H)`` before each completion token and ``(N, H)`` after each row's last."""
    tokens = _tokens(model, rows)
    hidden = decoder_of(model)(**tokens.inputs).last_hidden_state.flatten(0, 1)
    return hidden[tokens.before], hidden[tokens.after]


def prepare_for_passes(model: nn.Module) -> None:
    """Find out now, rather than in the first pass, what a model can do; a sharded model could not be tried out.

    Args:
        model: A Hugging Face model, a peft model around one, or another module, for which there is nothing to do.
    """
    if hasattr(base_of(model), "config"):
        runs_layouts(model)
        if base_of(model).get_output_embeddings() is not None:
            vocabulary_head(model)


@dataclass(frozen=True)
class _Tokens:
    """A forward pass over prompts and completions.

    Args:
        inputs: Its keyword arguments.
        before: ``(M,)`` places, in the flattened output, of the token before each completion token.
        after: ``(N,)`` places of each row's last token.
        keep: What to compute logits for, as ``logits_to_keep`` has it.
        kept: Places, in the flattened logits that are kept, of the tokens ``before``.
    """

    inputs: dict[str, Any]
    before: Tensor
    after: Tensor
    keep: Tensor | int
    kept: Tensor | slice


def _tokens(model: nn.Module, rows: CompletionRows) -> _Tokens:
    if runs_layouts(model):
        packed = pack(rows)
        return _Tokens(packed.inputs(), packed.before, packed.after, keep=packed.before, kept=slice(None))
    prompt_width, width = rows.prompt_ids.shape[1], rows.completion_ids.shape[1]
    prompt_mask = mask_from_lengths(rows.prompt_lengths, prompt_width).flip(-1)
    completion_mask = mask_from_lengths(rows.completion_lengths, width)
    mask = torch.cat([prompt_mask, completion_mask], dim=1)
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    inputs = model_inputs(decoder_of(model), ids, mask, position_ids(mask))
    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    before = places[:, prompt_width - 1 : -1][completion_mask]
    after = places[:, prompt_width - 1].add(rows.completion_lengths)
    # One more logit than the completion is wide: those at a position predict the token at the next.
    kept = torch.arange(len(ids) * (width + 1), device=ids.device).view(len(ids), width + 1)[:, :-1][completion_mask]
    return _Tokens(inputs, before, after, keep=width + 1, kept=kept)


def _logits(model: nn.Module, rows: CompletionRows, with_states: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The model's own logits ``(M, V)`` before each completion token, for heads that are more than a linear layer."""
    tokens = _tokens(model, rows)
    inputs = dict(tokens.inputs)
    keeps = "logits_to_keep" in _accepted_arguments(type(base_of(model)).forward)
    if keeps:
        inputs["logits_to_keep"] = tokens.keep
    if with_states:
        inputs["output_hidden_states"] = True
    outputs = model(**inputs)
    logits = outputs.logits.flatten(0, 1)[tokens.kept if keeps else tokens.before]
    if not with_states:
        return logits, None, None
    hidden = outputs.hidden_states[-1].flatten(0, 1)
    return logits, hidden[tokens.before], hidden[tokens.after]


def _entropy(logits: Tensor, temperature: float, mode: EntropyMode) -> Tensor | None:
    if mode == "none":
        return None
    if mode == "train":
        return exact_entropy(logits, temperature)
    with torch.no_grad():  # part by part: a second (M, V) tensor would only serve the log
        parts = [exact_entropy(part, temperature) for part in logits.split(64)]
    return torch.cat(parts) if parts else logits.new_zeros(0)


def model_inputs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    positions: Tensor,
    logits_to_keep: int | None = None,
    cache: Any | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a forward pass; those that the architecture does not take are left out.

    Args:
        model: A Hugging Face causal language model, or its backbone.
        input_ids: ``(N, L)``.
        attention_mask: ``(N, K)`` bool or int over cached and new tokens, True = a real token.
        positions: ``(N, L)`` positions counted over real tokens.
        logits_to_keep: Compute logits for this many last positions only; for all by default.
        cache: Keys and values of earlier tokens, extended by the forward pass; none by default.
    """
    # A peft model's own signature hides what the model inside takes, and passes it on.
    accepted = _accepted_arguments(type(base_of(model)).forward)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    inputs["use_cache"] = cache is not None
    if cache is not None:
        # transformers 5.24 renamed the argument.
        inputs["cache" if "cache" in accepted else "past_key_values"] = cache
    if "position_ids" in accepted:
        inputs["position_ids"] = positions
    if logits_to_keep is not None and "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = logits_to_keep
    return inputs


@functools.lru_cache(maxsize=64)
def _accepted_arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of a forward pass's arguments; kept, since the sampler asks at every token."""
    return frozenset(inspect.signature(forward).parameters)
