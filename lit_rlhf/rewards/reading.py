"""Read an answer: a number, a formula, a list, a word. :mod:`lit_rlhf.rewards.comparison` compares two readings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from lit_rlhf.rewards.arithmetic import TooLargeError, evaluate
from lit_rlhf.rewards.cleaning import clean
from lit_rlhf.rewards.extraction import math_in, numbers_in
from lit_rlhf.rewards.units import split_unit

MAX_CHARACTERS = 1_000  # longer is not an answer
_MAX_DEPTH = 30  # of nested brackets

_PLAIN = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?(?![\d,])")
_ALL_THOUSANDS = re.compile(r"[^,]*?(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])[^,]*")
_JOIN = re.compile(r"\s*(?:[,;]\s*(?:and|or)\s|[,;]|(?<=[\s\d})])(?:and|or)(?=[\s\d\\$-]))\s*")
_NAME = re.compile(r"(?:[A-Za-z][A-Za-z' ]*|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\s*\([\w, -]*\))?\s*")
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z])")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "log", "exp", "mod", "gcd", "lcm", "max", "min", "det", "sqrt", "frac"})
_REMARK = re.compile(r"\([^()]*[A-Za-z]{3,}[^()]*\)|\([^()]*=[^()]*\)")
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z])")
_BASED = re.compile(r"-?[0-9A-Fa-f]+\s*_\s*(?:\d+|\{\s*\d+\s*\})")  # a numeral of another base is compared as text
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")

Kind = Literal["number", "formula", "list", "text", "prose", "refused", "nothing"]


@dataclass(frozen=True)
class Reading:
    """What an answer says.

    Attributes:
        kind: ``number``, ``formula`` (for the algebra system), ``list`` (several items, with or without brackets),
            ``text`` (words), ``prose`` (words around numbers: no single value), ``refused`` (too long, too deep or
            too large to be evaluated) or ``nothing``.
        text: One spelling of the whole answer, without spaces and case; equal texts are equal answers.
        formula: LaTeX of a number or formula, without unit and name.
        value: Exact value of a number.
        percent: The value was written with a percent sign; ``value`` is already divided by 100.
        unit: Unit in one spelling, empty where there is none.
        name: Name on the left of an equals sign, empty where there is none.
        items: Items of a list.
        brackets: The two brackets of a list, empty for a bare list.
    """

    kind: Kind
    text: str = ""
    formula: str = ""
    value: Fraction | None = None
    percent: bool = False
    unit: str = ""
    name: str = ""
    items: tuple[Reading, ...] = ()
    brackets: str = ""


@lru_cache(maxsize=8192)
def read(text: str, lenient: bool = False) -> Reading:
    r"""Read an answer that stands alone.

    Args:
        text: The answer as it was written.
        lenient: Take the number out of a sentence ("that she has 9 apples"): the value after its last equals sign,
            else the number it begins with, else its last number.

    >>> read(r"5\text{ cm}").value, read(r"5\text{ cm}").unit
    (Fraction(5, 1), 'centimeter')
    >>> read("[2, 5)").brackets, read("Tuesday").kind, read("").kind
    ('[)', 'text', 'nothing')
    """
    if len(text) > MAX_CHARACTERS:
        return Reading("refused")
    if _PLAIN.fullmatch(text):
        return Reading("number", text, text, Fraction(text))
    cleaned = clean(text.rstrip("! \n") if lenient else text)  # 5! in a box is a factorial, in a sentence it is not
    if not cleaned:
        return Reading("nothing")
    if _depth(cleaned) > _MAX_DEPTH:
        return Reading("refused", canonical(cleaned))
    found = _read(cleaned)
    if lenient and found.kind == "prose":
        return _from_prose(cleaned) or found
    return found


def canonical(text: str) -> str:
    """Spelling without case, spaces and ``*`` marks: equal only where the same was written."""
    return re.sub(r"\s+|\*\*", "", text).casefold()


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _read(text: str) -> Reading:
    text = text.strip()
    member = _MEMBER.match(text)
    if member:
        text = text[member.end() :]
    spelled = canonical(text)
    number = _number(text)
    if number is not None:
        return number
    if _BASED.fullmatch(text):
        return Reading("text", re.sub(r"[{}]", "", spelled), text)
    items = _items(text)
    if items is not None:
        return Reading("list", spelled, text, items=items[1], brackets=items[0])
    name, body = _split_equation(text)
    if body != text:
        found = _read(body)
        if found.kind in ("number", "list", "formula", "text"):
            return _with(found, name=found.name or name)
    if _PLUS_MINUS.search(text) and len(_PLUS_MINUS.findall(text)) == 1:
        both = tuple(_read(_PLUS_MINUS.sub(sign, text).strip().removeprefix("+")) for sign in ("+", "-"))
        return Reading("list", spelled, text, items=both)
    words = "\\begin" not in text and [word for word in _WORD.findall(text) if word.lower() not in _FUNCTIONS]
    if not re.search(r"[\d\\^_=<>+*/|]", text):
        letters = re.sub(r"[^\w\s'-]", " ", text).split()
        one_letter = len(letters) == 1 and len(letters[0]) == 1
        if letters and all(re.search(r"\w", word) for word in letters) and "-" not in (letters[0][0], letters[-1][-1]):
            spelled = "".join(letters).casefold()
            return Reading("formula" if one_letter else "text", spelled, " ".join(letters))
    if words:
        return Reading("prose", spelled, text)
    head, unit = split_unit(text)
    return Reading("formula", spelled, head, unit=unit)


def _with(reading: Reading, name: str) -> Reading:
    return Reading(**{**reading.__dict__, "name": name})


def _number(text: str) -> Reading | None:
    """The number that ``text`` is, with currency, unit and percent sign taken off."""
    head, unit = split_unit(text)
    percent = unit == "%"
    digits = _THOUSANDS.sub(lambda m: m.group().replace(",", "").replace(" ", ""), head)
    if "," in digits:
        return None
    scale = Fraction(1)
    if unit.startswith("10^"):
        power, _, unit = unit.partition(" ")
        scale = Fraction(10) ** int(power[3:])
    mixed = re.fullmatch(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)", digits.strip())
    if mixed:
        sign, whole, above, below = mixed.groups()
        digits = f"{sign}({whole}+{above}/{below})"
    try:
        value = evaluate(digits)
    except TooLargeError:
        return Reading("refused", canonical(text))
    if value is None:
        return None
    value = value / 100 if percent else value * scale
    return Reading("number", canonical(text), digits, value, percent, "" if percent else unit)


def _items(text: str) -> tuple[str, tuple[Reading, ...]] | None:
    """Brackets and items of a list, ``None`` where ``text`` is not one."""
    brackets, inside = "", text
    bare = text.replace("\\{", "{").replace("\\}", "}")
    if len(bare) >= 2 and bare[0] in "([{" and bare[-1] in ")]}" and _encloses(bare):
        brackets, inside = bare[0] + bare[-1], bare[1:-1]
        if brackets == "{}" and not text.startswith("\\{") and "," not in inside:
            return None  # braces of LaTeX, not of a set
    parts = _split(inside)
    if len(parts) < 2:
        if brackets == "{}" and parts and parts[0].strip():
            only = _read(parts[0])
            return ("{}", (only,)) if only.kind in ("number", "formula", "list") else None
        return None
    readings = tuple(_read(part) if part.strip() else Reading("nothing") for part in parts)
    if any(reading.kind in ("prose", "nothing", "refused") for reading in readings):
        return None
    if not brackets and len(readings) > 1 and all(reading.kind == "text" for reading in readings):
        return ("", readings) if all(len(reading.formula.split()) <= 2 for reading in readings) else None
    return brackets, readings


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last one, whatever its kind: ``[2,5)`` but not ``(1)+(2)``."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and at < len(text) - 1:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """Parts between the commas, semicolons and the words "and", "or" that stand outside brackets."""
    if _ALL_THOUSANDS.fullmatch(text):
        return [text]
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        character = text[at]
        depth += (character in "([{") - (character in ")]}")
        match = _JOIN.match(text, at) if depth == 0 and character in " ,;ao" else None
        if match and match.end() > at and match.group().strip():
            parts.append(text[start:at])
            at = start = match.end()
            continue
        at += 1
    return [*parts, text[start:]]


def _split_equation(text: str) -> tuple[str, str]:
    """Name and right side of ``x = 5``; of a chain ``9 * 2 = 18`` the last part; the text itself otherwise."""
    cuts = list(_EQUALS.finditer(text))
    if not cuts or "<" in text or ">" in text or "\\le" in text.replace("\\left", "") or "\\ge" in text:
        return "", text
    left, right = text[: cuts[0].start()].strip(), text[cuts[-1].end() :].strip()
    if _NAME.fullmatch(left) or (not left and right):
        return left, right
    if len(cuts) == 1 and re.fullmatch(r"[A-Za-z]", right):
        return right, left  # 5 = x
    middle = text[: cuts[-1].start()]
    if right and not re.search(r"\d", re.sub(r"_\{?\w+\}?|\([\w, -]*\)", "", middle)):
        return left, right  # a + b = 5 states a value; 2x = 10 is an equation that is still to be solved
    if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", middle)) and right:
        return "", right
    return "", text


def _from_prose(text: str) -> Reading | None:
    segments = math_in(text)
    if segments:
        found = _read(clean(segments[-1]))
        if found.kind in ("number", "formula", "list"):
            return found
    rest = _REMARK.sub(" ", text)
    cuts = list(_EQUALS.finditer(rest))
    if cuts:
        rest = rest[cuts[-1].end() :]
    found = _read(clean(rest)) if rest.strip() else Reading("nothing")
    if found.kind in ("number", "list") or (cuts and found.kind == "formula"):
        return found
    numbers = numbers_in(rest)
    if not numbers:
        return None
    first = re.match(r"\W{0,3}", rest).end()  # type: ignore[union-attr]
    chosen = numbers[0] if rest[first : first + 1].isdigit() else numbers[-1]
    found = _read(clean(chosen))
    return found if found.kind == "number" else None
