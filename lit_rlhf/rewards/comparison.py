"""Compare two readings of answers by value."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from lit_rlhf.rewards.arithmetic import TooLargeError, evaluate
from lit_rlhf.rewards.reading import Reading, canonical
from lit_rlhf.rewards.units import is_measure

FormulasEqual = Callable[[str, str], bool]
_MAX_ITEMS = 50
_MAX_EXPONENT = 4096
_SINGLE_NAME = re.compile(r"[A-Za-z]|\\[A-Za-z]+")


def equal(gold: Reading, answer: Reading, formulas_equal: FormulasEqual) -> bool:
    r"""Whether an answer says the same as the reference.

    Args:
        gold: The reference.
        answer: The answer.
        formulas_equal: Decides about two LaTeX formulas; only called where exact arithmetic does not decide.

    Conventions: a unit may be left out on either side, two units of measure must agree; ``25%`` is 0.25, and is also
    accepted for 25 (and the reverse), as a unit that may be left out, where the figure is larger than 1; pairs and
    intervals are ordered and have their brackets compared; sets and bare lists have no order, and a bare list may stand
    for a pair in the same order.
    """
    if "refused" in (gold.kind, answer.kind) or "prose" in (gold.kind, answer.kind):
        return gold.kind == answer.kind and bool(gold.text) and gold.text == answer.text
    if "nothing" in (gold.kind, answer.kind) or _names_differ(gold.name, answer.name):
        return False
    if gold.kind == "number" and answer.kind == "number":
        return _numbers_equal(gold, answer)
    if gold.kind == "list" and answer.kind == "list":
        return _lists_equal(gold, answer, formulas_equal)
    if gold.kind == "text" or answer.kind == "text":
        return bool(gold.text) and gold.text == answer.text
    for one, other in ((gold, answer), (answer, gold)):
        if one.kind == "list" and len(one.items) == 1:
            return equal(one.items[0], other, formulas_equal)
    if gold.kind == "list" or answer.kind == "list":
        relation = answer.formula if gold.kind == "list" else gold.formula
        if not re.search(r"[<>]|\\[lg]e(?![A-Za-z])|\\cup|\\in|\\begin|\\mathbb", relation):
            return False
    return _formulas_equal(gold, answer, formulas_equal)


def _names_differ(gold: str, answer: str) -> bool:
    """X = 5 is not y = 5; but "Total = 5" is x = 5, since words in front of a value only describe it."""
    gold, answer = gold.strip(), answer.strip()
    single = _SINGLE_NAME.fullmatch(gold) and _SINGLE_NAME.fullmatch(answer)
    return bool(single) and gold.casefold() != answer.casefold()


def _units_differ(gold: str, answer: str) -> bool:
    if not gold or not answer or gold == answer:
        return False
    ours, theirs = set(re.split(r"[ /]", gold)), set(re.split(r"[ /]", answer))
    if ours <= theirs or theirs <= ours:
        return False
    return all(map(is_measure, ours)) and all(map(is_measure, theirs))


def _numbers_equal(gold: Reading, answer: Reading) -> bool:
    if gold.value is None or answer.value is None or _units_differ(gold.unit, answer.unit):
        return False
    if gold.value == answer.value:
        return True
    if gold.percent == answer.percent:
        return False
    percentage, plain = (gold, answer) if gold.percent else (answer, gold)
    figure = Fraction(percentage.value or 0) * 100
    return abs(figure) > 1 and figure == plain.value


def _lists_equal(gold: Reading, answer: Reading, formulas_equal: FormulasEqual) -> bool:
    ours, theirs = gold.items, answer.items
    if max(len(ours), len(theirs)) > _MAX_ITEMS:
        return False
    if gold.brackets == answer.brackets == "{}":  # what a set names twice it still holds once
        return all(
            any(equal(one, other, formulas_equal) for other in right)
            for left, right in ((ours, theirs), (theirs, ours))
            for one in left
        )
    if len(ours) != len(theirs):
        return False
    if {gold.brackets, answer.brackets} <= {"", "{}"}:
        left = list(theirs)
        for item in ours:
            found = next((at for at, other in enumerate(left) if equal(item, other, formulas_equal)), None)
            if found is None:
                return False
            left.pop(found)
        return True
    bare_pair = (gold.brackets, answer.brackets) in (("", "()"), ("", "[]"), ("()", ""))
    if gold.brackets != answer.brackets and not bare_pair:
        return False
    return all(equal(one, other, formulas_equal) for one, other in zip(ours, theirs, strict=True))


def _formulas_equal(gold: Reading, answer: Reading, formulas_equal: FormulasEqual) -> bool:
    if _units_differ(gold.unit, answer.unit):
        return False
    ours, theirs = gold.formula, answer.formula
    # Against an equation in general form, y = 2x + 1 counts with its left side.
    if "=" in ours and answer.name and not gold.name:
        theirs = f"{answer.name} = {theirs}"
    if "=" in theirs and gold.name and not answer.name:
        ours = f"{gold.name} = {ours}"
    if canonical(ours) == canonical(theirs) and len(ours.strip()) > 0:
        return gold.kind != "number"
    if ("=" in ours) != ("=" in theirs):
        return False  # an equation that is still to be solved states no value
    if any(re.fullmatch(r"[A-Za-z]?", formula.strip()) for formula in (ours, theirs)):
        return False  # one letter: a choice or a variable, and not the same one
    if may_explode(ours) or may_explode(theirs):
        return False
    return formulas_equal(ours, theirs)


def may_explode(formula: str) -> bool:
    r"""Whether evaluating a formula may take forever: towers of three powers, exponents above 4,096, factorials.

    >>> may_explode("x + 5^{5^{5^{5}}}"), may_explode("x^{10}")
    (True, False)
    """
    depth, at, stack = 0, 0, list[bool]()
    while at < len(formula):
        character = formula[at]
        if character in "{(":
            exponent = formula[:at].rstrip().endswith("^")
            stack.append(exponent)
            depth += exponent
            if depth >= 3:
                return True
            if exponent and _too_large(formula[at : _closing(formula, at)]):
                return True
        elif character in "})" and stack:
            depth -= stack.pop()
        at += 1
    if re.search(r"\d{5,}\s*!|!\s*[)}]*\s*!\s*[)}]*\s*!", formula):
        return True
    if re.search(r"\^\s*[^\s{}()^]\s*\^\s*[^\s{}()^]\s*\^", formula):
        return True
    return any(int(digits) > _MAX_EXPONENT for digits in re.findall(r"(?:\^|\*\*)\s*-?(\d{1,300})", formula))


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "{(") - (text[at] in "})")
        if depth == 0:
            return at + 1
    return len(text)


def _too_large(exponent: str) -> bool:
    try:
        value = evaluate(exponent)
    except TooLargeError:
        return True
    return value is not None and abs(value) > _MAX_EXPONENT
