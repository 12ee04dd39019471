"""The tables of a report, as rows of cells that a template only has to set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rlhf.report.comparison import Arm, Comparison
from lit_rlhf.report.formats import bounds, number, signed
from lit_rlhf.report.quantity import SECTIONS, Quantity
from lit_rlhf.report.summary import Difference, Number

_SETTINGS = (
    ("policy", "model.init_args.policy"),
    ("learning rate", "model.init_args.lr"),
    ("critic", "model.init_args.critic"),
    ("critic learning rate", "model.init_args.critic_lr"),
    ("KL coefficient", "model.init_args.kl_coef"),
    ("KL placement", "model.init_args.kl_placement"),
    ("training prompts", "data.init_args.train"),
    ("held-out prompts", "data.init_args.val"),
    ("prompts per iteration", "data.init_args.prompts_per_iteration"),
    ("group size", "data.init_args.group_size"),
    ("passes", "data.init_args.passes"),
    ("steps per pass", "data.init_args.steps_per_pass"),
    ("temperature", "data.init_args.temperature"),
    ("new tokens at most", "data.init_args.max_new_tokens"),
)


@dataclass(frozen=True)
class Cell:
    """A number, or a dash.

    Args:
        text: The mean.
        detail: Interval, or what is missing.
        anchor: Id of the lines that say where it is from; empty for a dash.
        tip: The values and their seeds.
    """

    text: str = "–"
    detail: str = ""
    anchor: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Row:
    """A quantity over the arms.

    Args:
        quantity: With title, unit and explanation.
        cells: One per arm.
        differences: To the first arm and, of three arms, between the others.
    """

    quantity: Quantity
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Section:
    """A table.

    Args:
        key: One of :data:`~lit_rlhf.report.quantities.SECTIONS`.
        title: Above it.
        rows: Quantities.
    """

    key: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Source:
    """Where the number of one run comes from.

    Args:
        anchor: Of the cell.
        quantity: Title.
        arm: Title.
        seed: Of the run.
        value: As it is in the file, in full.
        file: Relative to the report.
        source: Metric and step.
        is_timing: Of time or memory.
    """

    anchor: str
    quantity: str
    arm: str
    seed: int | None
    value: str
    file: str
    source: str
    is_timing: bool


def sections(numbers: Sequence[Number], differences: Sequence[Difference], arms: Sequence[Arm]) -> list[Section]:
    """The tables with at least one number.

    Args:
        numbers: Of all arms.
        differences: Between them.
        arms: The columns.
    """
    found = []
    for key, title in SECTIONS.items():
        quantities = dict.fromkeys(number.quantity for number in numbers if number.quantity.section == key)
        rows = tuple(_row(quantity, numbers, differences, arms) for quantity in quantities)
        if rows:
            found.append(Section(key, title, rows))
    return found


def sources(numbers: Sequence[Number], out: Path) -> list[Source]:
    """A line for each run of each number.

    Args:
        numbers: Of all arms.
        out: Folder of the report, that the files are relative to.
    """
    return [
        Source(
            *(_anchor(number), number.quantity.title, number.arm.title, seed, repr(found.value)),
            *(relative(found.file, out), found.source, number.quantity.is_timing),
        )
        for number in numbers
        for seed, found in number.values
    ]


def settings(comparison: Comparison) -> list[tuple[str, list[str], bool]]:
    """Options by arm, as far as the recipes are known: name, one value per arm, and whether the arms differ in it.

    Args:
        comparison: With its runs.
    """
    runs = [next((run.run for run in arm.runs if run.run is not None), None) for arm in comparison.arms]
    rows: list[tuple[str, list[str], bool]] = []
    for title, path in (("algorithm", ""), *_SETTINGS):
        values = [None if run is None else run.option(path) if path else run.algorithm for run in runs]
        shown = ["–" if value is None else _option(value) for value in values]
        if any(value is not None for value in values):
            rows.append((title, shown, len(set(shown)) > 1))
    return rows


def relative(file: Path, out: Path) -> str:
    """A file as seen from the report.

    Args:
        file: Anywhere.
        out: Folder of the report.
    """
    return Path(os.path.relpath(file.resolve(), out.resolve())).as_posix()


def _row(quantity: Quantity, numbers: Sequence[Number], differences: Sequence[Difference], arms: Sequence[Arm]) -> Row:
    own = {number.arm.name: number for number in numbers if number.quantity is quantity}
    cells = tuple(_cell(own[arm.name]) if arm.name in own else Cell() for arm in arms)
    return Row(quantity, cells, tuple(d for d in differences if d.quantity is quantity))


def _cell(number_: Number) -> Cell:
    tip = "; ".join(f"seed {seed}: {found.value:.6g}" for seed, found in number_.values)
    if number_.interval is None:
        total = len(number_.values) + number_.missing
        return Cell("–", f"{len(number_.values)} of {total} runs have it", _anchor(number_), tip)
    detail = bounds(number_.interval)
    return Cell(number(number_.interval.mean), detail, _anchor(number_), tip)


def _anchor(number_: Number) -> str:
    key = "".join(letter if letter.isalnum() else "-" for letter in f"{number_.arm.name}-{number_.quantity.key}")
    return f"source-{key}"


def _option(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | dict) else str(value)


def difference_text(difference: Difference) -> str:
    """A difference with its interval.

    Args:
        difference: Any.
    """
    span = bounds(difference.interval)
    return signed(difference.interval.mean) + (f" ({span})" if span else "")
