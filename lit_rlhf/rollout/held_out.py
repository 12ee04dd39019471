"""Held-out prompts: one data set or several by name, and their batches on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from lit_rlhf.rollout.sampler import RankLocalSampler

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.rollout.datamodule import RolloutDataModule

_ROWS = 256  # completions that are decoded at once, where the engine does not say how many it takes


@dataclass(frozen=True)
class HeldOutBatch:
    """Prompts of one data set.

    Args:
        set_name: Of the data set; empty for the only one.
        set_place: Its number among the data sets.
        prompts: ``M`` of this rank; none where only other ranks have some left.
    """

    set_name: str
    set_place: int
    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)


def held_out_loader(data: RolloutDataModule, split: str, rank: int, world_size: int) -> DataLoader | list[DataLoader]:
    """Batches of this rank's share of the held-out prompts, set by set; the same number of batches on every rank.

    No rank repeats another's prompt, so no prompt counts twice. Ranks that have fewer get empty batches: DDP
    synchronises buffers in each forward, validation's too.

    Args:
        data: With its prompts.
        split: ``val`` or ``test``.
        rank: Of this process.
        world_size: Number of processes.

    Returns:
        No loader where there are no such prompts.
    """
    size = data.val_batch_size or max(1, getattr(data.engine, "max_rows", _ROWS) // max(1, data.val_samples))
    batches: list[HeldOutBatch] = []
    for place, part in enumerate(data.parts(split)):
        prompts = data.prompts.get(part)
        if prompts is None:
            continue
        mine = [prompts[i] for i in range(rank, len(prompts), world_size)]
        most = -(-len(prompts) // world_size)
        name = part.partition("/")[2]
        batches += [HeldOutBatch(name, place, tuple(mine[start : start + size])) for start in range(0, most, size)]
    if not batches:
        return []
    return DataLoader(batches, batch_size=None, sampler=RankLocalSampler(batches), num_workers=0)  # type: ignore[arg-type]
