r"""Rewards for the text of a completion: the exact words, a pattern, a think block."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import regex

from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.rewards.messages import completion_text, required_column

_LOG = logging.getLogger(__name__)


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
        golds = required_column("ExactMatch", columns, self.answer_column, len(completions))
        return [
            None if gold is None else float(self._form(completion_text(completion)) == self._form(str(gold)))
            for completion, gold in zip(completions, golds, strict=True)
        ]

    def answer_key(self, completion: Any, **_: Any) -> str:
        """What a majority vote counts: the whole completion, spelled as it is compared."""
        return self._form(completion_text(completion))

    def _form(self, text: str) -> str:
        return " ".join(text.split()).casefold() if self.normalize else text


class FormatMatch:
    r"""1 where a completion matches a regular expression, else 0.

    Args:
        pattern: Regular expression; ``.`` matches line breaks too.
        full: The pattern must match the whole completion, not only a part of it.
        timeout_seconds: Limit of processor time for one completion, in seconds; one that takes longer does not match.
            Patterns with several ``.*`` can take very long on a text made for it.

    Raises:
        ConfigurationError: The pattern is not a regular expression.

    >>> FormatMatch(r".*#### -?\d+\s*")(completions=["2 + 2\n#### 4", "It is 4."])
    [1.0, 0.0]
    """

    def __init__(self, pattern: str, full: bool = True, timeout_seconds: float = 0.5) -> None:
        check_number("FormatMatch: timeout_seconds", timeout_seconds, above=0)
        try:
            self._compiled = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ConfigurationError(f"FormatMatch: {pattern!r} is not a regular expression: {error}.") from error
        self.pattern = pattern
        self.full = full
        self.timeout_seconds = timeout_seconds
        self._warned = False

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float | None]:
        """Score N completions."""
        return [float(self._matches(completion_text(completion))) for completion in completions]

    def _matches(self, text: str) -> bool:
        match = self._compiled.fullmatch if self.full else self._compiled.search
        try:
            return match(text, timeout=self.timeout_seconds, concurrent=True) is not None
        except TimeoutError:
            if not self._warned:
                _LOG.warning(
                    "FormatMatch: the pattern %r took more than %g s on a completion of %d characters, which counts as "
                    "no match; fewer '.*' and '(...)+' make it quicker",
                    self.pattern, self.timeout_seconds, len(text),
                )  # fmt: skip
            self._warned = True
            return False


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
