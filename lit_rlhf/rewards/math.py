"""Reward for a right final answer, compared by value."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards.comparison import equal
from lit_rlhf.rewards.extraction import extract_answer, last_box
from lit_rlhf.rewards.isolation import WorkerPool, WorkerStartError
from lit_rlhf.rewards.messages import column_values, completion_text, required_column
from lit_rlhf.rewards.parallel import map_in_threads
from lit_rlhf.rewards.reading import Reading, read
from lit_rlhf.rewards.symbolic import formulas_equal, warm_up

_LOG = logging.getLogger(__name__)
_MEMORY_BYTES = 2 << 30
_MAX_WORDS = 2  # a gold of more words is not a short answer but a remark, such as "see the figure"


class _NeedsAlgebraError(Exception):
    """Exact arithmetic does not decide: a formula has to be read by the algebra system."""


def _undecided(gold: str, answer: str) -> bool:
    raise _NeedsAlgebraError


@lru_cache(maxsize=1)
def _pool() -> WorkerPool:
    # One for the process, whatever the number of rewards: workers cost about 100 MB each.
    return WorkerPool(max(1, min(4, os.cpu_count() or 1)), warm_up, _MEMORY_BYTES)


class MathAnswer:
    r"""1 where the final answer of a completion has the value of the reference, else 0.

    The answer is looked for in this order, in the whole completion: what the last ``\boxed`` holds, else what follows
    the last ``####``, else the content of the last ``<answer>...</answer>``, else what follows the last "answer is" or
    "answer:", else the last number. What is inside ``<think>...</think>`` is draft; a think block that is never closed
    means that there is no answer. Numbers are compared exactly as fractions, without rounding (0.67 is not 2/3) and
    without tolerance; formulas by math-verify, in a separate process with a limit of time and memory.

    Units, currency and thousands commas are formatting: a unit may be left out on either side, but two different
    units of measure are two answers. ``25%`` is 0.25; where the figure is larger than 1, it is also accepted for
    25, and 25 for ``25%``. Sets and bare lists have no order; pairs, intervals and vectors have one, and their
    brackets count. ``x = 5`` says 5. Words are compared without regard to case.

    Args:
        answer_column: Dataset column of the reference, or a dotted path into one (``reward_model.ground_truth``). A
            value may be a number, text, LaTeX with or without ``$``, a solution that ends in ``#### 72``, or one that
            holds ``\boxed{72}``.
        timeout_seconds: Wall-clock limit for the comparison of one row, in seconds. A row that exceeds it is wrong.
        correct: Reward of a right answer.
        wrong: Reward of a wrong answer, or of none.

    Raises:
        ConfigurationError: An argument is out of range.

    >>> MathAnswer()(completions=["#### 18.00", r"So \boxed{\frac12}."], answer=["18", 0.25])
    [1.0, 0.0]
    """

    def __init__(
        self,
        answer_column: str = "answer",
        timeout_seconds: float = 5.0,
        correct: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        if not answer_column:
            raise ConfigurationError("MathAnswer: answer_column is empty; name the column that holds the reference.")
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ConfigurationError(f"MathAnswer: timeout_seconds must be a positive number, got {timeout_seconds!r}.")
        if not (math.isfinite(correct) and math.isfinite(wrong)):
            raise ConfigurationError(f"MathAnswer: correct and wrong must be finite, got {correct!r} and {wrong!r}.")
        self.answer_column = answer_column
        self.timeout_seconds = float(timeout_seconds)
        self.correct = float(correct)
        self.wrong = float(wrong)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        return (self.answer_column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score completions.

        Args:
            completions: N texts, or N lists of chat messages.
            **columns: Dataset columns, among them ``answer_column`` with N values.

        Returns:
            N rewards; ``None`` (no opinion) where the reference is missing.

        Raises:
            RewardError: There is no such column, or its length is not N.
        """
        golds = required_column("MathAnswer", columns, self.answer_column, len(completions))
        rewards: list[float | None] = []
        undecided: list[tuple[int, Reading, Reading]] = []
        for row, (completion, value) in enumerate(zip(completions, golds, strict=True)):
            gold = read_gold(value)
            if gold is None:
                rewards.append(None)
                continue
            answer = read_answer(completion_text(completion))
            try:
                rewards.append(self._reward(equal(gold, answer, _undecided)))
            except _NeedsAlgebraError:
                rewards.append(self.wrong)
                undecided.append((row, gold, answer))
        for (row, _, _), right in zip(undecided, self._compare_slowly(undecided), strict=True):
            rewards[row] = self._reward(right)
        return rewards

    def check_columns(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Report references that cannot be used, one message per row; empty where all are fine.

        Rows with a missing reference are not scored; rows with an unreadable one score only on the very same text.
        Nothing is evaluated, so that this is quick for a large file.

        Args:
            columns: Dataset columns by name.
        """
        try:
            golds = column_values(columns, self.answer_column)
        except KeyError:
            return [f"no column {self.answer_column!r}; columns: {', '.join(sorted(columns)) or 'none'}"]
        messages = []
        for row, value in enumerate(golds):
            gold = read_gold(value)
            if gold is None:
                messages.append(f"{self.answer_column} of row {row} is missing")
            elif not _is_answer(gold):
                shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
                messages.append(f"{self.answer_column} of row {row} cannot be read as an answer: {shown!r}")
        return messages

    def extracted(self, completion: Any, **_: Any) -> str | None:
        """The answer as it was found, for a look at it; ``None`` where there is none."""
        found = extract_answer(completion_text(completion))
        return None if found is None else found.text

    def answer_key(self, completion: Any, **_: Any) -> str | None:
        r"""What a majority vote counts: the value of a number, else the spelling; ``None`` where there is no answer.

        >>> MathAnswer().answer_key(r"\boxed{18.00}"), MathAnswer().answer_key("so it is 36/2")
        ('18', '18')
        """
        answer = read_answer(completion_text(completion))
        if answer.value is not None:
            return str(answer.value)
        return answer.text or None

    def _reward(self, right: bool) -> float:
        return self.correct if right else self.wrong

    def _compare_slowly(self, rows: list[tuple[int, Reading, Reading]]) -> list[bool]:
        """Decide rows in worker processes, side by side, so that the limits of slow rows do not add up."""
        if not rows:
            return []
        return map_in_threads(
            self._compare_one, [(gold, answer) for _, gold, answer in rows], len(_pool().workers), "math answers"
        )

    def _compare_one(self, pair: tuple[Reading, Reading]) -> bool:
        with _pool().worker() as worker:
            worker.start()
            deadline = time.monotonic() + self.timeout_seconds

            def ask(gold: str, answer: str) -> bool:
                left = max(deadline - time.monotonic(), 1e-3)
                return bool(worker.run(formulas_equal, gold, answer, timeout_seconds=left))

            try:
                return equal(*pair, ask)
            except WorkerStartError:
                raise
            except RewardError as error:
                _LOG.debug("An answer could not be compared: %s", error)
                return False


def read_answer(completion: str) -> Reading:
    """Reading of the final answer of a completion; of kind ``nothing`` where there is none."""
    found = extract_answer(completion)
    return Reading("nothing") if found is None else read(found.text, not found.boxed)


def read_gold(value: Any) -> Reading | None:
    r"""Reading of a reference; ``None`` where it is missing (``None``, NaN, empty text).

    >>> read_gold("She sold 48 + 24 clips.\n#### 72").value
    Fraction(72, 1)
    """
    if value is None:
        return None
    if not isinstance(value, str):
        if hasattr(value, "item") and getattr(value, "size", 1) == 1:
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return None
        value = repr(value) if isinstance(value, float) else str(value)
    return _read_gold_text(value)


@lru_cache(maxsize=8192)
def _read_gold_text(text: str) -> Reading | None:
    if not text.strip():
        return None
    box = last_box(text)
    if "####" in text:
        text = text.rpartition("####")[2]
    elif box is not None:
        text = box
    elif len(text) > 40:
        found = re.search(r"\banswer(?: is|:)\s*(.+?)\s*$", text, re.IGNORECASE | re.DOTALL)
        text = found.group(1) if found else text
    gold = read(text.strip())
    return None if gold.kind == "nothing" and not text.strip() else gold


def _is_answer(gold: Reading) -> bool:
    if gold.kind in ("prose", "nothing", "refused"):
        return False
    if gold.kind == "text":
        return len(gold.formula.split()) <= _MAX_WORDS
    if gold.kind == "list":
        return all(_is_answer(item) for item in gold.items)
    formula = gold.formula.replace("\\{", "").replace("\\}", "")
    return formula.count("{") == formula.count("}") and any(c.isalnum() for c in formula)
