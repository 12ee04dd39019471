"""Which prompts an iteration draws, and a sampler that Lightning leaves alone."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from lit_rlhf.errors import ConfigurationError


class PromptSampler:
    """The prompts of each iteration as a function of its number: nothing to lose, nothing to restore.

    Every prompt is drawn once per pass over the data; the last iteration of a pass holds what is left.

    Args:
        num_prompts: Prompts there are.
        prompts_per_iteration: Drawn in each iteration, over all ranks.
        seed: Of the shuffling.
        shuffle: A new order for each pass over the data; file order otherwise.

    >>> sampler = PromptSampler(5, prompts_per_iteration=2, seed=0, shuffle=False)
    >>> [sampler.draw(iteration) for iteration in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(self, num_prompts: int, prompts_per_iteration: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ConfigurationError("there are no prompts to draw from")
        self.num_prompts = num_prompts
        self.prompts_per_iteration = prompts_per_iteration
        self.seed = seed
        self.shuffle = shuffle

    def draw(self, iteration: int) -> list[int]:
        """Indices of the iteration's prompts, over all ranks.

        Args:
            iteration: From 0.
        """
        per_pass = -(-self.num_prompts // self.prompts_per_iteration)
        data_pass, place = divmod(iteration, per_pass)
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng([self.seed, data_pass]).permutation(self.num_prompts)
        start = place * self.prompts_per_iteration
        return [int(index) for index in order[start : start + self.prompts_per_iteration]]


class RankLocalSampler(DistributedSampler):
    """In order, all of it: the data belong to this rank already.

    Lightning replaces a plain sampler under DDP by one that hands each rank a share, which would split a rank's own
    rollout; a ``DistributedSampler`` it leaves alone.

    Args:
        data: The rank's own items.
    """

    def __init__(self, data: Sized) -> None:
        super().__init__(data, num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]
