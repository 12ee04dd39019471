r"""Find the final answer in a completion.

The answer is, in this order, what the last ``\boxed`` holds, else what follows the last ``####``, else the content of
the last ``<answer>...</answer>``, else what follows the last "answer is" or "answer:", else the last number. The whole
text is searched, never a tail of fixed length. Every search is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BARE_BOX = re.compile(r"[ \t]*([-−]?\d[\d.,]*|[-−]?\\[dt]?frac(?:\d\d|\{[^{}]*\}\{[^{}]*\}))")
_BOX_CHARACTERS = 4000  # a box that does not close within this many characters is not an answer
_TRIES = 100  # marks that nothing follows are passed over this many times
_HASHES = re.compile(r"(?<!#)####(?!#)")
_HEADING = re.compile(r"\W*(?:the\s+)?(?:final\s+)?answer\W*", re.IGNORECASE)
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_PHRASE = re.compile(r"\banswers?(?:[*_ \t]*:|[ \t]+(?:is|are|equals)\b[*_ \t]*:?|[ \t]*=)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])[*_]*\s+(?=[A-Z\"'])")
_NUMBER = re.compile(
    r"(?:(?:(?<==)|(?<==\s))[-−–]\s?|(?<![\w)\]}.])[-−+])?(?:(?<![\w.])|(?<=\$))[$€£]?[-−]?"
    r"(?:\\[dt]?frac\s?(?:\d\d|\{[^{}\n]{1,40}\}\s?\{[^{}\n]{1,40}\})"
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+\b)?(?:\s?/\s?\d+(?!\d|\.\d|\s?/))?|\.\d+)"
    r"(?:\s?\\?%)?"
)
_MATH = re.compile(r"\$(?![\s$])([^$\n]{1,400}?)(?<![\s\\])\$(?!\d)|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
_VISIBLE = re.compile(r"[^\W_]|[∞∅π]")


class Extracted(NamedTuple):
    """A final answer as it stands in the text, and whether it was set off by a box."""

    text: str
    boxed: bool


def without_thinking(text: str) -> str | None:
    """What follows the last ``</think>``; all of a text without think tags; ``None`` where a block is never closed."""
    closed = text.rfind("</think>")
    if text.rfind("<think>") > closed:
        return None
    return text if closed < 0 else text[closed + len("</think>") :]


def extract_answer(completion: str) -> Extracted | None:
    r"""Final answer of a completion, or ``None`` where there is none.

    A think block that was opened and never closed is all draft: the completion has no answer. So has one that ends in
    the middle of its last box.

    >>> extract_answer("First \\boxed{5}. No: \\boxed{7}.")
    Extracted(text='7', boxed=True)
    >>> extract_answer("2+40=42\n#### 42\nHope that helps, all 3 of you.").text
    '42'
    """
    text = without_thinking(completion)
    if not text:
        return None
    found, boxed = _last_box(text)
    if found:
        return Extracted(boxed, True) if boxed is not None else None
    for search in (_after_hashes, _in_tags, _after_phrase, _last_number):
        answer = search(text)
        if answer:
            return Extracted(answer, False)
    return None


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed`` that has content."""
    return _last_box(text)[1]


def _last_box(text: str) -> tuple[bool, str | None]:
    """Whether there is a box with content, and that content (``None`` where the text ends inside the box)."""
    end = len(text)
    for _ in range(_TRIES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            break
        end = start
        head = _BOX.match(text, start)
        if head is None:
            continue
        at = head.end()
        while at < len(text) and text[at] in " \t\n":
            at += 1
        if text.startswith("{", at):
            content, closed = _braces(text, at)
            if not _VISIBLE.search(content):
                continue  # an empty mention
            return True, content.strip() if closed else None
        bare = _BARE_BOX.match(text, head.end())
        if bare:
            return True, bare.group(1).rstrip(".,")
    return False, None


def _braces(text: str, start: int) -> tuple[str, bool]:
    """Content of the group that opens at ``start``, and whether it is closed."""
    depth, at = 0, start
    stop = min(len(text), start + _BOX_CHARACTERS)
    while at < stop:
        character = text[at]
        if character == "\\":
            at += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at], True
        at += 1
    return text[start + 1 : stop], False


def _first_line(text: str) -> str:
    for line in text.lstrip()[:4000].splitlines():
        if line.strip(" \t*_`#"):
            return line.strip()
    return ""


def _after_hashes(text: str) -> str:
    for match in reversed(deque(_HASHES.finditer(text), maxlen=_TRIES)):
        rest = text[match.end() : match.end() + 8000]
        line = _first_line(rest)
        heading = _HEADING.match(line)
        if heading:  # "#### Answer: 72", or the heading of the line below it
            line = line[heading.end() :] or _first_line(rest.lstrip()[heading.end() :])
        if _VISIBLE.search(line):
            return line
    return ""


def last_tagged(text: str) -> str | None:
    """Content of the last ``<answer>...</answer>`` that is closed; ``None`` where there is none.

    Args:
        text: The tags may be written in capitals.
    """
    ends = list(_TAG_END.finditer(text))
    starts = list(_TAG.finditer(text, 0, ends[-1].start())) if ends else []
    return text[starts[-1].end() : ends[-1].start()].strip() if starts else None


def _in_tags(text: str) -> str:
    content = last_tagged(text) or ""
    return content if _VISIBLE.search(content) else ""


def _after_phrase(text: str) -> str:
    for match in reversed(deque(_PHRASE.finditer(text), maxlen=_TRIES)):
        line = _first_line(text[match.end() : match.end() + 8000])
        answer = _SENTENCE_END.split(line, maxsplit=1)[0].strip()
        if _VISIBLE.search(answer):
            return answer
    return ""


def _last_number(text: str) -> str:
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return ""
    last = numbers[0]
    line_start = text.rfind("\n", max(0, last.start() - 4000), last.start()) + 1
    for match in _MATH.finditer(text, max(line_start, last.start() - 4000)):
        if match.start() <= last.start() and last.end() <= match.end():
            return next(group for group in match.groups() if group is not None).strip()
    return last.group().strip()


def numbers_in(text: str) -> list[str]:
    """All numbers in a text, as they are written."""
    return [match.group().strip() for match in _NUMBER.finditer(text)]


def math_in(text: str) -> list[str]:
    r"""Contents of ``$...$``, ``\(...\)`` and ``\[...\]``; a dollar sign in front of an amount opens nothing."""
    return [next(g for g in match.groups() if g is not None).strip() for match in _MATH.finditer(text)]
