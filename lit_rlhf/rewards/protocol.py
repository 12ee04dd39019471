"""What a reward function is, and how one is called: every breach of the contract is named, none is scored silently."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from lit_rlhf.errors import RewardError
from lit_rlhf.rewards.contract import RewardValues, checked

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments that do not come from the dataset."""

OnError = Literal["raise", "abstain"]
_LOG = logging.getLogger(__name__)
_SHOWN = 80  # characters of a prompt in a message


@runtime_checkable
class RewardFunction(Protocol):
    """A callable that scores completions. A plain function, an ``async`` one or an object with ``__call__``.

    It may name only the arguments that it uses. Objects may have a ``name``, and ``required_columns`` where the columns
    they read do not show in their signature.
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]:
        """Score N completions.

        Args:
            prompts: N texts, or N lists of chat messages.
            completions: N texts, or N lists ``[{"role": "assistant", "content": ...}]`` where prompts are messages.
            completion_ids: N lists of token ids, without padding.
            **columns: Every dataset column by its name: N values, one per completion.

        Returns:
            N numbers; ``None`` where the function has no opinion.
        """
        ...


def reward_name(fn: Callable[..., Any]) -> str:
    """Name of a reward function in logs and messages.

    Its ``name`` attribute, else its ``__name__``, else the name of its class in snake case. Partial functions and
    decorated ones have the name of what they wrap.

    >>> reward_name(functools.partial(max, 1))
    'max'
    """
    name = getattr(fn, "name", None)
    if isinstance(name, str) and name:
        return name
    if isinstance(fn, functools.partial):
        return reward_name(fn.func)
    wrapped = inspect.unwrap(fn)
    if wrapped is not fn:
        return reward_name(wrapped)
    name = getattr(fn, "__name__", None)
    if isinstance(name, str):
        return name
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(fn).__name__)
    return snake.strip("_").lower()


def check_signature(fn: Callable[..., Any], columns: Sequence[str]) -> None:
    """Check that a dataset has what a reward function asks for. Nothing is called.

    Args:
        fn: A reward function.
        columns: Names of the dataset columns.

    Raises:
        RewardError: A parameter without a default is neither reserved nor a column, or a column has a reserved name.
            The message names the function, the parameter and the columns there are.
    """
    name, there = reward_name(fn), ", ".join(columns) or "none"
    for column in columns:
        if column in RESERVED:
            raise RewardError(
                f"Dataset column {column!r} has the name of an argument that every reward function is given. Rename it."
            )
    for needed in getattr(fn, "required_columns", ()):
        if needed not in columns and needed.split(".")[0] not in columns:
            raise RewardError(f"Reward `{name}` needs the column {needed!r}. Columns: {there}.")
    for parameter in _parameters(fn):
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardError(f"Reward `{name}`: parameter {parameter.name!r} is positional-only; name it.")
        if parameter.default is parameter.empty and parameter.name not in (*RESERVED, *columns):
            raise RewardError(
                f"Reward `{name}` takes {parameter.name!r}, which is neither a dataset column nor one of "
                f"{', '.join(RESERVED)}. Columns: {there}."
            )


def evaluate_reward(
    fn: Callable[..., Any],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    on_error: OnError = "raise",
) -> RewardValues:
    """Call a reward function and check what it returns.

    Only the arguments that the function names are passed; all of them where it takes ``**kwargs``. An ``async``
    function is run to its end, also from within a running event loop.

    Args:
        fn: See :class:`RewardFunction`.
        prompts: N prompts.
        completions: N completions.
        completion_ids: N lists of token ids.
        columns: Dataset columns by name, N values each.
        on_error: What an exception in the function does: ``raise``, or ``abstain``: the function is called again row by
            row, and the rows that fail are left without a reward and counted in the log.

    Returns:
        Totals, NaN where the function abstained (``None`` or NaN), and the rewards of single tokens, if it gave such.

    Raises:
        RewardError: The function raised (with ``on_error="raise"``), or returned anything but N finite numbers,
            lists of them, or ``None``; on either setting of ``on_error`` in the second case. Names the function and
            the row.
    """
    check_signature(fn, list(columns))
    name, count = reward_name(fn), len(completions)
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
    for key, values in given.items():
        if len(values) != count:
            raise RewardError(f"Reward `{name}`: {count} completions, but {len(values)} values in {key!r}.")
    arguments = _select(fn, given)
    try:
        returned = _call(fn, arguments)
    except Exception as error:
        if on_error == "raise":
            raise RewardError(_explain(fn, name, arguments, prompts, count, error)) from error
        return _row_by_row(fn, name, arguments, completion_ids)
    return checked(returned, completion_ids, name)


def call_reward(fn: Callable[..., Any], **call: Any) -> Tensor:
    """Totals of :func:`evaluate_reward` as a tensor, (N,) float32 on the CPU, NaN where the function abstained.

    Args:
        fn: See :class:`RewardFunction`.
        call: The other arguments of :func:`evaluate_reward`.
    """
    return evaluate_reward(fn, **call).tensor()


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature: they get everything
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _select(fn: Callable[..., Any], given: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    parameters = _parameters(fn)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: list(values) for key, values in given.items() if takes_all or key in by_name}


def _call(fn: Callable[..., Any], arguments: Mapping[str, list[Any]]) -> Any:
    result = fn(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    # A thread of its own: asyncio.run refuses to start where this thread already runs a loop, as notebooks do.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(wait())).result()


def _row(arguments: Mapping[str, list[Any]], row: int) -> dict[str, list[Any]]:
    return {key: values[row : row + 1] for key, values in arguments.items()}


def _explain(
    fn: Callable[..., Any],
    name: str,
    arguments: Mapping[str, list[Any]],
    prompts: Sequence[Any],
    count: int,
    error: Exception,
) -> str:
    """Message for an exception; the row is found by calling the function again, row by row."""
    what = f"Reward `{name}` raised {type(error).__name__}: {error}"
    for row in range(count):
        try:
            _call(fn, _row(arguments, row))
        except Exception as found:
            shown = " ".join(str(prompts[row]).split())
            shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
            return f"Reward `{name}` raised {type(found).__name__} at row {row}: {found} (prompt: {shown!r})"
    return f"{what} (no single row raises by itself)"


def _row_by_row(
    fn: Callable[..., Any], name: str, arguments: Mapping[str, list[Any]], completion_ids: Sequence[Sequence[int]]
) -> RewardValues:
    count = len(completion_ids)
    rewards = RewardValues([math.nan] * count, [None] * count)
    failures: list[tuple[int, Exception]] = []
    for row in range(count):
        try:
            returned = _call(fn, _row(arguments, row))
        except Exception as error:
            failures.append((row, error))
            continue
        values = checked(returned, completion_ids[row : row + 1], name, first_row=row)
        rewards.totals[row], rewards.per_token[row] = values.totals[0], values.per_token[0]
    if failures:
        row, first = failures[0]
        _LOG.warning(
            "Reward `%s`: %d of %d rows raised and are left without a reward; the first is row %d: %s: %s",
            name, len(failures), count, row, type(first).__name__, first,
        )  # fmt: skip
    return rewards
