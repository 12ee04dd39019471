"""Runs inside vLLM: draws each token as the transformers engine does, from the same random numbers.

vLLM's own sampler reports log-probs either at temperature 1 or of the truncated distribution, and takes random numbers
from one generator per row. A row of a rollout is drawn here instead, by the very function that the transformers engine
uses: same keys, same completions. vLLM then takes the only token that is left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_rlhf.engines.base import SamplingParams
from lit_rlhf.engines.randomness import uniforms_at
from lit_rlhf.engines.sampling import sample_tokens
from lit_rlhf.engines.vllm.requests import PROBE, PROBE_ANSWER, ROW_OPTIONS


@dataclass(frozen=True)
class _Row:
    """A row that vLLM is decoding.

    Args:
        key: All of its randomness.
        sampling: How to draw.
        output_ids: Its tokens so far; vLLM's own list, which grows.
    """

    key: int
    sampling: SamplingParams
    output_ids: list[int]


class RowDrawing:
    """Leaves one token per row, and in its place the token's log-prob: what a logits processor of vLLM's has to do.

    With ``logprobs_mode="processed_logits"`` vLLM reports what it finds there. Requests of others are not touched.

    Args:
        vllm_config: Not needed.
        device: Where the logits are.
        is_pin_memory: Not needed.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, _Row] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Answer the question whether rows are drawn here.

        Args:
            sampling_params: Of a request.
        """
        if PROBE in ((sampling_params.extra_args or {}).get(ROW_OPTIONS) or {}):
            raise ValueError(PROBE_ANSWER)

    def is_argmax_invariant(self) -> bool:
        """It decides which token is the likeliest, so it has to run for greedy requests too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the rows that come, go and change places.

        Args:
            batch_update: vLLM's; ``None`` where nothing changed.
        """
        from vllm.v1.sample.logits_processor import process_dict_updates

        process_dict_updates(self.rows, batch_update, _new_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw the next token of each row.

        Args:
            logits: ``(R, V)`` float32, changed in place.
        """
        together: dict[SamplingParams, list[int]] = {}
        for place, row in self.rows.items():
            together.setdefault(row.sampling, []).append(place)
        for sampling, places in together.items():
            rows = [self.rows[place] for place in places]
            keys = np.array([row.key for row in rows], dtype=np.uint64)
            steps = np.array([len(row.output_ids) for row in rows], dtype=np.uint64)
            uniform = torch.from_numpy(uniforms_at(keys, steps)).to(logits.device)
            index = torch.tensor(places, device=logits.device)
            ids, log_probs = sample_tokens(logits[index], uniform, sampling)
            logits.index_fill_(0, index, -torch.inf)
            logits[index, ids] = log_probs.to(logits.dtype)
        return logits


def _new_row(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> _Row | None:
    options = (params.extra_args or {}).get(ROW_OPTIONS)
    if options is None:
        return None
    how = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return _Row(int(options["key"]), SamplingParams(1, **how), output_ids)


@functools.cache
def _row_sampler() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor

    return type("RowSampler", (RowDrawing, LogitsProcessor), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    # vLLM asks this module for the class by its name; without vLLM there is nothing to derive it from.
    if name == "RowSampler":
        return _row_sampler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
