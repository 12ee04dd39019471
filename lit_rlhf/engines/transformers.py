"""Sampling with the policy itself, in process: the decoding loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lit_rlhf.engines.base import Generation, SamplingParams, check_request
from lit_rlhf.engines.cache import fill_gaps
from lit_rlhf.engines.decoding import Decoder, PaddedDecoder
from lit_rlhf.engines.randomness import uniforms
from lit_rlhf.engines.sampling import sample_tokens
from lit_rlhf.engines.shared_prompt import SharedPromptDecoder
from lit_rlhf.engines.stopping import StopStrings
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.layouts import runs_layouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TransformersEngine:
    """Any Hugging Face causal language model, sampled in process with its current weights.

    Each prompt is run once for its ``G`` completions, which share its keys and values where the architecture allows;
    rows leave the batch when they are finished, and of the logits only the sampled token's log-prob is kept.

    Args:
        max_rows: Completions decoded at once; more are cut into batches of similar prompt length. The completions of
            one prompt stay together, so a batch has at least as many rows as one prompt has completions.
        max_tokens: Tokens whose keys and values a batch may have to hold, at the longest completions; no limit by
            default. Of shared prompts one copy counts.
        compact_below: Finished rows are dropped once fewer than this share of the batch is alive: dropping costs
            copies in the cache, keeping costs their share of every step.
    """

    def __init__(self, max_rows: int = 512, max_tokens: int | None = None, compact_below: float = 0.9) -> None:
        if max_rows < 1:
            raise ConfigurationError(f"TransformersEngine: max_rows must be at least 1, got {max_rows}")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigurationError(f"TransformersEngine: max_tokens must be at least 1, got {max_tokens}")
        if not 0.0 <= compact_below <= 1.0:
            raise ConfigurationError(f"TransformersEngine: compact_below must lie in [0, 1], got {compact_below}")
        self.max_rows = max_rows
        self.max_tokens = max_tokens
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
        num_rows = len(prompts) * num_samples
        check_request(prompts, num_samples, keys)
        stops = _stop_strings(sampling, tokenizer)
        out = _Buffers(num_rows, sampling.max_new_tokens, device)
        uniform = torch.from_numpy(uniforms(keys, sampling.max_new_tokens).T.copy()).to(device)
        shares = runs_layouts(policy)
        for batch in self._batches(prompts, num_samples, sampling.max_new_tokens, shares):
            rows = torch.tensor([i * num_samples + s for i in batch for s in range(num_samples)], device=device)
            kind = SharedPromptDecoder if shares else PaddedDecoder
            decoder = kind(policy, [prompts[i] for i in batch], num_samples)
            self._decode(decoder, rows, uniform, sampling, stops, out)
        return out.generation(sampling.pad_token_id)

    def sample(
        self, logits: Tensor, uniform: Tensor, sampling: SamplingParams, rows: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Choose the next token of each row; a subclass may choose otherwise.

        Args:
            logits: ``(R, V)``.
            uniform: ``(R,)`` float64 in ``[0, 1)``.
            sampling: How.
            rows: ``(R,)`` numbers of the rows in the call of :meth:`generate`, in any order. A row that has ended may
                still be among them; its token is thrown away.
            step: Number of the token in its completion, from 0.

        Returns:
            ``(R,)`` int64 ids and ``(R,)`` float32 log-probs.
        """
        return sample_tokens(logits, uniform, sampling)

    def _batches(
        self, prompts: Sequence[Sequence[int]], num_samples: int, max_new_tokens: int, shared: bool
    ) -> Iterator[list[int]]:
        """Numbers of the prompts to decode together, prompts of similar length."""
        batch: list[int] = []
        for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
            copies = 1 if shared else num_samples
            # The newest prompt is the longest, and the others are padded to it.
            tokens = (len(batch) + 1) * (copies * len(prompts[index]) + num_samples * max_new_tokens)
            full = (len(batch) + 1) * num_samples > self.max_rows or tokens > (self.max_tokens or tokens)
            if batch and full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _decode(
        self,
        decoder: Decoder,
        rows: Tensor,
        uniform: Tensor,
        sampling: SamplingParams,
        stops: StopStrings | None,
        out: _Buffers,
    ) -> None:
        """Fill ``out`` for the given rows."""
        eos = torch.tensor(sampling.eos_token_ids, dtype=torch.long, device=rows.device)
        can_end = len(eos) > 0 or stops is not None
        alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        logits = decoder.prefill()
        for step in range(sampling.max_new_tokens):
            ids, log_probs = self.sample(logits, uniform[step].index_select(0, rows), sampling, rows, step)
            out.write(rows, step, ids, log_probs)
            ended = alive & (ids[:, None] == eos).any(dim=1)
            if stops is not None:
                ended |= out.stopped(stops, rows, step, alive & ~ended)
            if can_end and bool(ended.any()):
                out.end(rows[ended], step)
                alive &= ~ended
                num_alive = int(alive.sum())
                if num_alive == 0:
                    return
                if num_alive < self.compact_below * len(rows):
                    order = fill_gaps(alive)
                    decoder.keep(order)
                    ids, rows, alive = ids[order], rows[order], alive[order]
            if step + 1 < sampling.max_new_tokens:
                logits = decoder.step(ids)


class _Buffers:
    """Where the sampled tokens of all rows gather, step by step; what a row is given after its end is cut off."""

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.ids = torch.zeros(width, num_rows, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(width, num_rows, device=device)
        self.lengths = torch.full((num_rows,), width, device=device)
        self.finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def write(self, rows: Tensor, step: int, ids: Tensor, log_probs: Tensor) -> None:
        self.ids[step].index_copy_(0, rows, ids)
        self.log_probs[step].index_copy_(0, rows, log_probs)

    def end(self, rows: Tensor, step: int) -> None:
        self.lengths[rows] = step + 1
        self.finished[rows] = True

    def stopped(self, stops: StopStrings, rows: Tensor, step: int, candidates: Tensor) -> Tensor:
        """Which of the candidate rows have just completed a stop string; ``(R,)`` bool."""
        places = candidates.nonzero()[:, 0]
        tails = self.ids[max(0, step + 1 - stops.tail) : step + 1, rows[places]].T.tolist()
        hits = torch.tensor([stops.ends(tail) for tail in tails], dtype=torch.bool, device=rows.device)
        return torch.zeros_like(candidates).index_copy(0, places, hits)

    def generation(self, pad_token_id: int) -> Generation:
        width = int(self.lengths.max()) if len(self.lengths) else 1
        padding = torch.arange(width, device=self.lengths.device) >= self.lengths[:, None]
        ids = self.ids[:width].T.masked_fill(padding, pad_token_id)
        return Generation(ids, self.lengths, self.log_probs[:width].T.masked_fill(padding, 0.0), self.finished)


def _stop_strings(sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> StopStrings | None:
    if not sampling.stop:
        return None
    if tokenizer is None:
        raise ConfigurationError("stop strings need the policy's tokenizer")
    return StopStrings(tokenizer, sampling.stop)
