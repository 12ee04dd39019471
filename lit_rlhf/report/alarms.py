"""The alarms of all runs, told once each."""

from __future__ import annotations

from dataclasses import dataclass

from lit_rlhf.report.comparison import Arm, Comparison
from lit_rlhf.report.formats import listed
from lit_rlhf.report.runs import RungAlarm


@dataclass(frozen=True)
class AlarmEntry:
    """A rule that rang in runs of an arm.

    Args:
        arm: Of the runs.
        alarm: The first of them.
        when: Where it rang, in words.
    """

    arm: Arm
    alarm: RungAlarm
    when: str


def alarm_entries(comparison: Comparison) -> list[AlarmEntry]:
    """By arm, warnings first, then in the order in which they rang; those of failed runs, too.

    Args:
        comparison: With its runs.
    """
    entries: list[AlarmEntry] = []
    for arm in comparison.arms:
        rung: dict[tuple[str, str], list[tuple[int | None, RungAlarm]]] = {}
        for run in arm.runs:
            for alarm in run.run.alarms if run.run is not None else ():
                rung.setdefault((alarm.level, alarm.rule), []).append((run.seed, alarm))
        for found in sorted(rung.values(), key=lambda found: (found[0][1].level != "warning", found[0][1].iteration)):
            entries.append(AlarmEntry(arm, found[0][1], _when(found, comparison.is_single)))
    return entries


def _when(found: list[tuple[int | None, RungAlarm]], is_single: bool) -> str:
    by_seed: dict[int | None, list[str]] = {}
    for seed, alarm in found:
        by_seed.setdefault(seed, []).append(str(alarm.iteration))
    told = [
        ("" if is_single else f"seed {seed}: ") + f"iteration{'s' * (len(iterations) > 1)} {listed(iterations)}"
        for seed, iterations in by_seed.items()
    ]
    return "; ".join(told)
