"""Was the reward gamed? Judged from the curves, and from the alarm where the run had one."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from lit_rlhf.callbacks.overoptimization_monitor import (
    NAME,
    Evaluation,
    best_evaluation,
    describe,
    has_fallen,
    is_overoptimized,
)
from lit_rlhf.report.finders import accuracy_series
from lit_rlhf.report.runs import Run


class Overoptimization(NamedTuple):
    """What happened to a run.

    Args:
        iteration: When it was first seen.
        finding: In words.
        is_over: The held-out metric has recovered since.
    """

    iteration: int
    finding: str
    is_over: bool


def find_overoptimization(run: Run) -> Overoptimization | None:
    """The first time that the reward had risen while the held-out metric had fallen, by the rule of the monitor.

    Args:
        run: With validations; without there is nothing to judge, and without an alarm nothing is found.
    """
    evaluations = evaluations_of(run)
    best = best_evaluation(evaluations) if evaluations else None
    is_over = best is not None and not has_fallen(evaluations[-1], best)
    for alarm in run.alarms:
        if alarm.rule == NAME:
            return Overoptimization(alarm.iteration, alarm.finding, is_over)
    for count in range(1, len(evaluations) + 1):
        seen = evaluations[:count]
        if is_overoptimized(seen):
            finding = describe(best_evaluation(seen), seen[-1], "val/accuracy")
            return Overoptimization(seen[-1].iteration, finding, is_over)
    return None


def evaluations_of(run: Run) -> list[Evaluation]:
    """Each validation with the mean training reward of the iterations since the one before.

    Args:
        run: The validation before training goes with the reward of the first iteration.
    """
    held_out, reward = accuracy_series(run), run.series.get("reward")
    if held_out is None or reward is None:
        return []
    evaluations, done = [], 0
    for step, value in zip(held_out.steps, held_out.values, strict=True):
        until = bisect_left(reward.steps, step + 1)
        rewards = reward.values[done:until] or reward.values[max(until - 1, 0) :][:1]
        evaluations.append(Evaluation(max(until - 1, 0), math.fsum(rewards) / len(rewards), value))
        done = until
    return evaluations
