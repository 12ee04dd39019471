"""Run a slow reward function in processes of its own, side by side, each call with a limit that holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rlhf.errors import RewardError, check_number
from lit_rlhf.rewards.calling import evaluate_reward
from lit_rlhf.rewards.contract import RewardOutput
from lit_rlhf.rewards.isolation import WorkerCallError, WorkerCrashError, WorkerPool, WorkerTimeoutError
from lit_rlhf.rewards.loading import load_function
from lit_rlhf.rewards.parallel import default_workers, map_in_threads
from lit_rlhf.rewards.protocol import RESERVED, OnError, stand_in_for


class InWorkers:
    """A reward function that is called row by row in worker processes, several at a time.

    For functions that keep a processor busy, or that may never return: a process can be killed, a thread cannot. The
    processes are started on first use and kept. They import the function anew, so it has to be in an importable module
    and be the same there.

    Args:
        function: ``package.module.function``, or an object that pickle can copy.
        workers: Processes; one per processor and at least 4 by default.
        timeout_seconds: Wall-clock limit of one row, in seconds. Starting a process does not count.
        on_error: What a row that raises, or exceeds its limit, does: ``raise`` stops the run, ``abstain`` leaves the
            row without a reward and counts it in ``reward/<name>/failed``.
        memory_mb: Limit of each process's address space, in MiB; ``None`` for none.

    Raises:
        ConfigurationError: There is no such function, or an argument is out of range.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        workers: int | None = None,
        timeout_seconds: float = 30.0,
        on_error: OnError = "abstain",
        memory_mb: int | None = 4096,
    ) -> None:
        check_number("InWorkers: workers", workers, minimum=1)
        check_number("InWorkers: timeout_seconds", timeout_seconds, above=0)
        check_number("InWorkers: memory_mb", memory_mb, minimum=64)
        self.function = load_function(function)
        self.workers = workers or default_workers()
        self.timeout_seconds = float(timeout_seconds)
        self.abstains = on_error == "abstain"
        self.memory_bytes = None if memory_mb is None else memory_mb << 20
        self.name: str
        stand_in_for(self, self.function)
        self._asked_for = function
        self._pool: WorkerPool | None = None

    def __call__(self, **arguments: Sequence[Any]) -> RewardOutput:
        """Score N completions.

        Raises:
            RewardError: A row raised or took too long (with ``on_error="raise"``), or returned what is no reward.
        """
        if self._pool is None:
            # Imports are not counted against a row's limit.
            load = functools.partial(load_function, self._asked_for)
            self._pool = WorkerPool(self.workers, load, self.memory_bytes)
        count = len(next(iter(arguments.values()), []))
        found = map_in_threads(lambda row: self._score(row, arguments), range(count), self.workers, self.name)
        extras: dict[str, list[float]] = {key: [math.nan] * count for _, row, _ in found for key in row}
        for place, (_, row, _) in enumerate(found):
            for key, value in row.items():
                extras[key][place] = value
        if self.abstains:
            extras["failed"] = [float(failed) for _, _, failed in found]
        return RewardOutput([reward for reward, _, _ in found], extras)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def _score(self, row: int, arguments: Mapping[str, Sequence[Any]]) -> tuple[Any, dict[str, float], bool]:
        assert self._pool is not None
        one = {key: [values[row]] for key, values in arguments.items()}
        with self._pool.worker() as worker:
            worker.start()
            try:
                on_error = "abstain" if self.abstains else "raise"
                reward, extras = worker.run(
                    score_row, self._asked_for, one, on_error, timeout_seconds=self.timeout_seconds
                )
            except (WorkerTimeoutError, WorkerCrashError) as error:
                if self.abstains:
                    return None, {}, True
                raise RewardError(str(error)) from error
            except WorkerCallError as error:  # with either setting: the function breaks the contract
                raise RewardError(str(error)) from error
        return reward, extras, extras.pop("failed", 0.0) == 1.0


def score_row(
    function: str | Callable[..., Any], arguments: Mapping[str, list[Any]], on_error: OnError
) -> tuple[Any, dict[str, float]]:
    """One row's reward and further numbers. Runs in a worker process.

    Args:
        function: See :class:`InWorkers`.
        arguments: Lists of one.
        on_error: See :class:`InWorkers`.
    """
    loaded = load_function(function)
    columns = {key: values for key, values in arguments.items() if key not in RESERVED}
    count = len(next(iter(arguments.values())))
    values = evaluate_reward(
        loaded,
        prompts=arguments.get("prompts", [""] * count),
        completions=arguments.get("completions", [""] * count),
        completion_ids=arguments.get("completion_ids", [[]] * count),
        columns=columns,
        on_error=on_error,
    )
    reward = values.per_token[0] if values.per_token[0] is not None else values.totals[0]
    absent = isinstance(reward, float) and math.isnan(reward)
    return None if absent else reward, {key: extra[0] for key, extra in values.extras.items()}
