r"""Bring an answer into one spelling: layout, alphabet and brackets, without changing what it says."""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
        "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/",
        "π": "\\pi ", "∞": "\\infty ", "∅": "\\emptyset ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "θ": "\\theta ", "°": "^\\circ ", "º": "^\\circ ",
        "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "\u200b": "", "\ufeff": "", "％": "%",
        "’": "'", "‘": "'", "“": '"', "”": '"', "（": "(", "）": ")", "，": ",", "。": ".",
    }
)  # fmt: skip
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_SUPERSCRIPT = re.compile(f"⁻?[{_SUPERSCRIPTS}]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_SQRT_TEXT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_LAYOUT = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits|mathstrut)"
    r"(?![A-Za-z])\.?"
)
_SPACES = re.compile(r"(?<!\\)\\[ ;:>~]|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|~")
_NO_SPACE = re.compile(r"(?<!\\)\\(?:,|!\s*)|\{\}")
_COLOR = re.compile(r"\\(?:text)?color\s*\{\w*\}")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|pmb|mbox|hbox|bf|rm)\s*\{([^{}]*)\}"
)
_OPERATOR = re.compile(r"\\operatorname\*?\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])|\{\s*\^\s*\\circ\s*\}")
_MARKDOWN = re.compile(r"^(?:\*\*|__|`+)|(?:\*\*|__|`+)$")
_APPROX = re.compile(
    r"^(?:(?:is|are|equals|approximately|about|roughly|exactly|only|also|simply|just|therefore|thus|:)\s*)+", re.I
)
_DEGREE_MARK = " degrees "


def clean(text: str) -> str:
    r"""One spelling for ways of writing the same answer.

    Unicode signs become ASCII or LaTeX commands, ``\dfrac`` becomes ``\frac``, ``\text{ cm}`` becomes plain words,
    ``\left``, thin spaces, markdown marks, enclosing ``$`` and a final full stop go.

    >>> clean(r"$\left(5\,\text{cm}\right)$."), clean("−7 .")
    ('(5 cm )', '-7')
    """
    text = text.strip()
    if not text.isascii():
        text = _SUPERSCRIPT.sub(_superscript, text.translate(_CHARACTERS))
        text = _ROOT.sub(lambda m: f"\\sqrt{{{m.group(1) or m.group(2)}}}", text)
    text = _edges(text)
    if "\\" in text:
        text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
        text = _COLOR.sub("", text)
        text = _OPERATOR.sub(r"\\\1 ", text)
        for _ in range(3):  # \text{\textbf{A}}
            text, count = _WORDS.subn(r" \1 ", text)
            if not count:
                break
        text = _NO_SPACE.sub("", _SPACES.sub(" ", text))
        text = _FRACTION.sub(r"\\frac", _LAYOUT.sub("", text))
        text = _DEGREE.sub(_DEGREE_MARK, text)
        text = re.sub(r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le", text)
        text = re.sub(r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge", text)
        text = re.sub(r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset", text)
    elif "{,}" in text:
        text = text.replace("{,}", ",")
    if "<<" in text:  # <<5*3=15>>, the calculator marks of GSM8K
        text = _CALCULATOR.sub("", text)
    if "sqrt" in text:
        text = _SQRT_TEXT.sub(r"\\sqrt{\1}", text)
    if "\\" in text or "$" in text:
        text = _edges(text)
    text = _APPROX.sub("", " ".join(text.split()))
    return text.strip()


def _superscript(match: re.Match[str]) -> str:
    digits = "".join("-" if c == "⁻" else str(_SUPERSCRIPTS.index(c)) for c in match.group())
    return f"^{{{digits}}}"


def _edges(text: str) -> str:
    """Remove what encloses an answer: ``$``, markdown marks, quotation marks, final punctuation."""
    before = None
    while text != before:
        before = text
        text = _MARKDOWN.sub("", text.strip()).strip()
        text = text.rstrip(" \t\n;:,?")
        if text.endswith(".") and not text.endswith("\\right."):
            text = text.rstrip(".")
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ('"', '"')):
            inside = text[len(opening) : len(text) - len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and not text.endswith("\\" + closing)
                and opening not in inside.replace("\\$", "")
            ):
                text = inside
                break
    return text
