"""What is asked of vLLM for a row, and what its answers are as a :class:`~lit_rlhf.engines.base.Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_rlhf.engines.base import Generation, SamplingParams
from lit_rlhf.errors import EngineError

# Under this name a request tells the row sampler inside vLLM how to draw.
ROW_OPTIONS = "lit_rlhf"

# Options of ``vllm.LLM`` and, as arguments, of ``vllm serve``, without which rows are not sampled as asked.
ROW_SAMPLER = "lit_rlhf.engines.vllm.row_sampler:RowSampler"
# A request with this option is refused with this answer where the row sampler is at work.
PROBE, PROBE_ANSWER = "probe", "the row sampler of lit_rlhf is at work"

LOGPROBS_MODE = "processed_logits"


@dataclass(frozen=True)
class Answer:
    """A completion as vLLM gave it.

    Args:
        ids: Sampled tokens, the one that ended it included.
        log_probs: Of each.
        finish_reason: ``stop`` or ``length``; anything else is no whole completion.
        versions: Labels of the weights that sampled it.
    """

    ids: list[int]
    log_probs: list[float]
    finish_reason: str | None
    versions: frozenset[str]


def request_options(sampling: SamplingParams, key: int) -> dict[str, Any]:
    """Options of ``vllm.SamplingParams`` for one row.

    Every EOS id counts as vLLM's stop tokens do: it is kept and ends the row, whatever the checkpoint's configuration
    says. vLLM itself is told to be greedy: the row sampler leaves it one token to take.

    Args:
        sampling: How to sample.
        key: All the randomness of the row.
    """
    row = {
        "key": int(key),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }
    return {
        "temperature": 0.0,
        "max_tokens": sampling.max_new_tokens,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(sampling.eos_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
        "extra_args": {ROW_OPTIONS: row},
    }


def as_generation(
    answers: Sequence[Answer], version: str, sampling: SamplingParams, device: torch.device
) -> Generation:
    """Completions as padded rows, once it is proven whose they are.

    Args:
        answers: ``N``, in the order of the rows.
        version: Label of the weights that should have sampled them.
        sampling: The one asked for.
        device: Of the result.

    Raises:
        EngineError: A completion is not whole, or was sampled by other weights.
    """
    for answer in answers:
        if answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM did not finish a completion: {answer.finish_reason or 'no reason given'}")
        if answer.versions != {version}:
            found = ", ".join(sorted(answer.versions)) or "none"
            raise EngineError(
                f"vLLM sampled with weights {found}, but the policy's are {version}: does anyone else update it?"
            )
    lengths = torch.tensor([len(answer.ids) for answer in answers], dtype=torch.long)
    width = int(lengths.max()) if answers else 1
    ids = torch.full((len(answers), width), sampling.pad_token_id, dtype=torch.long)
    log_probs = torch.zeros(len(answers), width)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.long)
        log_probs[row, : len(answer.ids)] = torch.tensor(answer.log_probs)
    finished = torch.tensor([answer.finish_reason == "stop" for answer in answers], dtype=torch.bool)
    return Generation(ids.to(device), lengths.to(device), log_probs.to(device), finished.to(device))
