"""The sized loader that one Lightning epoch runs through: the micro-batches of one rollout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch
from lit_rlhf.rollout.plan import ForwardCost, StepPlan
from lit_rlhf.rollout.sampler import RankLocalSampler


class MicroBatches(Dataset):
    """The micro-batches of a rollout, the same number on every rank and in every optimizer step.

    Args:
        rollout: This rank's rows.
        plan: Rows of each micro-batch of each optimizer step.
        denominators: Of each optimizer step, over all ranks.
        dead: Whether each optimizer step has nothing to teach on any rank.
        micro_batches: Of each optimizer step; steps with fewer are filled up with empty ones.
        ratio_is_one: The rollout serves a single optimizer step.
        on_draw: Called with the number of each micro-batch as it is drawn.
        cost: Counts the tokens of each forward pass.
    """

    def __init__(
        self,
        rollout: RolloutBatch,
        plan: list[StepPlan],
        denominators: list[float],
        dead: list[bool],
        micro_batches: int,
        ratio_is_one: bool,
        on_draw: Callable[[int], None],
        cost: ForwardCost,
    ) -> None:
        self.rollout = rollout
        self.cost = cost
        self.plan = plan
        self.denominators = denominators
        self.dead = dead
        self.micro_batches = micro_batches
        self.ratio_is_one = ratio_is_one
        self.on_draw = on_draw
        self.tokens_drawn = self.tokens_forwarded = self.tokens_padding = 0
        self._last_step = len(plan)

    def skip_after(self, step: int) -> None:
        """From the next optimizer step on hand out empty micro-batches only; every rank has to do the same.

        They keep their number, so whatever counts micro-batches or optimizer steps goes on as before.

        Args:
            step: The last with something to learn.
        """
        self._last_step = step

    def __len__(self) -> int:
        return len(self.plan) * self.micro_batches

    def __getitem__(self, number: int) -> MicroBatch:
        self.on_draw(number)
        step, part = divmod(number, self.micro_batches)
        skipped = step > self._last_step
        parts = [] if skipped else self.plan[step]
        if part < len(parts):
            rows = self.rollout.select(parts[part]).trim()
            self.tokens_drawn += self.cost.alone(parts[part])
            self.tokens_forwarded += self.cost(parts[part])
            self.tokens_padding += self.cost.padding(parts[part])
        else:
            rows = self.rollout.blank_row()
        return MicroBatch(
            rows=rows,
            denominator=self.denominators[step],
            step=step,
            last_of_step=part + 1 == self.micro_batches and not skipped,
            dead_step=self.dead[step],
            ratio_is_one=self.ratio_is_one,
        )


def share_over_ranks(
    plan: list[StepPlan], local_denominators: Tensor, local_live_rows: Tensor, strategy: Strategy
) -> tuple[list[float], list[bool], int]:
    """What the ranks must agree on before the first micro-batch.

    Args:
        plan: This rank's.
        local_denominators: ``(steps,)`` float64, this rank's share.
        local_live_rows: ``(steps,)`` float64 rows with something to teach.
        strategy: Sums over ranks.

    Returns:
        Denominators, dead steps, and the micro-batches per step (the most of any step on any rank, at least 1).
    """
    sums = strategy.reduce(torch.stack([local_denominators, local_live_rows]), reduce_op="sum")
    most = local_denominators.new_tensor(max([1, *(len(parts) for parts in plan)]))
    micro_batches = int(strategy.reduce(most, reduce_op="max"))
    return sums[0].tolist(), [live == 0 for live in sums[1].tolist()], micro_batches


def micro_batch_loader(data: MicroBatches) -> DataLoader:
    """A loader that yields each item as it is, in order, in this process.

    Args:
        data: The micro-batches.
    """
    return DataLoader(data, batch_size=None, sampler=RankLocalSampler(data), num_workers=0)
