"""What the rules of health remember of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

SOLVED_WINDOW = 5
SOLVED_FROM = 0.75
# What is remembered whatever the rules look at.
_ALWAYS = (("reward/progress", SOLVED_WINDOW), ("value/error", 1))


class RunHistory:
    """The last values of some signals, their first ones, and the range of all rewards.

    Args:
        wanted: Signal and window of each rule.
    """

    def __init__(self, wanted: Iterable[tuple[str, int]]) -> None:
        self.windows: dict[str, int] = {}
        for signal, window in (*_ALWAYS, *wanted):
            self.windows[signal] = max(window, self.windows.get(signal, 1))
        self.series: dict[str, list[float]] = {}
        self.first: dict[str, float] = {}
        self.lowest_reward = float("inf")
        self.highest_reward = -float("inf")

    def see_rewards(self, values: Mapping[str, float]) -> None:
        """Widen the range of rewards seen.

        Args:
            values: Of an iteration, by name of the metric.
        """
        self.lowest_reward = min(self.lowest_reward, values.get("reward/min", self.lowest_reward))
        self.highest_reward = max(self.highest_reward, values.get("reward/max", self.highest_reward))

    def add(self, values: Mapping[str, float]) -> set[str]:
        """Remember the signals that are wanted.

        Args:
            values: Of an iteration, by name.

        Returns:
            Names of those that had a value.
        """
        present = self.windows.keys() & values.keys()
        for name in present:
            value = float(values[name])
            self.first.setdefault(name, value)
            self.series[name] = [*self.series.get(name, []), value][-self.windows[name] :]
        return present

    def median(self, signal: str, window: int, relative: bool = False) -> float | None:
        """Median of a signal's last values, which one iteration out of line does not move.

        Args:
            signal: Its name.
            window: Number of values.
            relative: As a multiple of the first one.

        Returns:
            ``None`` where there are fewer values than ``window``, or the first one is 0.
        """
        values = self.series.get(signal, [])[-window:]
        if len(values) < window:
            return None
        middle = median(values)
        if not relative:
            return middle
        first = self.first[signal]
        return middle / first if first > 0 else None

    @property
    def reward_range(self) -> float:
        """Distance of the highest from the lowest reward seen in the run; 0 while there was only one."""
        return max(0.0, self.highest_reward - self.lowest_reward)

    @property
    def is_solved(self) -> bool:
        """Whether rewards have lately been near the best seen. A reward that never varied solves nothing."""
        progress = self.series.get("reward/progress", [])[-SOLVED_WINDOW:]
        return bool(progress) and median(progress) >= SOLVED_FROM

    def state_dict(self) -> dict[str, Any]:
        """Everything but the wish list."""
        return {
            "series": {name: list(values) for name, values in self.series.items()},
            "first": dict(self.first),
            "rewards": [self.lowest_reward, self.highest_reward],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Args:
            state_dict: Of :meth:`state_dict`.
        """
        self.series = {name: list(values) for name, values in state_dict["series"].items()}
        self.first = dict(state_dict["first"])
        self.lowest_reward, self.highest_reward = state_dict["rewards"]
