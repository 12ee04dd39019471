"""Cut a rollout into optimizer steps and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch

StepPlan = list[list[int]]


class ForwardCost:
    """Tokens of a forward pass over some rows of a rollout.

    Args:
        rollout: ``N`` rows.
        shared_prompts: Whether a pass runs the prompt of neighbouring rows of a group once and pads nothing; otherwise
            every row is as wide as the widest prompt plus the widest completion.
    """

    def __init__(self, rollout: RolloutBatch, shared_prompts: bool) -> None:
        self.prompts: list[int] = rollout.prompt_lengths.tolist()
        self.completions: list[int] = rollout.completion_lengths.tolist()
        self.groups: list[int] = rollout.group_index.tolist()
        self.shared_prompts = shared_prompts

    def __call__(self, rows: Sequence[int]) -> int:
        """Tokens of one pass.

        Args:
            rows: Of the rollout, in the order they are run.
        """
        if not rows:
            return 0
        if not self.shared_prompts:
            return len(rows) * (max(self.prompts[r] for r in rows) + max(self.completions[r] for r in rows))
        firsts = [r for before, r in zip([None, *rows], rows, strict=False) if self._starts(before, r)]
        return sum(self.prompts[r] for r in firsts) + sum(self.completions[r] for r in rows)

    def alone(self, rows: Sequence[int]) -> int:
        """Tokens of the rows, each with its prompt, without padding.

        Args:
            rows: Of the rollout.
        """
        return sum(self.prompts[r] + self.completions[r] for r in rows)

    def padding(self, rows: Sequence[int]) -> int:
        """Tokens of one pass that are padding.

        Args:
            rows: Of the rollout, in the order they are run.
        """
        return 0 if self.shared_prompts else self(rows) - self.alone(rows)

    def _starts(self, before: int | None, row: int) -> bool:
        return before is None or self.groups[before] != self.groups[row]


def plan_steps(
    rollout: RolloutBatch,
    *,
    num_groups: int,
    passes: int,
    steps_per_pass: int,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    micro_batches: int | None = None,
    shared_prompts: bool = False,
    keep: Sequence[bool] | None = None,
    seed: tuple[int, ...] = (0,),
) -> list[StepPlan]:
    """Assign every row to one optimizer step of each pass, and the rows of a step to micro-batches.

    The completions of one prompt stay together. Inside a step rows are ordered by length, so little is padding; the
    gradient does not depend on how a step is cut.

    Args:
        rollout: ``N`` rows.
        num_groups: Prompts of the iteration over all ranks. Which step a prompt falls into is decided over all of them,
            so it does not depend on the number of ranks.
        passes: Times that each row is learned from.
        steps_per_pass: Optimizer steps that share a pass.
        micro_batch_size: Rows in a micro-batch at most.
        micro_batch_tokens: Tokens of a micro-batch's forward pass at most, as :class:`ForwardCost` counts them; a
            longer single row stands alone. The micro-batches of a step get about the same number of tokens.
        micro_batches: Cut each step into this many parts instead. With none of the three a step is one micro-batch.
        shared_prompts: See :class:`ForwardCost`.
        keep: ``N`` flags; rows without it keep their place in the assignment but are in no micro-batch.
        seed: Of the assignment of prompts to steps.

    Returns:
        ``passes * steps_per_pass`` steps, each a list of micro-batches, each a list of rows. A step may be empty.
    """
    if len(rollout) and int(rollout.group_index.max()) >= num_groups:
        raise ValueError(
            f"group_index must lie below the iteration's {num_groups} prompts, got {int(rollout.group_index.max())}: "
            "redrawn rows take the number of the group that they replace"
        )
    cost = ForwardCost(rollout, shared_prompts)
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(cost.groups):
        if keep is None or keep[row]:
            groups.setdefault(group, []).append(row)
    lengths = [sum(both) for both in zip(cost.prompts, cost.completions, strict=True)]
    plan: list[StepPlan] = []
    for number in range(passes):
        order = np.random.default_rng([*seed, number]).permutation(num_groups)
        for share in np.array_split(order, steps_per_pass):
            mine = [groups[group] for group in share.tolist() if group in groups]
            # Longest group first; ties in the order of the data, whatever the shuffle.
            mine.sort(key=lambda rows: (-max(lengths[row] for row in rows), rows[0]))
            plan.append(_cut(mine, cost, micro_batch_size, micro_batch_tokens, micro_batches))
    return plan


def _cut(
    groups: list[list[int]],
    cost: ForwardCost,
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    micro_batches: int | None,
) -> StepPlan:
    rows = [row for group in groups for row in group]
    if not rows:
        return []
    if micro_batches is not None:
        return [[rows[i] for i in part] for part in np.array_split(np.arange(len(rows)), micro_batches) if len(part)]
    if micro_batch_size is not None:
        return [rows[start : start + micro_batch_size] for start in range(0, len(rows), micro_batch_size)]
    if micro_batch_tokens is not None:
        return _balance(groups, cost, micro_batch_tokens)
    return [rows]


def _balance(groups: list[list[int]], cost: ForwardCost, most_tokens: int) -> StepPlan:
    """As few parts as the limit allows; of these, parts whose largest is as small as can be."""
    best = _fill(groups, cost, most_tokens)
    low, high = 1, most_tokens
    while low < high:
        middle = (low + high) // 2
        parts = _fill(groups, cost, middle)
        if len(parts) <= len(best):
            best, high = parts, middle
        else:
            low = middle + 1
    return best


def _fill(groups: list[list[int]], cost: ForwardCost, most_tokens: int) -> StepPlan:
    """One part after the other; a group is cut only where it does not fit into a part of its own."""
    parts: StepPlan = [[]]
    for group in groups:
        whole = cost(group) <= most_tokens
        if parts[-1] and whole and cost([*parts[-1], *group]) > most_tokens:
            parts.append([])
        if whole:
            parts[-1].extend(group)
            continue
        for row in group:
            if parts[-1] and cost([*parts[-1], row]) > most_tokens:
                parts.append([])
            parts[-1].append(row)
    return parts
