"""Use reward functions that were written for another signature, or that need rules of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rlhf.errors import RewardError, check_choice, check_number
from lit_rlhf.rewards.contract import RewardOutput
from lit_rlhf.rewards.loading import load_function
from lit_rlhf.rewards.messages import completion_text, optional_column, prompt_text, required_column
from lit_rlhf.rewards.protocol import OnError, is_async, reward_name, selected, stand_in_for


class ComputeScore:
    """A function ``compute_score(data_source, solution_str, ground_truth, extra_info=None)`` for one completion.

    It returns a number, or a dictionary with the number under ``score``; other numbers in that dictionary are logged
    under their names. A function that is ``async`` is called for all completions at once.

    Args:
        function: The function, ``package.module.compute_score`` or ``path/to/file.py:compute_score``.
        ground_truth_column: Dataset column of the reference, or a dotted path into one.
        data_source_column: Dataset column of the row's source; ``None`` is passed where there is no such column.
        extra_info_column: Dataset column of further information; the same.
        kwargs: Further arguments of the function.

    Raises:
        ConfigurationError: There is no such function.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    >>> reward = ComputeScore(compute_score, ground_truth_column="answer")
    >>> reward(completions=["4", "five"], answer=["4", "5"])
    RewardOutput(rewards=[1.0, 0.0], extras={'length': [1, 4]})
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        ground_truth_column: str = "reward_model.ground_truth",
        data_source_column: str = "data_source",
        extra_info_column: str = "extra_info",
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.function = load_function(function)
        self.ground_truth_column = ground_truth_column
        self.data_source_column = data_source_column
        self.extra_info_column = extra_info_column
        self.kwargs = kwargs or {}
        self.name = reward_name(self.function)
        self.calls_async = is_async(self.function)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        return (self.ground_truth_column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Any:
        """Score N completions.

        Raises:
            RewardError: The column of the reference is missing.
        """
        count = len(completions)
        truths = required_column(self.name, columns, self.ground_truth_column, count)
        sources = optional_column(self.name, columns, self.data_source_column, count)
        infos = optional_column(self.name, columns, self.extra_info_column, count)
        by_row = selected(
            self.function,
            {
                "data_source": sources,
                "solution_str": [completion_text(completion) for completion in completions],
                "ground_truth": truths,
                "extra_info": infos,
            },
        )
        fixed = selected(self.function, self.kwargs)
        returned = [
            self.function(**{**{key: values[row] for key, values in by_row.items()}, **fixed}) for row in range(count)
        ]
        if self.calls_async:
            return _gathered(returned)
        return _scores(returned)


async def _gathered(awaitables: Sequence[Any]) -> Any:
    import asyncio

    return _scores(await asyncio.gather(*awaitables))


def _scores(returned: Sequence[Any]) -> Any:
    if not any(isinstance(one, Mapping) for one in returned):
        return list(returned)
    rows = [one if isinstance(one, Mapping) else {"score": one} for one in returned]
    for row, one in enumerate(rows):
        if "score" not in one:
            raise RewardError(f"row {row} of a compute_score function has no 'score', only {', '.join(map(str, one))}")
    return RewardOutput([one["score"] for one in rows], _extras(rows))


def _extras(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The other values by name, of those that are numbers."""
    names = dict.fromkeys(str(key) for one in rows for key in one if key != "score")
    values = {name: [_number(one.get(name)) for one in rows] for name in names}
    return {name: found for name, found in values.items() if any(value is not None for value in found)}


def _number(value: Any) -> Any:
    try:
        return value if math.isfinite(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


class RewardFunc:
    """A function ``reward_func(queries, prompts, labels)`` for N completions.

    ``queries`` are prompt and completion as one text. It returns N numbers (a list or a tensor), or a dictionary that
    has them under ``rewards``; in that dictionary ``scores`` and the lists of N numbers under ``extra_logs`` are
    logged under their names.

    Args:
        function: The function, ``package.module.reward_func`` or ``path/to/file.py:reward_func``.
        label_column: Dataset column of what is passed as ``labels``; ``None`` is passed where there is no such column.
        kwargs: Further arguments of the function.

    Raises:
        ConfigurationError: There is no such function.

    >>> def reward_func(queries, prompts, labels):
    ...     return {"rewards": [float(q.endswith(x)) for q, x in zip(queries, labels)], "extra_logs": {"n": [1, 1]}}
    >>> RewardFunc(reward_func)(prompts=["2+2=", "2+3="], completions=["4", "4"], label=["4", "5"])
    RewardOutput(rewards=[1.0, 0.0], extras={'n': [1, 1]})
    """

    def __init__(
        self, function: str | Callable[..., Any], label_column: str = "label", kwargs: dict[str, Any] | None = None
    ) -> None:
        self.function = load_function(function)
        self.label_column = label_column
        self.kwargs = kwargs or {}
        self.name = reward_name(self.function)
        self.calls_async = is_async(self.function)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Any:
        """Score N completions."""
        texts = [prompt_text(prompt) for prompt in prompts]
        queries = [text + completion_text(completion) for text, completion in zip(texts, completions, strict=True)]
        labels = optional_column(self.name, columns, self.label_column, len(completions))
        given = {"queries": queries, "prompts": texts, "labels": labels, **self.kwargs}
        returned = self.function(**selected(self.function, given))
        if self.calls_async:
            return _waited(returned, len(completions))
        return _unpacked(returned, len(completions))


async def _waited(returned: Any, count: int) -> Any:
    return _unpacked(await returned, count)


def _unpacked(returned: Any, count: int) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    if "rewards" not in returned:
        raise RewardError(f"a reward_func returned no 'rewards', only {', '.join(map(str, returned))}")
    logs = dict(returned.get("extra_logs") or {})
    if returned.get("scores") is not None:
        logs["scores"] = returned["scores"]
    rows = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in logs.items()}
    fitting = {n: v for n, v in rows.items() if isinstance(v, (list, tuple)) and len(v) == count}
    return RewardOutput(returned["rewards"], {name: [_number(v) for v in values] for name, values in fitting.items()})


class Guarded:
    """A reward function with rules of its own for errors and time.

    Args:
        function: The function, or its name: ``package.module.function`` or ``path/to/file.py:function``.
        on_error: ``raise`` stops the run when the function raises; ``abstain`` leaves the rows that raise without a
            reward. They are counted in ``reward/<name>/failed``.
        timeout_seconds: Longest time of a call, in seconds, after which the rows count as failed; ``None`` for that
            of all functions.
        name: In logs; the function's own by default.

    Raises:
        ConfigurationError: There is no such function, or an argument is out of range.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        on_error: OnError = "abstain",
        timeout_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        check_choice("Guarded: on_error", on_error, ("raise", "abstain"))
        check_number("Guarded: timeout_seconds", timeout_seconds, above=0)
        self.function = load_function(function)
        self.on_error = on_error
        self.call_timeout_seconds = timeout_seconds
        stand_in_for(self, self.function)
        self.name = name or reward_name(self.function)
        self.calls_async = is_async(self.function)

    def __call__(self, **arguments: Any) -> Any:
        """Call the function."""
        return self.function(**arguments)
