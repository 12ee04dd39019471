"""Reward for the countdown game: reach a number with given numbers, each used once."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lit_rlhf.rewards.extraction import last_tagged, without_thinking
from lit_rlhf.rewards.messages import column_values, completion_text, required_column

_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}
_ALLOWED = re.compile(r"[\d+\-*/() \t\n]+")
_MAX_CHARACTERS = 300


class Countdown:
    """1 where the last ``<answer>`` holds an expression that makes the target out of the given numbers, else 0.

    The expression may have whole numbers, ``+ - * /`` (also as × ÷ or LaTeX) and brackets. It must use each number
    exactly as often as it is given, and be the target exactly: nothing is rounded. An equation (``3+5=8``), a power, a
    number that is not given, a division by zero or a longer text is wrong. Nothing of the completion is evaluated as
    code. What is inside a think block is draft.

    Args:
        target_column: Dataset column of the number to reach.
        numbers_column: Dataset column of the list of given numbers.

    >>> completions = ["<answer>(8 / 1) * 3</answer>", "<answer>8 * 3</answer>"]
    >>> Countdown()(completions=completions, target=[24, 24], nums=[[3, 8, 1], [3, 8, 1]])
    [1.0, 0.0]
    """

    def __init__(self, target_column: str = "target", numbers_column: str = "nums") -> None:
        self.target_column = target_column
        self.numbers_column = numbers_column

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        return (self.target_column, self.numbers_column)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score N completions; ``None`` where the row has no target or no numbers.

        Raises:
            RewardError: A column is missing.
        """
        targets = required_column("Countdown", columns, self.target_column, len(completions))
        numbers = required_column("Countdown", columns, self.numbers_column, len(completions))
        rewards: list[float | None] = []
        for completion, target, given in zip(completions, targets, numbers, strict=True):
            task = _task(target, given)
            rewards.append(None if task is None else float(_solves(self.extracted(completion), *task)))
        return rewards

    def check_columns(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Report rows without a target or numbers, one message per row; empty where all are fine.

        Args:
            columns: Dataset columns by name.
        """
        try:
            targets, numbers = (column_values(columns, name) for name in self.required_columns)
        except KeyError as error:
            return [f"no column {error}; columns: {', '.join(sorted(columns)) or 'none'}"]
        rows = enumerate(zip(targets, numbers, strict=True))
        return [
            f"{self.target_column} and {self.numbers_column} of row {row} are no task: {target!r} and {given!r}"
            for row, (target, given) in rows
            if _task(target, given) is None
        ]

    def extracted(self, completion: Any, **_: Any) -> str | None:
        """The expression that is judged; ``None`` where there is none."""
        return last_tagged(without_thinking(completion_text(completion)) or "")


def _task(target: Any, given: Any) -> tuple[Fraction, list[int]] | None:
    """Target and numbers, sorted; ``None`` where a row has no usable ones."""
    try:
        numbers = sorted(int(str(number)) for number in given)
        return (Fraction(str(target)), numbers) if numbers else None
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def _solves(expression: str | None, target: Fraction, given: list[int]) -> bool:
    if expression is None or len(expression) > _MAX_CHARACTERS:
        return False
    for spelling, sign in _SPELLINGS.items():
        expression = expression.replace(spelling, sign)
    if not _ALLOWED.fullmatch(expression) or not expression.isascii():
        return False
    used: list[int] = []
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
        return _value(tree.body, used) == target and sorted(used) == given
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Exact value of an expression; the numbers in it are added to ``used``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError("neither a number nor one of + - * /")
