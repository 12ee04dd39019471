"""Weighted sum of several reward functions, in which a function may abstain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.rewards.calling import evaluate_rewards
from lit_rlhf.rewards.contract import RewardValues
from lit_rlhf.rewards.extras import ExtraMeans, extras_tensor
from lit_rlhf.rewards.protocol import OnError, check_signature, reward_name


@dataclass(frozen=True)
class RewardScores:
    """Rewards of N completions under F functions.

    Attributes:
        components: (N, F) float32, unweighted; NaN where a function abstained.
        names: F unique names.
        total: (N,) float32, weighted sum over the functions that did not abstain; 0 where all did.
        scored_mask: (N,) bool, whether at least one function gave a number. Where it is False, ``total`` says nothing.
        outcome_mask: (N,) bool, whether at least one function gave a number for the whole completion.
        token_rewards: (N, T) float32, weighted rewards of single tokens, whose sums are part of ``total``; ``None``
            where no function gives such.
        extras: (N, E) float32, further numbers that functions returned for the log; NaN where there is none.
        extra_names: E names, ``<function>/<value>``.
    """

    components: Tensor
    names: tuple[str, ...]
    total: Tensor
    scored_mask: Tensor
    outcome_mask: Tensor
    token_rewards: Tensor | None = None
    extras: Tensor | None = None
    extra_names: tuple[str, ...] = ()


class RewardScorer:
    """Calls reward functions and adds up what they give.

    Args:
        functions: F reward functions, at least one.
        weights: F finite numbers; 1 each where left out.
        on_error: What an exception in a function does, see :class:`~lit_rlhf.rewards.calling.RewardCall`.
        timeout_seconds: Longest time that a call of one function may take, in seconds; ``None`` for none.

    Raises:
        ConfigurationError: No function, an entry that cannot be called, or weights that do not fit.

    >>> def length(completions): return [float(len(c)) for c in completions]
    >>> scorer = RewardScorer([length], weights=[0.5])
    >>> scorer(["Hi"], ["abcd"], [[1, 2]], {}).total
    tensor([2.])
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        on_error: OnError = "raise",
        timeout_seconds: float | None = None,
    ) -> None:
        if callable(functions):
            functions = [functions]
        functions = list(functions)
        if not functions:
            raise ConfigurationError("No reward functions were given; training needs at least one.")
        for position, fn in enumerate(functions):
            if not callable(fn):
                raise ConfigurationError(
                    f"Reward function {position} cannot be called: {fn!r} is of type {type(fn).__name__}."
                )
            if isinstance(fn, type):
                raise ConfigurationError(f"Reward function {position} is the class {fn.__name__}; give an instance.")
        if on_error not in ("raise", "abstain"):
            raise ConfigurationError(f"on_error must be 'raise' or 'abstain', got {on_error!r}.")
        check_number("reward_timeout", timeout_seconds, above=0)
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ConfigurationError(f"{len(functions)} reward functions, but {len(weights)} reward weights.")
        for position, weight in enumerate(weights):
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ConfigurationError(f"Reward weight {position} must be a finite number, got {weight!r}.")
        self.functions = functions
        self.weights = tuple(float(weight) for weight in weights)
        self.on_error: OnError = on_error
        self.timeout_seconds = timeout_seconds
        self.names = _unique([reward_name(fn) for fn in functions])
        self.extra_means = ExtraMeans()

    def check(self, columns: Sequence[str]) -> None:
        """Check that a dataset with these columns has what every function asks for. Nothing is called.

        Raises:
            RewardError: See :func:`lit_rlhf.rewards.protocol.check_signature`.
        """
        for fn in self.functions:
            check_signature(fn, columns)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> RewardScores:
        """Score N completions.

        Args:
            prompts: N prompts.
            completions: N completions.
            completion_ids: N lists of token ids.
            columns: Dataset columns by name, N values each.

        Raises:
            RewardError: A function raised or broke the contract, see :func:`lit_rlhf.rewards.call_reward`.
        """
        values = evaluate_rewards(
            self.functions,
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids,
            columns=columns,
            on_error=self.on_error,
            timeout_seconds=self.timeout_seconds,
        )
        components = torch.stack([value.tensor() for value in values], dim=1)
        given = ~components.isnan()
        weights = torch.tensor(self.weights, dtype=torch.float64)
        total = (components.nan_to_num(nan=0.0).double() * weights).sum(dim=1).float()
        by_token = torch.tensor([[row is not None for row in value.per_token] for value in values]).T
        outcome_mask = (given & ~by_token).any(dim=1)
        tokens = self._token_rewards(values, completion_ids) if bool(by_token.any()) else None
        extras = {
            f"{name}/{key}": extra
            for name, value in zip(self.names, values, strict=True)
            for key, extra in value.extras.items()
        }
        self.extra_means.add(extras)
        return RewardScores(
            components,
            self.names,
            total,
            given.any(dim=1),
            outcome_mask,
            tokens,
            extras_tensor(extras, len(completions)),
            tuple(extras),
        )

    def _token_rewards(self, values: Sequence[RewardValues], completion_ids: Sequence[Sequence[int]]) -> Tensor:
        width = max(1, *(len(ids) for ids in completion_ids))
        tokens = torch.zeros(len(completion_ids), width, dtype=torch.float64)
        for weight, value in zip(self.weights, values, strict=True):
            for row, rewards in enumerate(value.per_token):
                if rewards is not None:
                    tokens[row, : len(rewards)] += weight * torch.tensor(rewards, dtype=torch.float64)
        return tokens.float()


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    taken: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.append(candidate)
    return tuple(taken)
