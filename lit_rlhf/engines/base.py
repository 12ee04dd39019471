"""What a rollout engine takes and gives: token ids in, token ids out, never text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; a knob that is not mentioned is neutral, whatever the checkpoint's ``generation_config`` says.

    Args:
        max_new_tokens: Tokens per completion at most.
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens that together reach this probability; 1 is off.
        min_p: Keep tokens with at least this share of the likeliest one's probability; 0 is off.
        stop: Strings that end a completion; the text keeps the stop string, the ids keep the token that completed it.
        eos_token_ids: Every id that ends a completion.
        pad_token_id: Fills rows after their end; never compared with.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or positive"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 is off"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1); 0 is off"),
        )
        for name, fine, allowed in checks:
            if not fine:
                raise ConfigurationError(f"{name} must be {allowed}, got {getattr(self, name)}")
        if isinstance(self.stop, str):
            raise ConfigurationError(f"stop must be a tuple of strings, got the string {self.stop!r}")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ConfigurationError(f"stop strings must not be empty (they would stop at once), got {list(self.stop)}")

    @property
    def restricted(self) -> bool:
        """Whether tokens are drawn from a truncated distribution, so that samples are not quite the policy's."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def greedy(self) -> SamplingParams:
        """The same limits and stops, always taking the likeliest token."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Generation:
    """Completions, ``num_samples`` rows per prompt, the rows of one prompt together.

    Args:
        completion_ids: ``(N, T)`` int64 as sampled, right-padded.
        lengths: ``(N,)`` int64 tokens in each row, EOS included.
        log_probs: ``(N, T)`` float32, nats, of the sampled tokens under the temperature-scaled *unrestricted*
            distribution (temperature 1 when greedy); 0 on padding.
        finished: ``(N,)`` bool: ended by EOS or a stop string, not by the limit.
    """

    completion_ids: Tensor
    lengths: Tensor
    log_probs: Tensor
    finished: Tensor


def check_request(prompts: Sequence[Sequence[int]], num_samples: int, keys: np.ndarray) -> None:
    """Refuse what no engine can sample.

    Args:
        prompts: Token ids of ``B`` prompts.
        num_samples: ``G``.
        keys: Should be one per row.
    """
    if len(keys) != len(prompts) * num_samples:
        raise ValueError(f"keys must hold one entry per row: {len(prompts) * num_samples}, got {len(keys)}")
    empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise ValueError(f"prompts must have at least one token, these have none: {empty}")


class RolloutEngine(Protocol):
    """Samples completions with the policy's current weights.

    An engine that keeps weights of its own may also have a method ``prepare(policy, tokenizer)``. It is called before
    each :meth:`generate`, and on every process, also on one without prompts: there sharded weights can be gathered.
    One that needs another package may have ``check_installed()``, which is called before any model is loaded.
    """

    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Generation:
        """Sample ``num_samples`` completions of each prompt.

        Args:
            policy: The model to sample from, in evaluation mode.
            prompts: Token ids of ``B`` prompts, without padding.
            num_samples: ``G``.
            sampling: How.
            keys: ``(B * G,)`` uint64, one per row: all the randomness of that row (see ``engines.randomness``).
            tokenizer: Needed only where ``sampling.stop`` is set.
        """
        ...


class PendingGeneration(Protocol):
    """Completions that are being sampled elsewhere."""

    def result(self, patience: float | None = None) -> Generation:
        """Wait for them.

        Args:
            patience: Raise after so many seconds without a sign of life; they may be asked for again.

        Raises:
            EngineLostError: The engine is gone, for now or for good.
        """
        ...

    def cancel(self) -> None:
        """Nobody wants them any more."""
        ...


@runtime_checkable
class AheadEngine(RolloutEngine, Protocol):
    """An engine on devices of its own, which can sample while the policy learns."""

    def start(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> PendingGeneration:
        """Begin what :meth:`generate` does, with the weights of this moment, and return at once.

        Every process calls it, also one without prompts. Afterwards the policy may change.

        Args:
            policy: As in :meth:`generate`; so are all others.
            prompts: Token ids of ``B`` prompts.
            num_samples: ``G``.
            sampling: How.
            keys: ``(B * G,)``.
            tokenizer: For stop strings.
        """
        ...
