"""Plain text of prompts and completions, which come as text or as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlhf.errors import RewardError


def completion_text(completion: Any) -> str:
    """Text of a completion: the text itself, or the content of its last assistant message.

    Args:
        completion: ``str``, one message ``{"role": ..., "content": ...}`` or a list of messages. A content may be a
            list of parts ``{"type": "text", "text": ...}``.

    Returns:
        The text; empty where there is none (``None``, no messages).

    >>> completion_text([{"role": "assistant", "content": "It is 4."}])
    'It is 4.'
    """
    if completion is None:
        return ""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        return _content_text(completion.get("content"))
    messages = [message for message in completion if isinstance(message, Mapping)]
    spoken = [message for message in messages if message.get("role") == "assistant"] or messages
    return _content_text(spoken[-1].get("content")) if spoken else ""


def prompt_text(prompt: Any) -> str:
    r"""Text of a prompt: the text itself, or its messages' contents, one below the other.

    Args:
        prompt: ``str`` or a list of messages.

    >>> prompt_text([{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}])
    'Add.\n2+2'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content_text(message.get("content")) for message in prompt if isinstance(message, Mapping))


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "".join(part for part in parts if part)
    return str(content)


def column_values(columns: Mapping[str, Any], path: str) -> list[Any]:
    """Values of a column by its name, or of a field inside a nested column by a dotted path.

    Args:
        columns: Columns by name, each a sequence of N values.
        path: A column name, or ``column.field`` as in ``reward_model.ground_truth``.

    Returns:
        N values; ``None`` where a row has no such field.

    Raises:
        KeyError: There is no such column.
    """
    if path in columns:
        return list(columns[path])
    name, *fields = path.split(".")
    values = list(columns[name])
    for field in fields:
        values = [value.get(field) if isinstance(value, Mapping) else None for value in values]
    return values


def required_column(reward: str, columns: Mapping[str, Any], path: str, count: int) -> list[Any]:
    """Values of a column that a reward cannot do without.

    Args:
        reward: Its name, for the message.
        columns: Columns by name.
        path: See :func:`column_values`.
        count: Completions.

    Raises:
        RewardError: There is no such column, or its length is not ``count``.
    """
    try:
        values = column_values(columns, path)
    except KeyError:
        there = ", ".join(sorted(columns)) or "none"
        raise RewardError(f"{reward}: no column {path!r}. Columns: {there}.") from None
    if len(values) != count:
        raise RewardError(f"{reward}: {count} completions, but {len(values)} values in {path!r}.")
    return values


def optional_column(reward: str, columns: Mapping[str, Any], path: str | None, count: int) -> list[Any]:
    """The same, with ``None`` in every row where there is no such column.

    Args:
        reward: Its name, for the message.
        columns: Columns by name.
        path: See :func:`column_values`; ``None`` names none.
        count: Completions.
    """
    if path is None or (path not in columns and path.split(".")[0] not in columns):
        return [None] * count
    return required_column(reward, columns, path, count)
