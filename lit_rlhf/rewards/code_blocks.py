"""Fenced blocks in a text, found in time linear in its length."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Bounded repeats: an open one could be cut in many ways, and a line made for it would take quadratic time.
_FENCE = re.compile(r"^[ \t]{0,8}(`{3,}|~{3,})[ \t]{0,8}([\w+#.-]{0,30})[^`\n]*$", re.MULTILINE)
PYTHON = ("", "python", "python3", "py", "py3")
JSON = ("", "json")


def last_code_block(text: str, languages: Sequence[str] = PYTHON) -> str | None:
    r"""Content of the last block that is not empty; ``None`` where there is none.

    A block that the text ends in counts. Where a block is not closed before the next one with a language opens, it ends
    there.

    Args:
        text: Markdown.
        languages: What may stand behind the opening fence, in small letters; ``""`` for nothing.

    >>> last_code_block("```\nx = 1\n```\nprints\n```text\n1\n```")
    'x = 1\n'
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        mark, language = fence.groups()
        if opened is None:
            opened = fence
        elif mark.startswith(opened.group(1)) or language:
            blocks.append((opened.group(2), text[opened.end() + 1 : fence.start()]))
            opened = fence if language else None
    if opened is not None:
        blocks.append((opened.group(2), text[opened.end() + 1 :]))
    found = (code for language, code in reversed(blocks) if language.lower() in languages and code.strip())
    return next(found, None)
