"""Slow work on many rows, side by side, with a progress bar where it takes long."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_BAR_AFTER_SECONDS = 3.0


def default_workers() -> int:
    """As many as this rank has processors, and at least 4: a worker often waits for a limit to pass."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(4, (os.cpu_count() or 1) // max(1, ranks))


def map_in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int, description: str
) -> list[_Result]:
    """``[function(item) for item in items]``, several at a time; meant for functions that wait for another process.

    A progress bar appears on a terminal after some seconds. Equal items are worked on once.

    Args:
        function: Called in a thread.
        items: Hashable.
        workers: Calls at a time.
        description: Of the bar.

    >>> map_in_threads(len, ["ab", "c", "ab"], 2, "lengths")
    [2, 1, 2]
    """
    different = list(dict.fromkeys(items))
    if len(different) < 2:
        done = [function(item) for item in different]
    else:
        from tqdm import tqdm

        with ThreadPoolExecutor(min(workers, len(different)), thread_name_prefix="lit_rlhf_reward") as executor:
            results = executor.map(function, different)
            bar = tqdm(
                results, description, len(different), leave=False, delay=_BAR_AFTER_SECONDS, disable=None, unit="row"
            )
            done = list(bar)
    found = dict(zip(different, done, strict=True))
    return [found[item] for item in items]
