"""The rollout: one frozen batch that each phase extends, and the micro-batches cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

_PER_ROW = {"per_row": True}


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of one iteration on one rank. ``N`` rows, ``P`` prompt width, ``T`` completion width, ``F`` rewards.

    Rows of one prompt share a ``group_index``; their order and number are free. Nothing is edited in place: use
    :meth:`replace` and :meth:`select`.

    Args:
        prompt_ids: ``(N, P)`` int64, left-padded.
        prompt_lengths: ``(N,)`` int64 real tokens of each prompt.
        completion_ids: ``(N, T)`` int64 exactly as sampled, right-padded.
        completion_lengths: ``(N,)`` int64 tokens of each completion, its EOS included.
        completion_mask: ``(N, T)`` bool, True = this token counts. May have holes; never True on padding.
        finished: ``(N,)`` bool: ended by EOS or a stop string, not by the length limit.
        group_index: ``(N,)`` int64, the prompt's number within the iteration, unique over ranks.
        prompt_index: ``(N,)`` int64, the prompt's place in the data source.
        sampling_log_probs: ``(N, T)`` float32 nats, recorded by the engine while decoding.
        rewards: ``(N,)`` float32 weighted task reward, before any KL penalty.
        scored_mask: ``(N,)`` bool, False where every reward function abstained.
        reward_components: ``(N, F)`` float32, NaN where a function abstained.
        prompts: ``N`` prompts as the reward functions see them.
        completions: ``N`` completion texts, for rewards and logs only.
        reward_names: ``F`` names.
        temperature: Sampling temperature; log-probs are taken at it.
        kl_coef: The one coefficient of this rollout.
        outcome_mask: ``(N,)`` bool, rows that were given a reward for the whole completion; ``None``: all scored ones.
        staleness: ``(N,)`` int64 iterations between the weights that sampled and those that learn; ``None``: 0 for all.
        token_rewards: ``(N, T)`` float32 rewards of single tokens, whose sums are part of ``rewards``; ``None`` where
            no reward function gives such.
        raw_rewards: ``(N,)`` the task reward as it was given, where ``rewards`` was replaced by its standard scores.
        old_log_probs: ``(N, T)`` under the policy before its first step on these rows; ``None`` where the ratio is 1 by
            construction.
        ref_log_probs: ``(N, T)`` under the reference; ``None`` without one.
        advantages: ``(N, T)`` float32, set by the module.
        loss_weights: ``(N, T)`` float32 weights of the tokens in the surrogate; ``None`` where all are 1.
        values: ``(N, T)`` of a critic, if there is one.
        returns: ``(N, T)`` regression targets of a critic.
        bootstrap_values: ``(N,)`` a critic's value of the state that each completion ends in.
    """

    prompt_ids: Tensor = field(metadata=_PER_ROW)
    prompt_lengths: Tensor = field(metadata=_PER_ROW)
    completion_ids: Tensor = field(metadata=_PER_ROW)
    completion_lengths: Tensor = field(metadata=_PER_ROW)
    completion_mask: Tensor = field(metadata=_PER_ROW)
    finished: Tensor = field(metadata=_PER_ROW)
    group_index: Tensor = field(metadata=_PER_ROW)
    prompt_index: Tensor = field(metadata=_PER_ROW)
    sampling_log_probs: Tensor = field(metadata=_PER_ROW)
    rewards: Tensor = field(metadata=_PER_ROW)
    scored_mask: Tensor = field(metadata=_PER_ROW)
    reward_components: Tensor = field(metadata=_PER_ROW)
    prompts: tuple[Any, ...] = field(metadata=_PER_ROW)
    completions: tuple[str, ...] = field(metadata=_PER_ROW)
    reward_names: tuple[str, ...] = ()
    temperature: float = 1.0
    kl_coef: float = 0.0
    outcome_mask: Tensor | None = field(default=None, metadata=_PER_ROW)
    staleness: Tensor | None = field(default=None, metadata=_PER_ROW)
    token_rewards: Tensor | None = field(default=None, metadata=_PER_ROW)
    raw_rewards: Tensor | None = field(default=None, metadata=_PER_ROW)
    old_log_probs: Tensor | None = field(default=None, metadata=_PER_ROW)
    ref_log_probs: Tensor | None = field(default=None, metadata=_PER_ROW)
    advantages: Tensor | None = field(default=None, metadata=_PER_ROW)
    loss_weights: Tensor | None = field(default=None, metadata=_PER_ROW)
    values: Tensor | None = field(default=None, metadata=_PER_ROW)
    returns: Tensor | None = field(default=None, metadata=_PER_ROW)
    bootstrap_values: Tensor | None = field(default=None, metadata=_PER_ROW)

    def __len__(self) -> int:
        return len(self.completion_lengths)

    @property
    def task_rewards(self) -> Tensor:
        """``(N,)`` weighted task reward as the functions gave it, for logs."""
        return self.rewards if self.raw_rewards is None else self.raw_rewards

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with other fields.

        Args:
            changes: New values by field name; a tensor per row must have ``N`` rows.

        Raises:
            ValueError: A field does not have one entry per row, or ``completion_mask`` is True on padding.
        """
        for name, value in changes.items():
            if value is not None and name in _ROW_FIELDS and len(value) != len(self):
                raise ValueError(f"{name} must have {len(self)} rows, got {len(value)}; use select() to drop rows")
        changed = replace(self, **changes)
        if "completion_mask" in changes:
            beyond = torch.arange(changed.completion_mask.shape[1]) >= changed.completion_lengths.cpu()[:, None]
            if bool((changed.completion_mask.cpu() & beyond).any()):
                raise ValueError("completion_mask is True beyond a completion's length")
        return changed

    def select(self, rows: Sequence[int] | Tensor) -> RolloutBatch:
        """The given rows, in the given order.

        Args:
            rows: Indices, or a ``(N,)`` bool tensor of rows to keep.
        """
        index = torch.as_tensor(rows, device=self.completion_ids.device)
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()
        places = index.tolist()
        changes: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                changes[name] = value[index.to(value.device)]
            elif value is not None:
                changes[name] = tuple(value[place] for place in places)
        return replace(self, **changes)

    def join(self, other: RolloutBatch) -> RolloutBatch:
        """These rows and then those of another batch with the same reward functions; what is not per row stays.

        Args:
            other: ``M`` rows.

        Returns:
            ``N + M`` rows, padded to the wider of both. Token rewards that one of them lacks are 0.

        Raises:
            ValueError: One has another field, for instance advantages, that the other lacks.
        """
        changes: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            one, two = getattr(self, name), getattr(other, name)
            if name == "token_rewards" and (one is None) != (two is None):
                one = torch.zeros_like(self.sampling_log_probs) if one is None else one
                two = torch.zeros_like(other.sampling_log_probs) if two is None else two
            if (one is None) != (two is None):
                raise ValueError(f"only one of the two batches has {name}")
            if not isinstance(one, Tensor):
                changes[name] = None if one is None else one + two
                continue
            if name in _COMPLETION_FIELDS or name == "prompt_ids":
                width = max(one.shape[1], two.shape[1])
                one, two = (_widen(part, width, left=name == "prompt_ids") for part in (one, two))
            changes[name] = torch.cat([one, two])
        return replace(self, **changes)

    def trim(self) -> RolloutBatch:
        """Without the columns that are padding in every row."""
        width = max(1, int(self.completion_lengths.max())) if len(self) else 1
        prompt_width = max(1, int(self.prompt_lengths.max())) if len(self) else 1
        changes: dict[str, Any] = {"prompt_ids": self.prompt_ids[:, -prompt_width:]}
        for name in _COMPLETION_FIELDS:
            value = getattr(self, name)
            changes[name] = None if value is None else value[:, :width]
        return replace(self, **changes)

    def blank_row(self) -> RolloutBatch:
        """One row that counts nowhere, with one prompt and one completion token: a forward pass for an idle rank."""
        changes: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shape = (1, 1) if name in _COMPLETION_FIELDS or name == "prompt_ids" else (1, *value.shape[1:])
                changes[name] = value.new_zeros(shape)
            elif value is not None:
                changes[name] = ("",)
        ones = self.completion_lengths.new_ones(1)
        return replace(self, **{**changes, "prompt_lengths": ones, "completion_lengths": ones})

    def to(self, device: torch.device | str, **options: Any) -> RolloutBatch:
        """Move every tensor.

        Args:
            device: Where to.
            options: Of ``Tensor.to``.
        """
        return _move(self, device, options)


@dataclass(frozen=True)
class MicroBatch:
    """What one ``training_step`` sees: a few rows, and what it must know of its optimizer step.

    Args:
        rows: Trimmed rows.
        denominator: The loss denominator of the whole optimizer step, over its micro-batches and all ranks.
        step: Number of the optimizer step within the iteration, from 0.
        last_of_step: Whether the optimizer steps after this one.
        dead_step: No row of the step, on any rank, has anything to teach: the optimizer must not move.
        ratio_is_one: The rollout serves one optimizer step, so old and current log-probs are the same numbers.
    """

    rows: RolloutBatch
    denominator: float
    step: int = 0
    last_of_step: bool = True
    dead_step: bool = False
    ratio_is_one: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str, **options: Any) -> MicroBatch:
        """Move every tensor (Lightning calls this).

        Args:
            device: Where to.
            options: Of ``Tensor.to``.
        """
        return replace(self, rows=_move(self.rows, device, options))


_ROW_FIELDS = tuple(f.name for f in fields(RolloutBatch) if f.metadata.get("per_row"))
_COMPLETION_FIELDS = (
    "completion_ids",
    "completion_mask",
    "sampling_log_probs",
    "token_rewards",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "loss_weights",
    "values",
    "returns",
)


def _widen(values: Tensor, width: int, left: bool) -> Tensor:
    """``(N, width)``, padded with zeros on one side."""
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (missing, 0) if left else (0, missing))


def _move(batch: RolloutBatch, device: torch.device | str, options: dict[str, Any]) -> RolloutBatch:
    changes: dict[str, Any] = {}
    for name in _ROW_FIELDS:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            changes[name] = value.to(device, **options)
    return replace(batch, **changes)
