"""Learning-rate factors as functions of the optimizer step, and the way from one number to another."""

from __future__ import annotations

import math
from typing import Literal, get_args

Anneal = Literal["linear", "cosine", "geometric"]
ANNEALS: tuple[str, ...] = get_args(Anneal)


def warmup_cosine(step: float, total_steps: float, warmup_steps: float = 0, floor: float = 0.0) -> float:
    r"""Factor on the learning rate: a linear rise, then half a cosine from 1 towards ``floor``.

    .. math::
        f(s) = \begin{cases} (s+1)/w & s < w \\
        f_{min} + (1-f_{min})\,\tfrac12\bigl(1+\cos(\pi\,\tfrac{s-w}{S-w})\bigr) & w \le s < S\\
        f_{min} & s \ge S\end{cases}

    The first step already moves (no step at rate 0) and so does the last. Steps may be fractions, where the length of
    a run is counted in something else.

    Args:
        step: ``s``, optimizer steps done before this one, from 0.
        total_steps: ``S``, optimizer steps of the whole run (iterations x passes x steps), at least 1.
        warmup_steps: ``w``, in ``[0, S]``.
        floor: ``f_min`` in ``[0, 1]``.

    >>> [round(warmup_cosine(s, total_steps=6, warmup_steps=2), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps must lie in [0, {total_steps}] (total_steps), got {warmup_steps}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must lie in [0, 1], got {floor}")
    if step < warmup_steps:
        return min((step + 1) / warmup_steps, 1.0)
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def annealed(start: float, end: float, progress: float, shape: Anneal = "linear") -> float:
    r"""The number on the way from ``start`` to ``end``.

    .. math::
        (1-w)\,a + w\,b \quad\text{with } w = p \text{ (linear) or } \tfrac12(1-\cos \pi p) \text{ (cosine)},
        \qquad a^{1-p}\, b^p \text{ (geometric)}

    Args:
        start: ``a``; positive for ``geometric``.
        end: ``b``; positive for ``geometric``.
        progress: ``p``, cut to [0, 1].
        shape: ``linear``, ``cosine`` (slow at both ends) or ``geometric`` (equal factors).

    >>> [round(annealed(0.01, 0.16, p / 4, "geometric"), 3) for p in range(5)]
    [0.01, 0.02, 0.04, 0.08, 0.16]
    """
    if shape not in ANNEALS:
        raise ValueError(f"shape must be one of {', '.join(ANNEALS)}, got {shape!r}")
    p = min(max(progress, 0.0), 1.0)
    if p in (0.0, 1.0):
        return end if p else start
    if shape == "geometric":
        if start <= 0 or end <= 0:
            raise ValueError(f"a geometric way needs positive ends, got {start} and {end}")
        return start ** (1 - p) * end**p
    weight = p if shape == "linear" else 0.5 * (1 - math.cos(math.pi * p))
    return (1 - weight) * start + weight * end
