"""Sampling with the policy itself: a lean decoding loop over the Hugging Face cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_rlhf.engines.base import Generation, SamplingParams
from lit_rlhf.engines.randomness import uniforms
from lit_rlhf.engines.sampling import sample_tokens
from lit_rlhf.engines.stopping import StopStrings
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional.masking import position_ids
from lit_rlhf.models.forward import model_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TransformersEngine:
    """Any Hugging Face causal language model, sampled in process with its current weights.

    Each prompt is prefilled once for its ``G`` completions, rows leave the batch when they are finished, and of the
    logits only the sampled token's log-prob is kept.

    Args:
        max_rows: Completions decoded at once; more are cut into batches of similar prompt length. The completions of
            one prompt stay together, so a batch has at least as many rows as one prompt has completions.
        compact_below: Finished rows are dropped once fewer than this share of the batch is alive: dropping costs a
            copy of the cache, keeping costs their share of every step.
    """

    def __init__(self, max_rows: int = 512, compact_below: float = 0.75) -> None:
        if max_rows < 1:
            raise ConfigurationError(f"TransformersEngine: max_rows must be at least 1, got {max_rows}")
        if not 0.0 <= compact_below <= 1.0:
            raise ConfigurationError(f"TransformersEngine: compact_below must lie in [0, 1], got {compact_below}")
        self.max_rows = max_rows
        self.compact_below = compact_below

    @torch.no_grad()
    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Generation:
        """See :class:`lit_rlhf.engines.base.RolloutEngine`."""
        device = next(policy.parameters()).device
        num_rows, width = len(prompts) * num_samples, sampling.max_new_tokens
        if len(keys) != num_rows:
            raise ValueError(f"keys must hold one entry per row: {num_rows}, got {len(keys)}")
        stops = _stop_strings(sampling, tokenizer)
        out = _Buffers(num_rows, width, sampling.pad_token_id, device)
        random = torch.from_numpy(uniforms(keys, width)).to(device)
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        per_batch = max(1, self.max_rows // num_samples)
        for start in range(0, len(by_length), per_batch):
            chosen = by_length[start : start + per_batch]
            rows = torch.tensor([i * num_samples + s for i in chosen for s in range(num_samples)], device=device)
            self._decode(policy, [prompts[i] for i in chosen], num_samples, sampling, stops, random, rows, out)
        return out.generation()

    def _decode(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        stops: StopStrings | None,
        random: Tensor,
        rows: Tensor,
        out: _Buffers,
    ) -> None:
        """Fill ``out`` for the given rows."""
        device = rows.device
        logits, cache, attention_mask = _prefill(policy, prompts, sampling, device)
        cache.batch_repeat_interleave(num_samples)
        logits = logits.repeat_interleave(num_samples, dim=0)
        prompt_width = attention_mask.shape[1]
        ones = attention_mask.new_ones(len(prompts), sampling.max_new_tokens)
        attention_mask = torch.cat([attention_mask, ones], dim=1).repeat_interleave(num_samples, dim=0)
        next_position = attention_mask[:, :prompt_width].sum(dim=1, keepdim=True)
        eos = torch.tensor(sampling.eos_token_ids, dtype=torch.long, device=device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=device)

        for step in range(sampling.max_new_tokens):
            ids, log_probs = sample_tokens(logits, random[rows, step], sampling)
            out.write(rows[alive], step, ids[alive], log_probs[alive])
            ended = torch.isin(ids, eos) & alive
            if stops is not None:
                ended |= out.stopped(stops, rows, alive & ~ended)
            out.finished[rows[ended]] = True
            alive = alive & ~ended
            num_alive = int(alive.sum())
            if num_alive == 0 or step + 1 == sampling.max_new_tokens:
                return
            if num_alive < self.compact_below * len(rows):
                kept = alive.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                ids, rows, alive = ids[kept], rows[kept], alive[kept]
                attention_mask, next_position = attention_mask[kept], next_position[kept]
            mask = attention_mask[:, : prompt_width + step + 1]
            inputs = model_inputs(policy, ids[:, None], mask, next_position, logits_to_keep=1, cache=cache)
            logits = policy(**inputs).logits[:, -1]
            next_position = next_position + 1


class _Buffers:
    """Where the sampled tokens of all rows gather."""

    def __init__(self, num_rows: int, width: int, pad_token_id: int, device: torch.device) -> None:
        self.ids = torch.full((num_rows, width), pad_token_id, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(num_rows, width, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def write(self, rows: Tensor, step: int, ids: Tensor, log_probs: Tensor) -> None:
        self.ids[rows, step] = ids
        self.log_probs[rows, step] = log_probs
        self.lengths[rows] += 1

    def stopped(self, stops: StopStrings, rows: Tensor, candidates: Tensor) -> Tensor:
        """Which of the candidate rows have just completed a stop string; ``(R,)`` bool."""
        hit = torch.zeros_like(candidates)
        for place in candidates.nonzero()[:, 0].tolist():
            row = rows[place]
            hit[place] = stops.ends(self.ids[row, : self.lengths[row]].tolist())
        return hit

    def generation(self) -> Generation:
        width = max(1, int(self.lengths.max())) if len(self.lengths) else 1
        return Generation(self.ids[:, :width], self.lengths, self.log_probs[:, :width], self.finished)


def _prefill(
    policy: nn.Module, prompts: Sequence[Sequence[int]], sampling: SamplingParams, device: torch.device
) -> tuple[Tensor, Any, Tensor]:
    """Run the prompts once: ``(B, V)`` logits of the next token, the cache, and the ``(B, P)`` attention mask."""
    from transformers import DynamicCache

    ids, mask = left_pad(prompts, sampling.pad_token_id, device)
    cache = DynamicCache(config=policy.config)  # type: ignore[arg-type]
    inputs = model_inputs(policy, ids, mask, position_ids(mask), logits_to_keep=1, cache=cache)
    return policy(**inputs).logits[:, -1], cache, mask


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


def _stop_strings(sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> StopStrings | None:
    if not sampling.stop:
        return None
    if tokenizer is None:
        raise ConfigurationError("stop strings need the policy's tokenizer")
    return StopStrings(tokenizer, sampling.stop)
