"""Two callbacks that set the same thing: the last one would win, and nobody would know."""

from __future__ import annotations

import itertools

import lightning as L

from lit_rlhf.errors import ConfigurationError


def refuse_clashes(trainer: L.Trainer) -> None:
    """Refuse two callbacks whose ``sets`` overlap; ``a/b`` is a part of ``a``.

    Args:
        trainer: With its callbacks, those that the module brings included.

    Raises:
        ConfigurationError: Naming both and what they set.
    """
    callbacks = [callback for callback in trainer.callbacks if getattr(callback, "sets", ())]  # type: ignore[attr-defined]
    for one, other in itertools.combinations(callbacks, 2):
        for mine, theirs in itertools.product(one.sets, other.sets):
            if mine == theirs or mine.startswith(f"{theirs}/") or theirs.startswith(f"{mine}/"):
                what = max(mine, theirs, key=len)
                raise ConfigurationError(
                    f"{type(one).__name__} and {type(other).__name__} both set the {what}: keep one of them"
                )
