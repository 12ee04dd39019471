"""Compare two formulas by value with math-verify. Runs in a worker process: it may take arbitrarily long.

math-verify reads the LaTeX; the comparison of numbers is ours, because the library compares with an absolute tolerance
(it holds ``2^{-98}`` equal to ``2^{-99}`` and ``0.333333`` equal to ``1/3``). Nothing heavy is imported by this module
itself, so that the worker process starts quickly.
"""

from __future__ import annotations

from typing import Any

_DIGITS = 60  # working precision of numeric comparison, decimal digits
_AGREE = 40  # digits that must agree, relative to the larger magnitude


def warm_up() -> None:
    """Import the reader and use it once, so that the first real comparison is not charged for it."""
    import logging

    logging.disable(logging.CRITICAL)  # "timeout is disabled": the caller's limit replaces the library's
    formulas_equal("x+1", "1+x")


def formulas_equal(gold: str, answer: str) -> bool:
    r"""Whether two LaTeX formulas have the same value.

    Args:
        gold: The reference, LaTeX without ``$``.
        answer: The answer, LaTeX without ``$``.

    Returns:
        False also where either of the two cannot be read.

    Numbers must agree to 40 significant digits; decimals are read as exact fractions. Expressions must have the same
    variables and a difference that simplifies to 0. Relations, sets and matrices are compared by math-verify.
    """
    import sympy
    from math_verify import verify

    gold_value, answer_value = _parse(gold), _parse(answer)
    if gold_value is None or answer_value is None:
        return False
    if isinstance(gold_value, sympy.Expr) and isinstance(answer_value, sympy.Expr):
        return _expressions_equal(gold_value, answer_value)
    return bool(verify(gold_value, answer_value, float_rounding=15, allow_set_relation_comp=True, timeout_seconds=None))


def _parse(formula: str) -> Any:
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = " ".join(formula.split())
    found = parse(
        f"${text}$",
        [LatexExtractionConfig(), ExprExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not found or not isinstance(found[0], (sympy.Basic, sympy.MatrixBase)):
        return None
    value = found[0]
    # One kind of symbol: the reader marks them real or complex depending on the rest of the formula.
    exchange: dict[Any, Any] = {s: sympy.Symbol(s.name, real=True) for s in value.atoms(sympy.Symbol)}
    exchange.update({f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float) if f.is_finite})
    return value.xreplace(exchange) if exchange else value


def _expressions_equal(gold: Any, answer: Any) -> bool:
    import sympy

    if gold == answer:
        return True
    if gold.free_symbols != answer.free_symbols:
        # x - x + 5 still is 5: only a difference in which the variables cancel can be zero
        gold, answer = sympy.simplify(gold), sympy.simplify(answer)
        if gold.free_symbols != answer.free_symbols:
            return False
    if not gold.free_symbols:
        return _numbers_equal(gold.doit(), answer.doit())
    difference = sympy.simplify(gold.doit() - answer.doit())
    if difference == 0:
        return True
    if not difference.free_symbols:
        return False
    return difference.equals(0) is True


def _numbers_equal(gold: Any, answer: Any) -> bool:
    import sympy

    if gold == answer:
        return True
    left, right = sympy.N(gold, _DIGITS), sympy.N(answer, _DIGITS)
    if not (left.is_number and right.is_number) or not (left.is_finite and right.is_finite):
        return False
    scale = max(abs(left), abs(right))
    return bool(abs(left - right) <= scale * sympy.Float(10, _DIGITS) ** -_AGREE)
