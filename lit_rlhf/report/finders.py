"""How a number is found in a run, and where it says that it came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lit_rlhf.report.runs import Run, Series

LAST_SHARE = 0.1
"""Share of the iterations, the last ones, that a value "at the end" is the mean of."""
BOUNDS = ("_low", "_high")
"""Endings of the metrics that bound another one."""


class Found(NamedTuple):
    """A number of one run and where it came from."""

    value: float
    file: Path
    source: str
    """Metric and step, or how it is computed of metrics."""
    low: float | None = None
    """Bounds of an interval over prompts, where the run logged one."""
    high: float | None = None


Finder = Callable[[Run], Found | None]
"""Finds a number in a run; ``None`` where the run does not have it."""


def accuracy_series(run: Run) -> Series | None:
    """The held-out accuracy over training, the policy before training included.

    Args:
        run: With validations, or without: ``None``.
    """
    return run.series.get("val/accuracy")


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest accuracy, in steps of 0.05, that every run has reached.

    Args:
        runs: All that are compared.

    Returns:
        ``None`` where a run has no accuracy, or one had as much before training.
    """
    series = [accuracy_series(run) for run in runs]
    found = [one for one in series if one is not None]
    if not found or len(found) < len(series):
        return None
    target = math.floor(min(max(one.values) for one in found) / 0.05 + 1e-9) * 0.05
    return round(target, 2) if target > max(one.values[0] for one in found) else None


def reached_at(run: Run, target: float, at: Callable[[int], float]) -> tuple[float, int] | None:
    """When the held-out accuracy first reached a target, and the step of the validation that showed it.

    Between two validations the accuracy is taken to rise evenly.

    Args:
        run: With validations.
        target: Accuracy.
        at: Tokens or seconds of a step.

    Returns:
        ``None`` if it never did.
    """
    series = accuracy_series(run)
    before: tuple[int, float] | None = None
    for step, value in zip(series.steps, series.values, strict=True) if series is not None else ():
        if value >= target:
            if before is None:
                return at(step), step
            share = (target - before[1]) / (value - before[1])
            return at(before[0]) + share * (at(step) - at(before[0])), step
        before = (step, value)
    return None


def end_value(series: Series) -> tuple[float, int]:
    """Mean over the last tenth of the iterations, and how many these are.

    Args:
        series: Logged once per iteration.
    """
    count = max(1, math.ceil(LAST_SHARE * len(series.values)))
    return math.fsum(series.values[-count:]) / count, count


def last(name: str) -> Finder:
    """The newest value of a metric, with the bounds that the run logged for it.

    Args:
        name: Of the metric.
    """

    def find(run: Run) -> Found | None:
        series = run.series.get(name)
        if series is None:
            return None
        bounds = [run.last(name + end) for end in BOUNDS]
        return Found(series.last, series.file, f"{name} at step {series.steps[-1]}", *bounds)

    return find


def end(name: str) -> Finder:
    """Mean of a metric over the last tenth of the iterations.

    Args:
        name: Of the metric.
    """

    def find(run: Run) -> Found | None:
        series = run.series.get(name)
        if series is None:
            return None
        value, count = end_value(series)
        return Found(value, series.file, f"{name}, mean of the last {count} of {len(series.values)} values")

    return find


def mean(name: str) -> Finder:
    """Mean of a metric over the run.

    Args:
        name: Of the metric.
    """

    def find(run: Run) -> Found | None:
        series = run.series.get(name)
        if series is None:
            return None
        count = len(series.values)
        return Found(math.fsum(series.values) / count, series.file, f"{name}, mean of {count} values")

    return find


def maximum(name: str) -> Finder:
    """Largest value of a metric.

    Args:
        name: Of the metric.
    """

    def find(run: Run) -> Found | None:
        series = run.series.get(name)
        return None if series is None else Found(max(series.values), series.file, f"{name}, largest")

    return find


def of_groups(find: Finder) -> Finder:
    """Only where advantages come from groups.

    Args:
        find: The number.
    """

    def found(run: Run) -> Found | None:
        return None if run.has_critic or run.group_size == 1 else find(run)

    return found


def dead_share(run: Run) -> Found | None:
    """Share of the run's groups whose rewards were all the same.

    Args:
        run: Any.
    """
    found = mean("group/effective_ratio")(run)
    return None if found is None else Found(1 - found.value, found.file, f"1 - {found.source}")


def dead_at_end(run: Run) -> Found | None:
    """The same over the last tenth of the iterations.

    Args:
        run: Any.
    """
    found = end("group/effective_ratio")(run)
    return None if found is None else Found(1 - found.value, found.file, f"1 - {found.source}")


def effective_candidates(run: Run) -> Found | None:
    """Completions of an iteration that stood in groups with different rewards; needs the recipe.

    Args:
        run: Any.
    """
    found = mean("group/effective_ratio")(run)
    prompts, size = run.option("data.init_args.prompts_per_iteration"), run.group_size
    if found is None or not isinstance(prompts, int) or size is None:
        return None
    return Found(found.value * prompts * size, found.file, f"{found.source}, times {prompts} prompts x {size}")


def iterations(run: Run) -> Found | None:
    """Rollouts in the logs.

    Args:
        run: Any.
    """
    series = run.series.get("tokens/generated")
    return None if series is None else Found(len(series.steps), series.file, "rows with tokens/generated")


def seconds(run: Run) -> Found | None:
    """Seconds of all phases.

    Args:
        run: Any.
    """
    series = run.series.get("time/iteration")
    return None if series is None else Found(math.fsum(series.values), series.file, "time/iteration, sum")


def _speed(run: Run, phase: str) -> Found | None:
    tokens, seconds = run.series.get("tokens/generated"), run.series.get(phase)
    if tokens is None or seconds is None or sum(seconds.values) <= 0:
        return None
    return Found(tokens.last / math.fsum(seconds.values), tokens.file, f"tokens/generated, last, over {phase}, sum")


def throughput(run: Run) -> Found | None:
    """Tokens generated per second of all phases.

    Args:
        run: Any.
    """
    return _speed(run, "time/iteration")


def generation_speed(run: Run) -> Found | None:
    """Tokens generated per second of generation.

    Args:
        run: Any.
    """
    return _speed(run, "time/generation")


def to_target(target: float, what: str) -> Finder:
    """Cost of reaching an accuracy.

    Args:
        target: The accuracy.
        what: ``tokens`` or ``seconds``.
    """

    def find(run: Run) -> Found | None:
        at = run.tokens_at if what == "tokens" else run.seconds_at
        found, series = reached_at(run, target, at), accuracy_series(run)
        if found is None or series is None:
            return None
        metric = "tokens/generated" if what == "tokens" else "time/iteration, sum"
        return Found(found[0], series.file, f"{metric} at val/accuracy >= {target:g}, seen at step {found[1]}")

    return find
