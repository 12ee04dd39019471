r"""Exact value of plain arithmetic, in text or LaTeX: ``18.00``, ``\frac34``, ``3.5 \times 10^{6}``, ``2(3+4)``.

Most answers of arithmetic data sets are read here in microseconds, without a computer algebra system.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import isqrt

_MAX_BITS = 100_000  # largest number, in bits (about 30,000 digits)
_MAX_DEPTH = 40  # of brackets
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d*)?|[+-]?\.\d+")
_NUMBER = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\w.]))?")
_SPACE = re.compile(r"\s*")
_TIMES = ("*", "\\cdot", "\\times", "×", "·")
_DIVIDE = ("/", "\\div", "÷")


class TooLargeError(ArithmeticError):
    """The value would need more than about 30,000 digits."""


class _NotArithmeticError(ValueError):
    """The text holds something other than rational arithmetic."""


def evaluate(text: str) -> Fraction | None:
    r"""Exact value of ``text``, or ``None`` where it is not rational arithmetic (a variable, a surd, a word).

    A whole number in front of a proper fraction is a mixed number: ``3\frac{1}{2}`` is 7/2.

    Raises:
        TooLargeError: The text is arithmetic, but its value has more than about 30,000 digits.

    >>> evaluate("18.00"), evaluate(r"\frac34"), evaluate("3.5 \\times 10^{6}")
    (Fraction(18, 1), Fraction(3, 4), Fraction(3500000, 1))
    >>> evaluate("2x") is None
    True
    """
    text = text.strip()
    if _PLAIN.fullmatch(text) and len(text) < 4000:
        return Fraction(text.rstrip("."))
    try:
        parser = _Parser(text)
        value = parser.sum()
        if parser.at_end():
            return value
    except (_NotArithmeticError, ZeroDivisionError):
        pass
    return None


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """``base ** exponent`` for a whole exponent.

    Raises:
        TooLargeError: See :func:`evaluate`.
    """
    if exponent.denominator != 1:
        raise _NotArithmeticError
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and size * abs(exponent.numerator) > _MAX_BITS:
        raise TooLargeError
    if size <= 1:  # 0, 1 or -1: the size of the exponent does not matter
        if base == 0:
            if exponent <= 0:
                raise _NotArithmeticError
            return base
        return base if exponent.numerator % 2 else Fraction(1)
    return base**exponent.numerator


class _Parser:
    r"""Recursive descent over the characters, so that the digits of ``\frac34`` can be taken one by one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def at_end(self) -> bool:
        self._skip()
        return self.at == len(self.text)

    def _skip(self) -> None:
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]

    def _take(self, *tokens: str) -> str | None:
        self._skip()
        for token in tokens:
            if self.text.startswith(token, self.at):
                after = self.at + len(token)
                # a command ends where its letters end: \div is not the beginning of \divides
                if token[0] == "\\" and token[-1].isalpha() and self.text[after : after + 1].isalpha():
                    continue
                self.at = after
                return token
        return None

    def _need(self, token: str) -> None:
        if self._take(token) is None:
            raise _NotArithmeticError

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _NotArithmeticError
        negative = self._take("+", "-") == "-"
        value = self._product()
        value = -value if negative else value
        while sign := self._take("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        self.depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take(*_TIMES):
                value *= self._signed()
            elif self._take(*_DIVIDE):
                value /= self._signed()
            elif self._next_is("(", "\\frac", "\\sqrt"):
                value *= self._factor()
            else:
                return value
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
                raise TooLargeError

    def _signed(self) -> Fraction:
        sign = self._take("-", "+")
        value = self._factor()
        return -value if sign == "-" else value

    def _next_is(self, *tokens: str) -> bool:
        self._skip()
        return self.text.startswith(tokens, self.at)

    def _factor(self) -> Fraction:
        start = self.at
        value = self._atom()
        whole = self.text[start : self.at].strip().isdecimal()
        if whole and self._next_is("\\frac"):
            at = self.at
            part = self._atom()
            if 0 < part < 1 and not self._next_is("^"):
                return value + part
            self.at = at
        if self._take("^", "**"):
            sign = self._take("-", "+")
            exponent = self._factor()  # right-associative: 2^3^2 is 2^9
            value = power(value, -exponent if sign == "-" else exponent)
        return value

    def _atom(self) -> Fraction:
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._take(opening):
                value = self.sum()
                self._need(closing)
                return value
        if self._take("\\frac"):
            numerator = self._argument()
            return numerator / self._argument()
        if self._take("\\sqrt"):
            return _root(self._argument())
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise _NotArithmeticError
        self.at = match.end()
        return _number(match.group())

    def _argument(self) -> Fraction:
        r"""What follows ``\frac`` or ``\sqrt``: a group in braces, or one digit."""
        if self._next_is("{"):
            return self._atom()
        digit = self.text[self.at : self.at + 1]
        if not digit.isdecimal():
            raise _NotArithmeticError
        self.at += 1
        return Fraction(int(digit))


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > 4000:
        raise _NotArithmeticError
    value = Fraction(mantissa.rstrip("."))
    if not exponent:
        return value
    if len(exponent) > 6:
        raise TooLargeError
    return value * power(Fraction(10), Fraction(int(exponent)))


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise _NotArithmeticError
    numerator, denominator = isqrt(value.numerator), isqrt(value.denominator)
    if numerator**2 != value.numerator or denominator**2 != value.denominator:
        raise _NotArithmeticError
    return Fraction(numerator, denominator)
