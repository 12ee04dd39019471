"""Layouts of rows as they are published: where the prompt is and where the reference answer.

A format adds columns and changes none: ``gold``, the reference answer alone, and ``answer`` with the same value where
the file has no such column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_rlhf.data.encoding import Messages
from lit_rlhf.errors import DataError
from lit_rlhf.rewards.extraction import last_box

Row = Mapping[str, Any]

# The names are spelt out for jsonargparse, so that a recipe with another one is refused with the list.
Format = Literal[
    "countdown",
    "dapo_math",
    "gsm8k",
    "hh_rlhf",
    "humaneval",
    "math",
    "mbpp",
    "openr1_math",
    "trl",
    "ultrafeedback",
    "verl",
]

_BOXED = r"Think step by step, and put the final answer in \boxed{}."
_HASHES = 'Think step by step, and give the final number after "####".'
_COUNTDOWN = (
    "Make {{ target }} from the numbers {{ nums | join(', ') }} with + - * / and brackets. Use each number exactly as "
    "often as it is listed. Think first, then give the expression alone, as in <answer>(1 + 2) / 3</answer>."
)
_MBPP = "\nAnswer with the function in one Python code block. It is called as in this test:\n\n{{ test_list[0] }}"
_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ASSISTANT = "\n\nAssistant:"


def one_user_message(text: str) -> Messages:
    """A text as the only message of a chat.

    Args:
        text: Of the user.
    """
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Layout:
    """How rows with certain columns become prompts; exactly one of ``column``, ``template`` and ``make`` is set.

    Attributes:
        needs: Columns by which the layout is known.
        column: Holds the prompt as it is.
        template: Jinja over the columns.
        make: Gives text or messages for a row.
        to_messages: Turns the prompt, where it is text, into messages, if messages are asked for.
        gold: The reference answer of a row, ``None`` where it has none.
        unique: The published file repeats its prompts, so that repeats are left out unless they are asked for.
    """

    needs: tuple[str, ...]
    column: str | None = None
    template: str | None = None
    make: Callable[[Row], str | Messages] | None = None
    to_messages: Callable[[str], Messages] = one_user_message
    gold: Callable[[Row], Any] | None = None
    unique: bool = False


def find_layout(format: str, columns: Sequence[str], name: str) -> Layout:
    """The layout of a format that rows with these columns have.

    Args:
        format: A key of :data:`FORMATS`.
        columns: Of the rows.
        name: Of their source, for messages.

    Raises:
        DataError: The rows lack columns of the format.
    """
    for layout in FORMATS[format]:
        if set(layout.needs) <= set(columns):
            return layout
    wanted = " or ".join(" and ".join(map(repr, layout.needs)) for layout in FORMATS[format])
    raise DataError(f"{name}: format={format!r} needs the columns {wanted}; it has {', '.join(map(repr, columns))}")


def guess_formats(columns: Sequence[str]) -> list[str]:
    """Formats that rows with these columns could have, those that know most of the columns first.

    Args:
        columns: Of the rows.
    """
    sizes = {
        name: max((len(layout.needs) for layout in layouts if set(layout.needs) <= set(columns)), default=0)
        for name, layouts in FORMATS.items()
    }
    return sorted((name for name in sizes if sizes[name] > 0), key=lambda name: (-sizes[name], name))


def _value(path: str) -> Callable[[Row], Any]:
    """The value of a column or, with dots, of a field inside it, as it is in the file."""
    column, *fields = path.split(".")

    def value(row: Row) -> Any:
        found = row.get(column)
        for field in fields:
            found = found.get(field) if isinstance(found, Mapping) else None
        return found

    return value


def _after_hashes(row: Row) -> str | None:
    """GSM8K's number, without its thousands commas."""
    solution = row.get("answer")
    if not isinstance(solution, str) or "####" not in solution:
        return None
    return solution.rpartition("####")[2].strip().replace(",", "") or None


def _boxed(row: Row) -> str | None:
    solution = row.get("solution")
    return last_box(solution) if isinstance(solution, str) else None


def _dapo_gold(row: Row) -> Any:
    nested = _value("reward_model.ground_truth")(row)
    return row.get("solution") if nested is None else nested


def _dialogue_prompt(row: Row) -> str:
    """HH-RLHF: everything up to the last turn of the assistant."""
    dialogue = row.get("chosen")
    if not isinstance(dialogue, str) or _ASSISTANT not in dialogue:
        raise DataError(f"column 'chosen' is no dialogue with turns {_ASSISTANT!r}: {dialogue!r:.80}")
    return dialogue[: dialogue.rindex(_ASSISTANT) + len(_ASSISTANT)]


def _dialogue_messages(text: str) -> Messages:
    """The turns of an HH-RLHF prompt."""
    before, *turns = _TURN.split(text)
    if before.strip() or not turns:
        return one_user_message(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [{"role": roles[who], "content": said} for who, said in zip(turns[::2], turns[1::2], strict=True)]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def _shared_beginning(row: Row) -> str | Messages:
    """The prompt of a preference pair that does not have it in a column of its own."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        if _ASSISTANT in chosen:
            return _dialogue_prompt(row)
        return chosen[: _same(chosen, rejected)].rstrip(" ")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DataError("columns 'chosen' and 'rejected' are neither two texts nor two lists of messages")
    return chosen[: _same(chosen, rejected)]


def _same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _without_answer(row: Row) -> Messages:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise DataError(f"column 'messages' is {messages!r:.80}; a list of messages is wanted")
    last = messages[-1] if messages else None
    return messages[:-1] if isinstance(last, Mapping) and last.get("role") == "assistant" else messages


def _complete_function(text: str) -> Messages:
    return one_user_message(f"Complete this function. Answer with all of it in one code block.\n\n```python\n{text}```")


FORMATS: dict[str, tuple[Layout, ...]] = {
    "countdown": (Layout(("target", "nums"), template=_COUNTDOWN),),
    "dapo_math": (
        Layout(("prompt", "solution"), template=f"{{{{ prompt }}}}\n\n{_BOXED}", gold=_dapo_gold, unique=True),
        Layout(("prompt", "reward_model"), column="prompt", gold=_dapo_gold, unique=True),
    ),
    "gsm8k": (Layout(("question", "answer"), template=f"{{{{ question }}}} {_HASHES}", gold=_after_hashes),),
    "hh_rlhf": (
        Layout(("prompt", "chosen"), column="prompt", to_messages=_dialogue_messages),
        Layout(("chosen",), make=_dialogue_prompt, to_messages=_dialogue_messages),
    ),
    "humaneval": (Layout(("prompt", "test", "entry_point"), template="{{ prompt }}", to_messages=_complete_function),),
    "math": (
        Layout(("problem", "answer"), template=f"{{{{ problem }}}}\n\n{_BOXED}", gold=_value("answer")),
        Layout(("problem", "solution"), template=f"{{{{ problem }}}}\n\n{_BOXED}", gold=_boxed),
    ),
    "mbpp": (
        Layout(("text", "test_list"), template="{{ text }}" + _MBPP),
        Layout(("prompt", "test_list"), template="{{ prompt }}" + _MBPP),
    ),
    "openr1_math": (Layout(("problem", "answer"), template=f"{{{{ problem }}}}\n\n{_BOXED}", gold=_value("answer")),),
    "trl": (
        Layout(("prompt",), column="prompt"),
        Layout(("chosen", "rejected"), make=_shared_beginning),
        Layout(("messages",), make=_without_answer),
        Layout(("text",), column="text"),
    ),
    "ultrafeedback": (Layout(("prompt", "chosen", "rejected"), column="prompt"),),
    "verl": (Layout(("prompt", "reward_model"), column="prompt", gold=_value("reward_model.ground_truth")),),
}
"""Each format with its layouts; the first whose columns are there counts."""
