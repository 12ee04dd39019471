"""One way to run a causal language model on padded rows, for the sampler, the trainer and the reference alike."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_rlhf.functional.log_probs import entropy as exact_entropy
from lit_rlhf.functional.log_probs import token_log_probs
from lit_rlhf.functional.masking import mask_from_lengths, position_ids


def model_inputs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    positions: Tensor,
    logits_to_keep: int,
    cache: Any | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a forward pass; those that the architecture does not take are left out.

    Args:
        model: A Hugging Face causal language model.
        input_ids: ``(N, L)``.
        attention_mask: ``(N, K)`` bool or int over cached and new tokens, True = a real token.
        positions: ``(N, L)`` positions counted over real tokens.
        logits_to_keep: Compute logits for this many last positions only.
        cache: Keys and values of earlier tokens, extended by the forward pass; none by default.
    """
    # A peft model's own signature hides what the model inside takes, and passes it on.
    base_model: Any = getattr(model, "get_base_model", lambda: model)
    accepted = _accepted_arguments(type(base_model()))  # type: ignore[arg-type]
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    inputs["use_cache"] = cache is not None
    if cache is not None:
        # transformers 5.24 renamed the argument.
        inputs["cache" if "cache" in accepted else "past_key_values"] = cache
    if "position_ids" in accepted:
        inputs["position_ids"] = positions
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = logits_to_keep
    return inputs


@functools.lru_cache(maxsize=64)
def _accepted_arguments(architecture: type[nn.Module]) -> frozenset[str]:
    """Names of a forward pass's arguments; kept, since the sampler asks at every token."""
    return frozenset(inspect.signature(architecture.forward).parameters)


EntropyMode = Literal["none", "detached", "train"]


@dataclass(frozen=True)
class CompletionOutputs:
    """What one forward pass says about the tokens of ``N`` completions of width ``T``; padding holds no meaning.

    Args:
        log_probs: ``(N, T)`` float32 nats of each token given what stands before it.
        entropy: ``(N, T)`` of the distribution each token was drawn from, if asked for.
        hidden: ``(N, T + 1, H)`` last hidden state before each token, and after the last column, if asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    hidden: Tensor | None = None


def completion_inputs(
    model: nn.Module, prompt_ids: Tensor, prompt_lengths: Tensor, completion_ids: Tensor, completion_lengths: Tensor
) -> dict[str, Any]:
    """Inputs of one forward pass over prompts and their completions; logits for the completion positions only.

    Args:
        model: A Hugging Face model.
        prompt_ids: ``(N, P)``, left-padded.
        prompt_lengths: ``(N,)`` real tokens in each prompt.
        completion_ids: ``(N, T)``, right-padded.
        completion_lengths: ``(N,)`` real tokens in each completion.
    """
    width = completion_ids.shape[1]
    prompt_mask = mask_from_lengths(prompt_lengths, prompt_ids.shape[1]).flip(-1)
    attention_mask = torch.cat([prompt_mask, mask_from_lengths(completion_lengths, width)], dim=1)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    return model_inputs(model, input_ids, attention_mask, position_ids(attention_mask), logits_to_keep=width + 1)


def completion_outputs(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    completion_ids: Tensor,
    completion_lengths: Tensor,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    with_hidden: bool = False,
) -> CompletionOutputs:
    """Log-probs, and on request entropies and hidden states, of completions.

    Args:
        model: A Hugging Face causal language model.
        prompt_ids: ``(N, P)``, left-padded.
        prompt_lengths: ``(N,)`` real tokens in each prompt.
        completion_ids: ``(N, T)``, right-padded.
        completion_lengths: ``(N,)`` real tokens in each completion.
        temperature: The one that the tokens were sampled with.
        entropy: Also give the exact entropy of each token's distribution: ``detached``, or with a graph (``train``).
        with_hidden: Also give the last hidden states.
    """
    width = completion_ids.shape[1]
    inputs = completion_inputs(model, prompt_ids, prompt_lengths, completion_ids, completion_lengths)
    outputs = model(**inputs, **({"output_hidden_states": True} if with_hidden else {}))
    # The logits at position p predict the token at p + 1: one more than the completion was kept, the last is dropped.
    logits = outputs.logits[:, -(width + 1) : -1]
    return CompletionOutputs(
        token_log_probs(logits, completion_ids, temperature),
        _entropy(logits, temperature, entropy),
        outputs.hidden_states[-1][:, -(width + 1) :] if with_hidden else None,
    )


def _entropy(logits: Tensor, temperature: float, mode: EntropyMode) -> Tensor | None:
    if mode == "none":
        return None
    if mode == "train":
        return exact_entropy(logits, temperature)
    with torch.no_grad():  # row by row: a second (N, T, V) tensor would only serve the log
        return torch.stack([exact_entropy(row, temperature) for row in logits])
