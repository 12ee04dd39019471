"""Penalty for text that says the same again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lit_rlhf.errors import ConfigurationError, check_choice, check_number
from lit_rlhf.rewards.messages import completion_text


class RepetitionPenalty:
    r"""A negative number that grows with the share of n-grams that occurred before in the same completion.

    .. math:: R(y) = -p \left(1 - \frac{\text{distinct n-grams}}{\text{n-grams}}\right)

    Source of the form: arXiv 2502.03373, section 4. A completion shorter than one n-gram has 0.

    Args:
        ngram: Words (or tokens) of one n-gram. Short ones repeat in any long text; 20 to 40 punish loops alone.
        penalty: ``p``, what a text that only repeats comes close to.
        unit: ``words`` between white space, without regard to case, or ``tokens`` as they were sampled.

    Raises:
        ConfigurationError: An argument is out of range.

    >>> RepetitionPenalty(ngram=2)(completions=["one two three four", "so so so so so"])
    [0.0, -0.75]
    """

    def __init__(self, ngram: int = 20, penalty: float = 1.0, unit: Literal["words", "tokens"] = "words") -> None:
        check_number("RepetitionPenalty: ngram", ngram, minimum=1)
        check_number("RepetitionPenalty: penalty", penalty, above=0)
        check_choice("RepetitionPenalty: unit", unit, ("words", "tokens"))
        self.ngram = ngram
        self.penalty = float(penalty)
        self.unit = unit

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]] | None = None, **_: Any
    ) -> list[float | None]:
        """Score N completions."""
        if self.unit == "tokens" and completion_ids is None:
            raise ConfigurationError("RepetitionPenalty counts tokens: it needs completion_ids.")
        rows: Sequence[Sequence[Any]] = completion_ids or []
        if self.unit == "words":
            rows = [completion_text(completion).casefold().split() for completion in completions]
        return [0.0 - self.penalty * self._repeated(row) for row in rows]

    def _repeated(self, items: Sequence[Any]) -> float:
        total = len(items) - self.ngram + 1
        if total < 1:
            return 0.0
        # Numbers instead of words, so that long n-grams of long words cost little.
        number = {item: place for place, item in enumerate(dict.fromkeys(items))}
        row = [number[item] for item in items]
        return 1.0 - len({tuple(row[at : at + self.ngram]) for at in range(total)}) / total
