"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from lit_rlhf.functional.intervals import Interval

MINUS = "−"
_NOTHING = 1e-6


def number(value: float) -> str:
    """Three significant digits, or all digits before the point; 0 for what is as good as that.

    Args:
        value: Any finite number.

    >>> number(0.97461), number(-12345.6), number(1e-8), number(512.0)
    ('0.975', '−12,346', '0', '512')
    """
    if abs(value) < _NOTHING:
        return "0"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text.replace("-", MINUS)


def signed(value: float) -> str:
    """The same with its sign.

    Args:
        value: Any finite number.

    >>> signed(0.25), signed(-3.0), signed(0.0)
    ('+0.25', '−3', '0')
    """
    return f"+{number(value)}" if value >= _NOTHING else number(value)


def bounds(interval: Interval) -> str:
    """From where to where; empty without bounds, and where all values were the same.

    Args:
        interval: Any.

    >>> bounds(Interval(2.0, -0.5, 4.5, 3))
    '−0.5 to 4.5'
    """
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    return f"{number(interval.low)} to {number(interval.high)}"


def short(value: float) -> str:
    """For the ticks of an axis.

    Args:
        value: Any finite number.

    >>> short(20000), short(2.5e6), short(0.3)
    ('20k', '2.5M', '0.3')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}".replace("-", MINUS)
    return f"{value:.3g}".replace("-", MINUS)


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and".

    Args:
        words: At least one.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    Args:
        count: How many.
        noun: One of them.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}{'s' * (count != 1)}"
