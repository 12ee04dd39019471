"""Call reward functions: plain ones in turn, ``async`` ones all at once meanwhile, each within its time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_rlhf.errors import RewardError
from lit_rlhf.rewards.contract import RewardValues, checked, checked_extra
from lit_rlhf.rewards.protocol import LOGGING, OnError, check_signature, is_async, reward_name, selected

if TYPE_CHECKING:
    from torch import Tensor

_LOG = logging.getLogger("lit_rlhf.rewards.protocol")
_SHOWN = 80  # characters of a prompt in a message


class _TooLateError(Exception):
    """A function did not answer within its time."""


class RewardCall:
    """One call of one reward function on N completions: :meth:`start` it, then :meth:`result`.

    Args:
        fn: See :class:`~lit_rlhf.rewards.protocol.RewardFunction`.
        prompts: N prompts.
        completions: N completions.
        completion_ids: N lists of token ids.
        columns: Dataset columns by name, N values each.
        on_error: What an exception in the function does: ``raise``, or ``abstain``: the function is called again row by
            row, and the rows that fail are left without a reward, and counted. That is for services that fail for a
            while; what breaks the contract is refused on either setting. A function may have an ``on_error`` and a
            ``call_timeout_seconds`` of its own as attributes.
        timeout_seconds: Wall-clock limit of the call; also of calling again row by row. ``None`` for none. Python
            cannot stop a thread: a plain function that takes longer goes on in the background, unheard.

    Raises:
        RewardError: The dataset lacks what the function asks for.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        on_error: OnError = "raise",
        timeout_seconds: float | None = None,
    ) -> None:
        check_signature(fn, list(columns))
        self.fn, self.name, self.count = fn, reward_name(fn), len(completions)
        self.is_async = is_async(fn)
        self.prompts, self.completion_ids = prompts, completion_ids
        self.on_error: OnError = getattr(fn, "on_error", None) or on_error
        own = getattr(fn, "call_timeout_seconds", None)
        self.timeout_seconds = timeout_seconds if own is None else own
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        for key, values in given.items():
            if len(values) != self.count:
                raise RewardError(
                    f"Reward `{self.name}`: {self.count} completions, but {len(values)} values in {key!r}."
                )
        self.arguments = {key: list(values) for key, values in selected(fn, given).items()}
        self.extras: dict[str, list[float]] = {}
        self._started: concurrent.futures.Future[Any] | None = None
        self._start = 0.0

    def start(self) -> None:
        """Set an ``async`` function going; a plain one is called by :meth:`result`."""
        self._start = time.monotonic()
        if self.is_async:
            self._started = _in_loop(self.fn(**self.arguments, **self._loggers(self.count)), self.timeout_seconds)

    def cancel(self) -> None:
        """Stop waiting for what was started."""
        if self._started is not None:
            self._started.cancel()

    def result(self) -> RewardValues:
        """Wait for the rewards, and check them.

        Raises:
            RewardError: The function raised or took too long (with ``on_error="raise"``), or returned anything but N
                finite numbers, lists of them, or ``None``; in the second case with either setting. Names the function
                and the row.
        """
        try:
            returned = self._started.result() if self._started is not None else self._call(self.arguments, self.count)
        except Exception as error:
            late = isinstance(error, _TooLateError)
            if self.on_error == "abstain":
                return self._row_by_row(error, late)
            if late:
                raise RewardError(f"Reward `{self.name}` did not answer within {self.timeout_seconds:g} s") from error
            raise RewardError(self._explain(error)) from error
        values = checked(returned, self.completion_ids, self.name)
        values.extras = {**values.extras, **self.extras}
        if self.on_error == "abstain":
            values.extras["failed"] = [0.0] * self.count
        return values

    def _left(self) -> float | None:
        """Seconds that are left of the call's time; ``None`` where it has no end."""
        return None if self.timeout_seconds is None else max(0.0, self._start + self.timeout_seconds - time.monotonic())

    def _loggers(self, count: int) -> dict[str, Any]:
        """``log_metric(name, value)`` and ``log_extra(name, values)``, where the function names them."""

        def log_metric(name: str, value: Any) -> None:
            self.extras[name] = checked_extra(value, count, self.name, name)

        def log_extra(name: str, values: Sequence[Any]) -> None:
            if not any(isinstance(value, str) for value in values):  # texts are nothing to average
                self.extras[name] = checked_extra(values, count, self.name, name)

        return selected(self.fn, dict(zip(LOGGING, (log_metric, log_extra), strict=True)))

    def _call(self, arguments: Mapping[str, list[Any]], count: int) -> Any:
        left = self._left()
        loggers = self._loggers(count)
        if self.is_async:
            return _in_loop(self.fn(**arguments, **loggers), left).result()
        if left is None:
            returned = self.fn(**arguments, **loggers)
        else:
            returned = _in_thread(lambda: self.fn(**arguments, **loggers), left)
        return _in_loop(returned, self._left()).result() if inspect.isawaitable(returned) else returned

    def _row(self, row: int) -> Any:
        return self._call(self._arguments_of(row), 1)

    def _arguments_of(self, row: int) -> dict[str, list[Any]]:
        return {key: values[row : row + 1] for key, values in self.arguments.items()}

    def _explain(self, error: Exception) -> str:
        """Message for an exception; the row is found by calling the function again, row by row."""
        for row in range(self.count):
            try:
                self._row(row)
            except _TooLateError:
                break
            except Exception as found:
                shown = " ".join(str(self.prompts[row]).split())
                shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
                return f"Reward `{self.name}` raised {type(found).__name__} at row {row}: {found} (prompt: {shown!r})"
        return f"Reward `{self.name}` raised {type(error).__name__}: {error} (no single row raises by itself)"

    def _row_by_row(self, error: Exception, late: bool) -> RewardValues:
        rewards = RewardValues([math.nan] * self.count, [None] * self.count)
        failed = [1.0] * self.count
        first: tuple[int, Exception] | None = None
        attempts: list[Callable[[], Any]] = [functools.partial(self._row, row) for row in range(self.count)]
        if self.is_async and not late:
            attempts = [
                _in_loop(self.fn(**self._arguments_of(row), **self._loggers(1)), self._left()).result
                for row in range(self.count)
            ]
        for row, attempt in enumerate(attempts):
            if late or (self._left() == 0 and not self.is_async):
                break  # the rows that are left have no reward either
            try:
                returned = attempt()
            except Exception as raised:
                first = first or (row, raised)
                continue
            values = checked(returned, self.completion_ids[row : row + 1], self.name, first_row=row)
            rewards.totals[row], rewards.per_token[row], failed[row] = values.totals[0], values.per_token[0], 0.0
            for key, extra in values.extras.items():
                rewards.extras.setdefault(key, [math.nan] * self.count)[row] = extra[0]
        rewards.extras["failed"] = failed
        count, (row, shown) = int(sum(failed)), first or (0, error)
        if count:
            _LOG.warning(
                "Reward `%s`: %d of %d rows raised and are left without a reward; the first is row %d: %s: %s",
                self.name, count, self.count, row, type(shown).__name__, shown or "no answer in time",
            )  # fmt: skip
        return rewards


def evaluate_rewards(functions: Sequence[Callable[..., Any]], **call: Any) -> list[RewardValues]:
    """What each of several reward functions gives N completions.

    Args:
        functions: F reward functions. The ``async`` ones run at the same time, and while the others are called.
        call: The other arguments of :class:`RewardCall`.

    Raises:
        RewardError: See :class:`RewardCall`.
    """
    calls = [RewardCall(fn, **call) for fn in functions]
    waiting = [one for one in calls if one.is_async]
    done: dict[int, RewardValues] = {}
    try:
        for one in waiting:
            one.start()
        for one in calls:
            if one not in waiting:
                one.start()
                done[id(one)] = one.result()
        for one in waiting:
            done[id(one)] = one.result()
    finally:
        for one in waiting:
            one.cancel()
    return [done[id(one)] for one in calls]


def evaluate_reward(fn: Callable[..., Any], **call: Any) -> RewardValues:
    """Call one reward function and check what it returns.

    Args:
        fn: See :class:`~lit_rlhf.rewards.protocol.RewardFunction`.
        call: The other arguments of :class:`RewardCall`.
    """
    return evaluate_rewards([fn], **call)[0]


def call_reward(fn: Callable[..., Any], **call: Any) -> Tensor:
    """Totals of :func:`evaluate_reward` as a tensor, (N,) float32 on the CPU, NaN where the function abstained.

    Args:
        fn: See :class:`~lit_rlhf.rewards.protocol.RewardFunction`.
        call: The other arguments of :class:`RewardCall`.
    """
    return evaluate_reward(fn, **call).tensor()


_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
_loop_lock = threading.Lock()


def _in_loop(awaitable: Any, seconds: float | None) -> concurrent.futures.Future[Any]:
    """Run an awaitable in the one event loop of all rewards, so that an HTTP session can live from call to call."""
    global _loop
    with _loop_lock:
        if _loop is None or _loop[0] != os.getpid():  # a fork has the object, but not its thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="lit_rlhf_rewards").start()
            _loop = os.getpid(), loop

    async def wait() -> Any:
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        finally:
            task.cancel()
        if not done:
            raise _TooLateError
        return task.result()

    return asyncio.run_coroutine_threadsafe(wait(), _loop[1])


def _in_thread(function: Callable[[], Any], seconds: float) -> Any:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # Not an executor's: the interpreter would wait for such a thread before it ends.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), daemon=True, name="lit_rlhf_reward").start()
    done, _ = concurrent.futures.wait([future], seconds)
    if not done:
        raise _TooLateError
    return future.result()
