"""Curves of an arm: the mean over its seeds, and the band that the mean lies in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lit_rlhf.functional.intervals import mean_interval
from lit_rlhf.report.comparison import Arm
from lit_rlhf.report.runs import Run

POINTS = 60  # of a curve at most: more cannot be told apart on a page
_BAND_FROM = 3
Point = tuple[float, float]
Axis = Callable[[Run, int], float]
"""Where a step lies on the x-axis."""


@dataclass(frozen=True)
class Curve:
    """A metric of an arm.

    Args:
        arm: Which.
        x: Ascending.
        mean: Over the runs, one per ``x``.
        low: Lower edge of the band; empty with fewer than three runs, of which a band would show nothing.
        high: Upper edge.
        runs: Each run's own points.
    """

    arm: Arm
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    runs: tuple[tuple[Point, ...], ...]


def tokens(run: Run, step: int) -> float:
    """Tokens generated as x-axis.

    Args:
        run: Any.
        step: Optimizer steps done.
    """
    return run.tokens_at(step)


def seconds(run: Run, step: int) -> float:
    """Seconds without evaluations as x-axis.

    Args:
        run: Any.
        step: Optimizer steps done.
    """
    return run.seconds_at(step)


def curve_of(arm: Arm, metric: str, axis: Axis) -> Curve | None:
    """A metric over the counted runs of an arm.

    Points with the same number belong together where all runs have as many, as they do at the same settings; otherwise
    the runs are read off at the same places.

    Args:
        arm: With its runs.
        metric: Its name.
        axis: :func:`tokens` or :func:`seconds`.

    Returns:
        ``None`` if no run has two values.
    """
    runs = [_points(run.run, metric, axis) for run in arm.counted if run.run is not None]
    runs = [points for points in runs if len(points) > 1]
    if not runs:
        return None
    if len({len(points) for points in runs}) > 1:
        runs = _read_off(runs)
    columns = list(zip(*runs, strict=True))
    x = tuple(math.fsum(place for place, _ in column) / len(column) for column in columns)
    bands = [mean_interval([value for _, value in column]) for column in columns]
    has_band = len(runs) >= _BAND_FROM
    return Curve(
        arm,
        x,
        tuple(band.mean for band in bands),
        tuple(band.low for band in bands if band.low is not None) if has_band else (),
        tuple(band.high for band in bands if band.high is not None) if has_band else (),
        tuple(tuple(points) for points in runs),
    )


def _points(run: Run, metric: str, axis: Axis) -> list[Point]:
    series = run.series.get(metric)
    if series is None:
        return []
    points = [(axis(run, step), value) for step, value in zip(series.steps, series.values, strict=True)]
    size = math.ceil(len(points) / POINTS)
    return [_middle(points[start : start + size]) for start in range(0, len(points), size)]


def _middle(points: Sequence[Point]) -> Point:
    return math.fsum(x for x, _ in points) / len(points), math.fsum(y for _, y in points) / len(points)


def _read_off(runs: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Each run at the same places, between the first and the last that all have."""
    start, stop = max(points[0][0] for points in runs), min(points[-1][0] for points in runs)
    count = min(POINTS, max(len(points) for points in runs))
    places = [start + (stop - start) * number / max(count - 1, 1) for number in range(count)] if stop > start else []
    return [[(place, _height(points, place)) for place in places] for points in runs] if places else [list(runs[0])]


def _height(points: Sequence[Point], place: float) -> float:
    for (x, y), (next_x, next_y) in pairwise(points):
        if place <= next_x:
            return y if next_x == x else y + (next_y - y) * max(0.0, place - x) / (next_x - x)
    return points[-1][1]
