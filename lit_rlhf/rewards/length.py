"""Rewards for the length of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.rewards.messages import completion_text

Unit = Literal["tokens", "words", "characters"]


class LengthReward:
    """1 for a completion whose length is within bounds, falling in a straight line to 0 outside of them.

    Args:
        minimum: Shortest length with the full reward.
        maximum: Longest length with the full reward; ``None`` for no upper bound.
        margin: Over how much more (or less) the reward falls to 0; 0 lets it fall at once.
        unit: ``tokens`` as they were sampled, the end-of-sequence token included; ``words`` between white space; or
            ``characters``.

    Raises:
        ConfigurationError: The bounds are no interval.

    >>> LengthReward(maximum=4, margin=4, unit="characters")(completions=["four", "sixsix", "much too long"])
    [1.0, 0.5, 0.0]
    """

    def __init__(self, minimum: int = 0, maximum: int | None = None, margin: int = 0, unit: Unit = "tokens") -> None:
        check_number("LengthReward: minimum", minimum, minimum=0)
        check_number("LengthReward: maximum", maximum, minimum=minimum)
        check_number("LengthReward: margin", margin, minimum=0)
        if minimum == 0 and maximum is None:
            raise ConfigurationError(
                "LengthReward: give minimum, maximum or both; every length is within 0 and nothing."
            )
        check_choice("LengthReward: unit", unit, ("tokens", "words", "characters"))
        self.minimum = minimum
        self.maximum = maximum
        self.margin = margin
        self.unit = unit

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]] | None = None, **_: Any
    ) -> list[float | None]:
        """Score N completions."""
        if self.unit == "tokens":
            if completion_ids is None:
                raise ConfigurationError("LengthReward counts tokens: it needs completion_ids.")
            return [self._reward(len(ids)) for ids in completion_ids]
        texts = [completion_text(completion) for completion in completions]
        return [self._reward(len(text.split()) if self.unit == "words" else len(text)) for text in texts]

    def _reward(self, length: int) -> float:
        beyond = max(self.minimum - length, 0 if self.maximum is None else length - self.maximum, 0)
        return max(0.0, 1.0 - beyond / self.margin) if self.margin else float(beyond == 0)


class SoftOverlongPenalty:
    r"""Length penalty of DAPO: 0 up to a length, from there down to -1 at the maximum.

    .. math:: R(y) = \begin{cases} 0 & |y| \le L_{max} - L_{cache} \\
        \frac{(L_{max} - L_{cache}) - |y|}{L_{cache}} & L_{max} - L_{cache} < |y| \le L_{max} \\
        -1 & L_{max} < |y| \end{cases}

    Source: DAPO (arXiv 2503.14476), equation 13. Meant to be added to the task reward with weight 1.

    Args:
        max_length: ``L_max`` in tokens; usually ``max_new_tokens``.
        buffer: ``L_cache`` in tokens: the penalty grows over the last ``buffer`` ones.

    Raises:
        ConfigurationError: ``buffer`` is not between 1 and ``max_length``.

    >>> SoftOverlongPenalty(max_length=20, buffer=8)(completion_ids=[[1] * 12, [1] * 16, [1] * 20, [1] * 30])
    [0.0, -0.5, -1.0, -1.0]
    """

    def __init__(self, max_length: int, buffer: int) -> None:
        check_number("SoftOverlongPenalty: max_length", max_length, minimum=1)
        check_number("SoftOverlongPenalty: buffer", buffer, minimum=1, maximum=max_length)
        self.max_length = max_length
        self.buffer = buffer

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        """Score N completions."""
        free = self.max_length - self.buffer
        return [max(-1.0, min(0.0, (free - len(ids)) / self.buffer)) for ids in completion_ids]
