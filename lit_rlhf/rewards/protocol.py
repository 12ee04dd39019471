"""What a reward function is, and how one is called: every breach of the contract is named, none is scored silently."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from lit_rlhf.errors import RewardError

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments that do not come from the dataset."""

LOGGING = ("log_metric", "log_extra")
"""Arguments that are functions to log with; a reward function is given them only where it names them."""

OnError = Literal["raise", "abstain"]


@runtime_checkable
class RewardFunction(Protocol):
    """A callable that scores completions. A plain function, an ``async`` one or an object with ``__call__``.

    It may name only the arguments that it uses. Objects may have a ``name``, and ``required_columns`` where the columns
    they read do not show in their signature. A verifier of held-out completions may have an ``answer_key(completion,
    **columns)``: a hashable value that is equal for equal answers, or ``None`` for none; its answers are voted on.
    """

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> Any:
        """Score N completions.

        Args:
            prompts: N texts, or N lists of chat messages.
            completions: N texts, or N lists ``[{"role": "assistant", "content": ...}]`` where prompts are messages.
            completion_ids: N lists of token ids, without padding.
            **columns: Every dataset column by its name: N values, one per completion.

        Returns:
            N numbers; ``None`` where the function has no opinion. Or a
            :class:`~lit_rlhf.rewards.contract.RewardOutput` of them and of further numbers for the log.
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
        if parameter.default is parameter.empty and parameter.name not in (*RESERVED, *LOGGING, *columns):
            raise RewardError(
                f"Reward `{name}` takes {parameter.name!r}, which is neither a dataset column nor one of "
                f"{', '.join(RESERVED)}. Columns: {there}."
            )


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature: they get everything
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def selected(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments there are, those that a function names; all of them where it takes ``**kwargs``.

    Args:
        fn: A reward function.
        given: Arguments by name.
    """
    parameters = _parameters(fn)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in given.items() if key in by_name or (takes_all and key not in LOGGING)}


def stand_in_for(wrapper: Any, fn: Callable[..., Any]) -> None:
    """Let an object that calls a reward function ask for the same arguments and columns, under the same name.

    Args:
        wrapper: The object; its attributes are set.
        fn: What it calls.
    """
    wrapper.__wrapped__ = fn  # where inspect looks for the signature
    wrapper.name = reward_name(fn)
    for attribute in ("required_columns", "check_columns", "extracted", "answer_key"):
        if hasattr(fn, attribute):
            setattr(wrapper, attribute, getattr(fn, attribute))


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether a function, a partial one or an object's ``__call__`` is declared ``async``.

    An object whose plain ``__call__`` gives what an ``async`` function gave says so with an attribute ``calls_async``.

    Args:
        fn: A reward function.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    if getattr(fn, "calls_async", False):
        return True
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
