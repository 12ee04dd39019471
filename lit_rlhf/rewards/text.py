r"""Rewards for the text of a completion: the exact words, a pattern, a think block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards.messages import column_values, completion_text


class ExactMatch:
    r"""1 where the whole completion is the reference, else 0.

    Args:
        answer_column: Dataset column of the reference, or a dotted path into one.
        normalize: Compare without regard to case (Unicode case folding), to white space at both ends and to how long
            a run of white space is. Nothing else is changed.

    >>> ExactMatch()(completions=[" Paris\n", "It is Paris"], answer=["paris", "Paris"])
    [1.0, 0.0]
    """

    def __init__(self, answer_column: str = "answer", normalize: bool = True) -> None:
        if not answer_column:
            raise ConfigurationError("ExactMatch: answer_column is empty; name the column that holds the reference.")
        self.answer_column = answer_column
        self.normalize = normalize

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        return (self.answer_column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score N completions; ``None`` (no opinion) where the reference is missing.

        Raises:
            RewardError: There is no such column, or its length is not N.
        """
        try:
            golds = column_values(columns, self.answer_column)
        except KeyError:
            there = ", ".join(sorted(columns)) or "none"
            raise RewardError(f"ExactMatch: no column {self.answer_column!r}. Columns: {there}.") from None
        if len(golds) != len(completions):
            raise RewardError(
                f"ExactMatch: {len(completions)} completions, but {len(golds)} values in {self.answer_column!r}."
            )
        return [
            None if gold is None else float(self._form(completion_text(completion)) == self._form(str(gold)))
            for completion, gold in zip(completions, golds, strict=True)
        ]

    def _form(self, text: str) -> str:
        return " ".join(text.split()).casefold() if self.normalize else text


class FormatMatch:
    r"""1 where a completion matches a regular expression, else 0.

    Args:
        pattern: Regular expression; ``.`` matches line breaks too.
        full: The pattern must match the whole completion, not only a part of it.

    Raises:
        ConfigurationError: The pattern is not a regular expression.

    >>> FormatMatch(r".*#### -?\d+\s*")(completions=["2 + 2\n#### 4", "It is 4."])
    [1.0, 0.0]
    """

    def __init__(self, pattern: str, full: bool = True) -> None:
        try:
            self._compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(f"FormatMatch: {pattern!r} is not a regular expression: {error}.") from error
        self.pattern = pattern
        self.full = full

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float | None]:
        """Score N completions."""
        match = self._compiled.fullmatch if self.full else self._compiled.search
        return [float(match(completion_text(completion)) is not None) for completion in completions]


class ThinkFormat:
    r"""1 where a completion is one think block with something in it, followed by an answer; else 0.

    Well-formed is ``<think>...</think>`` and then text that is not only white space. Line breaks inside are allowed, a
    second block is not, and nothing but white space may stand in front of it.

    Args:
        opened_in_prompt: The chat template ends the prompt with ``<think>``, so that completions begin inside the
            block: ``First add.</think>\nThe answer is 4.`` is then well-formed.

    >>> ThinkFormat()(completions=["<think>2\n+ 2</think>\n4", "4"])
    [1.0, 0.0]
    """

    def __init__(self, opened_in_prompt: bool = False) -> None:
        self.opened_in_prompt = opened_in_prompt

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float | None]:
        """Score N completions."""
        return [float(self._well_formed(completion_text(completion))) for completion in completions]

    def _well_formed(self, text: str) -> bool:
        if self.opened_in_prompt:
            text = "<think>" + text
        if text.count("<think>") != 1 or text.count("</think>") != 1:
            return False
        before, _, rest = text.partition("<think>")
        inside, closed, after = rest.partition("</think>")
        return bool(closed) and not before.strip() and bool(inside.strip()) and bool(after.strip())
