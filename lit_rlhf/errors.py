"""Errors that speak to the user: one message that says what was given, where, and what is allowed.

``lit-rlhf`` prints them without a traceback; in a script they are ordinary exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class LitRLHFError(Exception):
    """Base class of every error that this library raises on purpose."""


class ConfigurationError(LitRLHFError, ValueError):
    """Options that are out of range or contradict each other. Raised before any model is loaded where possible."""


class UsageError(ConfigurationError):
    """A command line or a recipe that cannot be read. ``lit-rlhf`` exits with 2 instead of 1."""


class DataError(LitRLHFError, ValueError):
    """A file, a row or a column that cannot be used. The message names the file and the row."""


class RewardError(LitRLHFError, RuntimeError):
    """A reward function that raised or broke its contract. The message names the function and the row."""


class EngineError(LitRLHFError, RuntimeError):
    """A rollout engine that refuses what it is asked, or whose completions are not the policy's."""


class EngineLostError(EngineError):
    """A rollout engine that is gone and was not waited for any longer. The run can go on from its checkpoint."""


class CheckpointError(ConfigurationError):
    """A checkpoint that cannot be read, or that belongs to another run. Nothing was changed."""


class OutputError(LitRLHFError, OSError):
    """A file or folder that cannot be written. The message names it; what stood there before is untouched."""


class DivergedError(LitRLHFError, RuntimeError):
    """The policy's weights or log-probs are no longer finite."""


def reason_of(error: BaseException) -> str:
    """What another library's exception says, in a line of at most 200 characters; its type where it says nothing.

    Args:
        error: Any.

    >>> reason_of(ValueError("no  such thing")), reason_of(EOFError())
    ('no such thing', 'EOFError')
    """
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_number(
    name: str,
    value: float | None,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse an option that is no finite number in its range; ``None`` passes.

    Args:
        name: Of the option.
        value: Given.
        minimum: Smallest allowed value.
        above: The value must be larger than this.
        maximum: Largest allowed value.
        below: The value must be smaller than this.

    Raises:
        ConfigurationError: Naming the option, the value and the range.

    >>> check_number("gamma", 1.5, minimum=0, maximum=1)
    Traceback (most recent call last):
    lit_rlhf.errors.ConfigurationError: gamma must be a number in [0, 1], got 1.5
    """
    if value is None:
        return
    fine = (
        math.isfinite(value)
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
        and (below is None or value < below)
    )
    if not fine:
        low = f"[{minimum:g}" if minimum is not None else f"({above:g}" if above is not None else "(-inf"
        high = f"{maximum:g}]" if maximum is not None else f"{below:g})" if below is not None else "inf)"
        raise ConfigurationError(f"{name} must be a number in {low}, {high}, got {value}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse an option that is none of the allowed words.

    Args:
        name: Of the option.
        value: Given.
        allowed: Words.

    Raises:
        ConfigurationError: Naming the option, the value and the allowed words.

    >>> check_choice("baseline", "mode", ("mean", "median"))
    Traceback (most recent call last):
    lit_rlhf.errors.ConfigurationError: baseline must be one of mean, median, got 'mode'
    """
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
