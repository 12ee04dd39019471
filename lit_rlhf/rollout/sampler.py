"""Which prompts an iteration draws, and a sampler that Lightning leaves alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Sized

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

    def draw_more(self, iteration: int, attempt: int, count: int, used: Collection[int]) -> list[int]:
        """Further prompts for the same iteration, at random; later iterations draw theirs as if nothing had happened.

        Args:
            iteration: From 0.
            attempt: From 1, within the iteration.
            count: Prompts wanted; fewer come back where there are no more.
            used: Prompts that the iteration has had.
        """
        order = np.random.default_rng([self.seed, iteration, attempt, 1]).permutation(self.num_prompts)
        taken = set(used)
        return [int(index) for index in order if index not in taken][:count]


class PromptTurns(PromptSampler):
    """The prompts whose turn is next: one of weight 1 is drawn once per pass over the data, one of weight w less often.

    Stride scheduling (Waldspurger and Weihl, 1995): each draw moves a prompt ``1 / w`` turns back in the queue. Nobody
    is left out for ever, and all ranks agree as long as they agree about ``turns``. Unlike with :class:`PromptSampler`
    every iteration holds the full number of prompts: passes follow each other without a gap.

    >>> sampler = PromptTurns(3, prompts_per_iteration=1, shuffle=False)
    >>> drawn = []
    >>> for iteration in range(8):
    ...     drawn += sampler.draw(iteration)
    ...     sampler.put_back(drawn[-1:], [0.5 if drawn[-1] == 0 else 1.0])
    >>> drawn
    [0, 1, 2, 1, 2, 0, 1, 2]
    """

    def __init__(self, num_prompts: int, prompts_per_iteration: int, seed: int = 0, shuffle: bool = True) -> None:
        super().__init__(num_prompts, prompts_per_iteration, seed, shuffle)
        self.turns = np.zeros(num_prompts)
        """``(num_prompts,)`` each prompt's next turn; the lowest are drawn."""

    def draw(self, iteration: int) -> list[int]:
        """Those whose turn is next; among equals the iteration's own random order decides."""
        return self._queue(iteration)[: self.prompts_per_iteration]

    def draw_more(self, iteration: int, attempt: int, count: int, used: Collection[int]) -> list[int]:
        """Those that would have been next."""
        taken = set(used)
        return [index for index in self._queue(iteration) if index not in taken][:count]

    def put_back(self, prompts: Sequence[int], weights: Sequence[float]) -> None:
        """Back into the queue after an iteration.

        Args:
            prompts: Drawn in it, each once.
            weights: Of each, in (0, 1].
        """
        self.turns[list(prompts)] += 1.0 / np.asarray(weights, dtype=np.float64)

    def _queue(self, iteration: int) -> list[int]:
        lots = np.arange(self.num_prompts)
        if self.shuffle:
            lots = np.random.default_rng([self.seed, iteration, 0, 2]).permutation(self.num_prompts)
        return [int(index) for index in np.lexsort((lots, self.turns))]


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
