"""A quantity that is measured of each run."""

from __future__ import annotations

from dataclasses import dataclass

from lit_rlhf.report.finders import Finder

Range = tuple[float | None, float | None]
ANY: Range = (None, None)
POSITIVE: Range = (0.0, None)
SHARE: Range = (0.0, 1.0)

SECTIONS = {
    "held-out": "Held-out prompts",
    "training": "Policy at the end of training",
    "groups": "Groups",
    "critic": "Critic",
    "cost": "Cost in tokens",
    "time": "Time and memory",
}
"""Sections of the tables with their titles, in order; all but the last are the same for the same seed."""


@dataclass(frozen=True)
class Quantity:
    """Something that is measured of each run.

    Args:
        key: Name in ``report.json``.
        title: Name in a table.
        find: The number in a run; ``None`` where the run does not have it.
        explanation: How it is come by, in a sentence.
        section: Of the tables it stands in: one of :data:`SECTIONS`.
        unit: What it is counted in, unless the title says it.
        higher_is_better: ``None`` where neither direction is.
        within: Smallest and largest possible value; intervals are cut there.
    """

    key: str
    title: str
    find: Finder
    explanation: str
    section: str
    unit: str = ""
    higher_is_better: bool | None = None
    within: Range = ANY

    @property
    def is_timing(self) -> bool:
        """Whether another run with the same seed gives another number."""
        return self.section == "time"
