"""Cut a rollout into optimizer steps and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lit_rlhf.rollout.batch import RolloutBatch

StepPlan = list[list[int]]


def plan_steps(
    rollout: RolloutBatch,
    *,
    num_groups: int,
    passes: int,
    steps_per_pass: int,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    micro_batches: int | None = None,
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
        micro_batch_tokens: Tokens in a micro-batch at most, padding included; a longer single row stands alone.
        micro_batches: Cut each step into this many parts instead. With none of the three a step is one micro-batch.
        seed: Of the assignment of prompts to steps.

    Returns:
        ``passes * steps_per_pass`` steps, each a list of micro-batches, each a list of rows. A step may be empty.
    """
    if len(rollout) and int(rollout.group_index.max()) >= num_groups:
        raise ValueError(
            f"group_index must lie below the iteration's {num_groups} prompts, got {int(rollout.group_index.max())}: "
            "redrawn rows take the number of the group that they replace"
        )
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rollout.group_index.tolist()):
        groups.setdefault(group, []).append(row)
    prompts, completions = rollout.prompt_lengths.tolist(), rollout.completion_lengths.tolist()
    lengths = [sum(both) for both in zip(prompts, completions, strict=True)]
    plan: list[StepPlan] = []
    for number in range(passes):
        order = np.random.default_rng([*seed, number]).permutation(num_groups)
        for share in np.array_split(order, steps_per_pass):
            mine = [groups[group] for group in share.tolist() if group in groups]
            # Longest group first; ties in the order of the data, whatever the shuffle.
            mine.sort(key=lambda rows: (-max(lengths[row] for row in rows), rows[0]))
            rows = [row for group_rows in mine for row in group_rows]
            plan.append(_cut(rows, prompts, completions, micro_batch_size, micro_batch_tokens, micro_batches))
    return plan


def _cut(
    rows: list[int],
    prompts: list[int],
    completions: list[int],
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    micro_batches: int | None,
) -> StepPlan:
    if not rows:
        return []
    if micro_batches is not None:
        return [[rows[i] for i in part] for part in np.array_split(np.arange(len(rows)), micro_batches) if len(part)]
    parts: StepPlan = [[]]
    widest_prompt = widest_completion = 0
    for row in rows:
        part = parts[-1]
        # Prompts are padded on the left, completions on the right: the widest of each count.
        wide = max(widest_prompt, prompts[row]), max(widest_completion, completions[row])
        too_many = micro_batch_size is not None and len(part) >= micro_batch_size
        too_long = micro_batch_tokens is not None and sum(wide) * (len(part) + 1) > micro_batch_tokens
        if part and (too_many or too_long):
            parts.append([row])
            wide = prompts[row], completions[row]
        else:
            part.append(row)
        widest_prompt, widest_completion = wide
    return parts
