"""Means of the further numbers that reward functions return for the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ExtraMeans:
    """Sums and counts by name. Names need not be known beforehand, nor be the same on all ranks.

    >>> means = ExtraMeans()
    >>> means.add({"judge/words": [3.0, float("nan")]})
    >>> means.take()
    {'judge/words': 3.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, extras: Mapping[str, Sequence[float]]) -> None:
        """Add N values of each name.

        Args:
            extras: NaN where a row has none.
        """
        for name, values in extras.items():
            there = [value for value in values if value == value]
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + sum(there), count + len(there)

    def take(self) -> dict[str, float]:
        """Means over all ranks by name, which starts anew. A collective: every rank has to ask."""
        mine, self._sums = self._sums, {}
        parts = [mine]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(parts, mine)
        names = sorted({name for part in parts for name in part})
        sums = {name: [part[name] for part in parts if name in part] for name in names}
        means = {}
        for name, found in sums.items():
            count = sum(count for _, count in found)
            if count:
                means[name] = sum(total for total, _ in found) / count
        return means

    def clear(self) -> None:
        """Forget what was added."""
        self._sums = {}


def extras_tensor(extras: Mapping[str, Sequence[float]], count: int) -> Tensor:
    """``(N, E)`` float32, NaN where a row has no value.

    Args:
        extras: E lists of N values.
        count: N.
    """
    return torch.tensor(list(extras.values()), dtype=torch.float32).reshape(len(extras), count).T
