"""One rule of health: a signal, a window, a threshold, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lit_rlhf.errors import check_choice, check_number

if TYPE_CHECKING:
    from lit_rlhf.callbacks.health.history import RunHistory

Level = Literal["warning", "info"]
Side = Literal["above", "below"]


@dataclass(frozen=True)
class HealthRule:
    """An alarm that is raised where the median of a signal over the last iterations is beyond a threshold.

    Args:
        name: How alarms, ``silence`` and ``thresholds`` call it.
        signal: Name of a logged metric, or of one of the derived signals
            (:func:`~lit_rlhf.callbacks.health.signals.derived_signals`). A ``val/`` metric counts once per validation.
        when: Whether ``above`` or ``below`` the threshold is unhealthy.
        threshold: Itself still healthy.
        advice: What it means and what to change.
        window: Iterations; before there are as many the rule is silent.
        relative: Judge the median as a multiple of the signal's first value in the run.
        level: ``warning``, or ``info`` for what is worth knowing but no fault.
        info_when_solved: Lower the level to ``info`` while rewards are near the best seen in the run: a solved task
            looks like this, too.
        covered_by: Rules that already say it: while the episode of one of them lasts this one is silent.
        once: Say it once in a run, not once per episode.

    >>> HealthRule("short", "completion/length", "below", 3, "The reward may favour empty answers.", window=5).threshold
    3
    """

    name: str
    signal: str
    when: Side
    threshold: float
    advice: str
    window: int = 1
    relative: bool = False
    level: Level = "warning"
    info_when_solved: bool = False
    covered_by: tuple[str, ...] = ()
    once: bool = False

    def __post_init__(self) -> None:
        check_choice(f"HealthRule {self.name}: when", self.when, get_args(Side))
        check_choice(f"HealthRule {self.name}: level", self.level, get_args(Level))
        check_number(f"HealthRule {self.name}: window", self.window, minimum=1)
        check_number(f"HealthRule {self.name}: threshold", self.threshold)

    def figure(self, history: RunHistory) -> float | None:
        """The number that is compared with the threshold; ``None`` where there is none yet.

        Args:
            history: Of the run, the current iteration included.
        """
        return history.median(self.signal, self.window, relative=self.relative)

    def is_unhealthy(self, figure: float) -> bool:
        """Whether the figure is beyond the threshold; one that is not a number is.

        Args:
            figure: Of :meth:`figure`.
        """
        healthy = figure <= self.threshold if self.when == "above" else figure >= self.threshold
        return not healthy
