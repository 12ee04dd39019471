"""Numbers over seeds, and what differs between arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lit_rlhf.functional.intervals import Interval, mean_interval, paired_interval, welch_interval
from lit_rlhf.report.comparison import Arm, Comparison
from lit_rlhf.report.finders import Found
from lit_rlhf.report.quantity import Quantity

CONFIDENCE = 0.95
_ALL_PAIRS = 3  # arms up to which every one is compared with every other


@dataclass(frozen=True)
class Number:
    """A quantity of an arm.

    Args:
        quantity: What.
        arm: Of which.
        values: Seed and number of each run that has one.
        missing: Runs that have none, such as one that never reached the target.
        interval: Mean and interval; ``None`` where runs are missing, as the mean of the others would mislead.
        basis: What the interval is over: ``seeds``, ``prompts``, or nothing.
    """

    quantity: Quantity
    arm: Arm
    values: tuple[tuple[int | None, Found], ...]
    missing: int
    interval: Interval | None
    basis: str


@dataclass(frozen=True)
class Difference:
    """A quantity of one arm less that of another.

    Args:
        quantity: What.
        first: Arm.
        second: The arm that is subtracted.
        interval: Of the difference.
        method: ``paired`` by seed, or ``Welch`` where the arms' seeds differ.
        reference: Mean of the second, for a difference in percent.
        confidence: Of the interval.
    """

    quantity: Quantity
    first: Arm
    second: Arm
    interval: Interval
    method: str
    reference: float
    confidence: float

    @property
    def is_shown(self) -> bool:
        """Whether the runs show that there is a difference: the interval excludes 0."""
        return self.interval.excludes_zero


def numbers(comparison: Comparison, quantities: Sequence[Quantity]) -> list[Number]:
    """Each quantity of each arm that has it.

    Args:
        comparison: With its runs.
        quantities: In the order of the table.
    """
    found = (_number(quantity, arm) for quantity in quantities for arm in comparison.arms)
    return [number for number in found if number.values]


def differences(numbers: Sequence[Number], arms: Sequence[Arm]) -> list[Difference]:
    """Every pair of up to three arms; of more, each against the first.

    All intervals of a quantity together cover the true differences with :data:`CONFIDENCE`: each is made wider by
    Bonferroni's correction.

    Args:
        numbers: Of finished runs only; others are left out.
        arms: In their order.
    """
    finished = [arm for arm in arms if arm.counted and not arm.is_unfinished]
    pairs = list(combinations(finished, 2))
    if len(finished) > _ALL_PAIRS:
        pairs = [(finished[0], arm) for arm in finished[1:]]
    if not pairs:
        return []
    confidence = 1 - (1 - CONFIDENCE) / len(pairs)
    by_place = {(number.quantity.key, number.arm.name): number for number in numbers if number.interval is not None}
    keys = dict.fromkeys(number.quantity.key for number in numbers)
    found = []
    for key in keys:
        for reference, arm in pairs:
            first, second = by_place.get((key, arm.name)), by_place.get((key, reference.name))
            if first is not None and second is not None:
                found.append(_difference(first, second, confidence))
    return found


def _number(quantity: Quantity, arm: Arm) -> Number:
    found = [(run.seed, quantity.find(run.run)) for run in arm.counted if run.run is not None]
    values = tuple((seed, value) for seed, value in found if value is not None)
    missing = len(found) - len(values)
    if not values or missing:
        return Number(quantity, arm, values, missing, None, "")
    interval = _cut(_without_luck(mean_interval([value.value for _, value in values], CONFIDENCE)), quantity)
    first = values[0][1]
    if interval.size == 1 and first.low is not None and first.high is not None:
        return Number(quantity, arm, values, 0, interval._replace(low=first.low, high=first.high), "prompts")
    return Number(quantity, arm, values, 0, interval, "seeds" if interval.low is not None else "")


def _without_luck(interval: Interval) -> Interval:
    """No bounds where two values are the same: shares of a few hundred prompts are, now and then, by chance."""
    if interval.size == 2 and interval.low == interval.high:
        return interval._replace(low=None, high=None)
    return interval


def _cut(interval: Interval, quantity: Quantity) -> Interval:
    """The bounds without what is impossible; that takes nothing from their coverage."""
    if interval.low is None or interval.high is None:
        return interval
    lowest, highest = quantity.within
    low = interval.low if lowest is None else max(interval.low, lowest)
    return interval._replace(low=low, high=interval.high if highest is None else min(interval.high, highest))


def _difference(first: Number, second: Number, confidence: float) -> Difference:
    ours, theirs = ({seed: found.value for seed, found in number.values} for number in (first, second))
    is_paired = None not in ours and ours.keys() == theirs.keys() and len(ours) == len(first.values)
    a, b = ([ours[seed] for seed in ours], [theirs[seed] for seed in (ours if is_paired else theirs)])
    interval = _without_luck((paired_interval if is_paired else welch_interval)(a, b, confidence))
    assert second.interval is not None
    method = "paired" if is_paired else "Welch"
    return Difference(first.quantity, first.arm, second.arm, interval, method, second.interval.mean, confidence)
