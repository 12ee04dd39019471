"""Split the unit, the currency or the percent sign off a number."""

from __future__ import annotations

import re

_CURRENCY = {
    "$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "₩": "won", "US$": "dollar", "USD": "dollar",
    "EUR": "euro", "GBP": "pound", "Rs.": "rupee", "Rs": "rupee",
}  # fmt: skip
_PREFIX = re.compile(r"([-+]?)\s*(US\$|USD|EUR|GBP|Rs\.?|[$€£¥₹₩])\s*([-+]?)(?=[\d.\\(])")
_SUFFIX_SIGN = re.compile(r"\s*([$€£¥₹₩])$")
_PERCENT = re.compile(r"\s*(?:%|(?i:per\s?cent|percent|percentage|pct)(?i:\s+points?)?)$")
_WORD = r"[A-Za-z][A-Za-z'.-]*"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_TAIL = re.compile(
    rf"(?<=[\d)}}\]. ])\s*((?:{_WORD}{_POWER})(?:(?:\s*/\s*|\s*\\cdot\s*|\s+)(?:{_WORD}{_POWER})){{0,4}})$"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SHORT = _words(
    "m cm mm km nm g kg mg t s ms h hr hrs min l L ml mL dl cl ft in yd mi lb lbs oz gal qt pt N J W V A "
    "K Hz kHz kW MW kJ C F Pa mol cc pm am mph kph rad deg cal kB MB GB TB bps ha ac sq cu of a an to is "
    "he in at on by as"
)
_ALIASES = {
    "m": "meter", "metre": "meter", "cm": "centimeter", "centimetre": "centimeter", "mm": "millimeter",
    "millimetre": "millimeter", "km": "kilometer", "kilometre": "kilometer", "g": "gram", "kg": "kilogram",
    "mg": "milligram", "s": "second", "sec": "second", "h": "hour", "hr": "hour", "min": "minute", "l": "liter",
    "litre": "liter", "ml": "milliliter", "millilitre": "milliliter", "ft": "foot", "feet": "foot", "inche": "inch",
    "in": "inch", "yd": "yard", "mi": "mile", "lb": "pound", "oz": "ounce", "deg": "degree", "buck": "dollar",
    "mph": "mile/hour", "kph": "kilometer/hour", "sq": "square", "usd": "dollar", "eur": "euro",
}  # fmt: skip
_FILLERS = _words("of a an the in total left each more altogether")
_NOT_UNITS = _words("and or if when where for mod then is are because so since not")


def split_unit(text: str) -> tuple[str, str]:
    r"""Number or formula, and its unit in one spelling.

    Args:
        text: A cleaned answer, such as ``5 cm``, ``$18``, ``25%`` or ``3.5 million dollars``.

    Returns:
        What is left of the text, and the unit: empty where there is none, ``%`` for a percent sign, a leading
        ``10^6 `` for words such as "million".

    >>> split_unit("5 cm^2"), split_unit("$18"), split_unit("25%"), split_unit("3.5 million dollars")
    (('5', 'centimeter^2'), ('18', 'dollar'), ('25', '%'), ('3.5', '10^6 dollar'))
    """
    currency = ""
    match = _PREFIX.match(text)
    if match:
        currency = _CURRENCY[match.group(2)]
        text = match.group(1) + match.group(3) + text[match.end() :]
    match = _SUFFIX_SIGN.search(text)
    if match and not currency:
        currency, text = _CURRENCY[match.group(1)], text[: match.start()]
    match = _PERCENT.search(text)
    if match and match.start() > 0:
        return text[: match.start()].strip(), "%"
    match = _TAIL.search(text)
    if not match or match.start() == 0:
        return text.strip(), currency
    spaced = match.start(1) > match.start() or text[match.start() - 1] == " "
    unit = _normalized(match.group(1), spaced)
    if unit is None:
        return text.strip(), currency
    head = text[: match.start()].strip()
    if currency and unit and not unit.startswith("10^"):
        unit = currency  # "$18 per day": the amount is what is compared
    elif currency:
        unit = f"{unit} {currency}".strip()
    return head, unit


def _normalized(tail: str, spaced: bool) -> str | None:
    """One spelling of a unit; ``None`` where the words are no unit (a variable, a function)."""
    tail = re.sub(r"\s*\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", tail)
    tail = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", re.sub(r"\\cdot", " ", tail))
    scale, words = "", []
    for position, word in enumerate(tail.split()):
        base, caret, exponent = word.partition("^")
        base = base.rstrip(".")
        lower = base.lower()
        if lower in _NOT_UNITS or (len(base) < 3 and base != "/" and base not in _SHORT):
            return None
        if len(base) == 1 and base != "/" and not spaced:
            return None  # 5m may be 5 times m
        if position == 0 and lower in _SCALES:
            scale = f"10^{_SCALES[lower]}"
            continue
        if lower in _FILLERS and not (lower == "in" and position == 0):
            continue
        if (len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss")) or lower in ("lbs", "hrs"):
            lower = lower[:-1]
        words.append(_ALIASES.get(lower, lower) + caret + exponent)
    unit = _powers(words)
    return f"{scale} {unit}".strip() if scale else unit


def _powers(words: list[str]) -> str:
    """``square inch`` and ``inch^2`` are one unit."""
    done: list[str] = []
    for word in words:
        if done and done[-1] in ("square", "cubic", "cu"):
            done[-1] = f"{word}^{2 if done[-1] == 'square' else 3}"
        else:
            done.append(word)
    return " ".join(done).replace(" / ", "/")


_MEASURES = frozenset([*_ALIASES.values(), *_CURRENCY.values()]) | _words(
    "cent penny day week month year degree inch mile ton tonne gallon quart pint acre newton joule watt "
    "volt minute square cubic percent dozen celsius fahrenheit kelvin radian c f"
)


def is_measure(word: str) -> bool:
    """Whether a word is a unit of measure or a currency (and not a thing that is counted, such as apples)."""
    return word.partition("^")[0] in _MEASURES
