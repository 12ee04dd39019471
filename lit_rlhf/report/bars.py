"""Bars: memory, and the phases that time goes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lit_rlhf.report.comparison import Arm, Comparison
from lit_rlhf.report.summary import Number
from lit_rlhf.report.svg import PHASES, Drawing, Plot, arm_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND_COLUMNS = 4
_PHASE_NAMES = ("generation", "rewards", "reference", "training")


def memory_bars(comparison: Comparison, numbers: Sequence[Number]) -> Plot | None:
    """Peak memory of each arm.

    Args:
        comparison: For the colours.
        numbers: With the peaks.
    """
    found = [n for n in numbers if n.quantity.key == "memory/peak_gib" and n.interval is not None]
    if not found:
        return None
    drawing = Drawing("memory", height=_bar_height(len(found)))
    with drawing as axes:
        for row, number in enumerate(found):
            assert number.interval is not None
            colour = arm_colour(comparison.arms.index(number.arm))
            axes.barh(row, number.interval.mean, color=colour, height=0.6)
            axes.text(number.interval.mean, row, f" {number.interval.mean:.3g}", va="center")
        _name_rows(axes, [number.arm.title for number in found])
        axes.set_xlabel("GiB")
    caption = "Most that the process of any rank has held. On a CPU that includes Python and its libraries."
    return Plot("memory", "Peak memory", caption, drawing.svg, "time")


def phase_bars(comparison: Comparison) -> Plot | None:
    """Seconds of each phase of each arm.

    Args:
        comparison: With its runs.
    """
    rows = [(arm.title, {phase: _phase_seconds(arm, phase) for phase in _phases_of(arm)}) for arm in comparison.arms]
    rows = [(title, phases) for title, phases in rows if phases]
    if not rows:
        return None
    names = sorted({phase for _, phases in rows for phase in phases}, key=_phase_place)
    drawing = Drawing("phases", height=_bar_height(len(rows)) + 0.3)
    with drawing as axes:
        for place, phase in enumerate(names):
            starts = [sum(phases.get(name, 0.0) for name in names[:place]) for _, phases in rows]
            widths = [phases.get(phase, 0.0) for _, phases in rows]
            colour = PHASES[place % len(PHASES)]
            axes.barh(range(len(rows)), widths, left=starts, color=colour, height=0.6, label=phase)
        _name_rows(axes, [title for title, _ in rows])
        axes.set_xlabel("seconds" if comparison.is_single else "seconds per run, mean over seeds")
        columns = len(names) if len(names) <= _LEGEND_COLUMNS else _LEGEND_COLUMNS - 1
        axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=0.8, columnspacing=0.9, fontsize=9)
    return Plot("phases", "Where the time goes", "Evaluations are not in it.", drawing.svg, "time")


def _phases_of(arm: Arm) -> set[str]:
    names = {name for run in arm.counted if run.run is not None for name in run.run.series if name.startswith("time/")}
    return {name.partition("/")[2] for name in names} - {"iteration"}


def _phase_seconds(arm: Arm, phase: str) -> float:
    series = [run.run.series.get(f"time/{phase}") for run in arm.counted if run.run is not None]
    return math.fsum(math.fsum(one.values) for one in series if one is not None) / len(series)


def _phase_place(phase: str) -> tuple[int, str]:
    return (_PHASE_NAMES.index(phase) if phase in _PHASE_NAMES else len(_PHASE_NAMES)), phase


def _bar_height(rows: int) -> float:
    return 0.75 + 0.32 * rows


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Titles of arms beside their bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.2)
