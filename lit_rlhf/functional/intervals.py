"""Intervals over a few repetitions: what so many seeds can show, and what not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_PANELS = 200  # of Simpson's rule; more change the quantile by less than 1e-9
_HALVINGS = 48
_FAR = 40.0  # standard deviations; nothing lies beyond where there are 100 degrees of freedom


class Interval(NamedTuple):
    """A mean and where the true one lies; ``low`` and ``high`` are ``None`` where there are too few values to say."""

    mean: float
    low: float | None
    high: float | None
    size: int
    """Values, or pairs of values, that it rests on."""

    @property
    def excludes_zero(self) -> bool:
        """Whether all of it lies on one side of 0; never without bounds."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    r"""The mean of independent repetitions with Student's interval :math:`\bar x \pm t_{n-1} s / \sqrt n`.

    Source: Student, *The Probable Error of a Mean*, Biometrika 6 (1908). Exact for normal values; with few seeds it
    is wide, as it should be.

    Args:
        values: At least one.
        confidence: Share of such intervals that cover the true mean.

    Raises:
        ValueError: No values, or a confidence outside (0, 1).

    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., size=3)
    >>> mean_interval([1.0])
    Interval(mean=1.0, low=None, high=None, size=1)
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Interval(mean, None, None, count)
    half = student_quantile(_upper(confidence), count - 1) * math.sqrt(_variance(values, mean) / count)
    return Interval(mean, mean - half, mean + half, count)


def paired_interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of ``first - second``, whose values belong together in pairs.

    What a pair shares, such as the seed that orders the prompts, cancels.

    Args:
        first: One value per pair.
        second: The same.
        confidence: As in :func:`mean_interval`.

    Raises:
        ValueError: Different lengths, or none.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need as many first as second values, got {len(first)} and {len(second)}")
    return mean_interval([a - b for a, b in zip(first, second, strict=True)], confidence)


def welch_interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Interval:
    r"""The interval of the difference of two means whose values do not belong together.

    .. math::
        \bar x - \bar y \pm t_\nu \sqrt{a + b}, \quad a = s_x^2 / n_x,\; b = s_y^2 / n_y, \quad
        \nu = \frac{(a + b)^2}{a^2 / (n_x - 1) + b^2 / (n_y - 1)}

    Source: Welch, *The generalization of Student's problem when several different population variances are involved*,
    Biometrika 34 (1947).

    Args:
        first: Values.
        second: Values.
        confidence: As in :func:`mean_interval`.

    Returns:
        ``size`` is the smaller number of values; no bounds where that is 1.

    Raises:
        ValueError: No values on one side.
    """
    if not first or not second:
        raise ValueError("a difference needs values on both sides")
    means = [math.fsum(values) / len(values) for values in (first, second)]
    difference, count = means[0] - means[1], min(len(first), len(second))
    if count < 2:
        return Interval(difference, None, None, count)
    errors = [_variance(values, mean) / len(values) for values, mean in zip((first, second), means, strict=True)]
    error = sum(errors)
    if error == 0:
        return Interval(difference, difference, difference, count)
    # The equation divided by (a + b)^2, which may be too small to be squared.
    degrees = 1 / sum((part / error) ** 2 / (len(v) - 1) for part, v in zip(errors, (first, second), strict=True))
    half = student_quantile(_upper(confidence), degrees) * math.sqrt(error)
    return Interval(difference, difference - half, difference + half, count)


@lru_cache(maxsize=1024)
def student_quantile(probability: float, degrees: float) -> float:
    r"""The value that Student's :math:`t` with ``degrees`` degrees of freedom stays below with ``probability``.

    With :math:`t = \sqrt\nu \tan\theta` the distribution function is the smooth integral

    .. math::
        F = \tfrac12 + \frac{\Gamma(\frac{\nu+1}{2})}{\sqrt\pi\,\Gamma(\frac\nu2)}
        \int_0^\theta \cos^{\nu-1} u\, du

    which is integrated by Simpson's rule and inverted by bisection.

    Args:
        probability: In (0, 1).
        degrees: At least 1; need not be whole.

    Raises:
        ValueError: Outside of these.

    >>> round(student_quantile(0.975, 2), 4), round(student_quantile(0.975, 1e6), 4)
    (4.3027, 1.96)
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"need 0 < probability < 1 and degrees >= 1, got {probability} and {degrees}")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    # With many degrees of freedom the mass lies near 0: look there, or the panels would miss it.
    low, high = 0.0, math.pi / 2 if degrees < 100 else math.atan(_FAR / math.sqrt(degrees))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if scale * _integral_of_cosine_power(degrees - 1, middle) < probability - 0.5:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _integral_of_cosine_power(power: float, upper: float) -> float:
    width = upper / _PANELS
    inner = (math.cos(place * width) ** power * (4 if place % 2 else 2) for place in range(1, _PANELS))
    return width / 3 * (1.0 + math.fsum(inner) + math.cos(upper) ** power)


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _upper(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    return (1 + confidence) / 2
