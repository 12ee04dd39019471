"""Whole texts, prompt and answer, as reward models read them: the same ids in training and in scoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lit_rlhf.data.encoding import CHUNK, Messages
from lit_rlhf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def join_dialogue(prompt: Any, answer: Any) -> str | Messages:
    """A prompt and its answer as one text, or as one list of messages.

    Args:
        prompt: A string or messages; ``None`` where the answer is a whole dialogue already.
        answer: A string, or messages: the assistant's alone, or the whole dialogue with the prompt's turns in front.

    Returns:
        A string where both are strings, the two written one after the other; else messages that end with the
        assistant's.

    Raises:
        DataError: One of them is missing or of another type, or the last message is not from the assistant.

    >>> join_dialogue("2+2=", "4")
    '2+2=4'
    >>> join_dialogue("2+2?", [{"role": "assistant", "content": "4"}])
    [{'role': 'user', 'content': '2+2?'}, {'role': 'assistant', 'content': '4'}]
    """
    if isinstance(answer, str) and (prompt is None or isinstance(prompt, str)):
        text = (prompt or "") + answer
        if not text:
            raise DataError("the text is empty")
        return text
    spoken = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else _messages(answer, "answer")
    if spoken[0]["role"] != "assistant":
        # The dialogue is whole; a prompt column beside it repeats its beginning, perhaps without a system message.
        dialogue = spoken
    elif prompt is None:
        raise DataError("there is no prompt, and the first message is the assistant's")
    elif isinstance(prompt, str):
        dialogue = [{"role": "user", "content": prompt}, *spoken]
    else:
        dialogue = [*_messages(prompt, "prompt"), *spoken]
    if dialogue[-1]["role"] != "assistant" or not isinstance(dialogue[-1].get("content"), str):
        raise DataError(f"the last message is {dialogue[-1]!r}; a text from the assistant is wanted")
    return dialogue


def encode_dialogues(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Sequence[str | Messages],
    append_eos: bool = True,
    where: Callable[[int], str] = "row {}".format,
) -> list[list[int]]:
    """Token ids of whole texts.

    A string follows the tokenizer's own convention for special tokens; a beginning-of-sequence token that is written in
    the text as well is not doubled. Messages go through the chat template, which alone decides about special tokens.

    Args:
        tokenizer: The reward model's.
        dialogues: Results of :func:`join_dialogue`.
        append_eos: End strings with the end-of-sequence token, unless they have it already. Messages end as the
            template ends them.
        where: Names the place of a dialogue in messages, given its number from 0.

    Raises:
        DataError: A text cannot be read by the tokenizer, or the chat template is missing or rejects the messages.
    """
    strings = [number for number, dialogue in enumerate(dialogues) if isinstance(dialogue, str)]
    encoded: list[list[int]] = [[] for _ in dialogues]
    for start in range(0, len(strings), CHUNK):
        chunk = strings[start : start + CHUNK]
        try:
            rows: list[list[int]] = tokenizer([dialogues[number] for number in chunk])["input_ids"]
        except (TypeError, UnicodeError):  # half of a surrogate pair: found again, alone, so that it has a name
            rows = [_encode_alone(tokenizer, dialogues[number], where(number)) for number in chunk]
        for number, ids in zip(chunk, rows, strict=True):
            encoded[number] = _with_specials(tokenizer, str(dialogues[number]), list(ids), append_eos)
    for number, dialogue in enumerate(dialogues):
        if not isinstance(dialogue, str):
            encoded[number] = _render(tokenizer, dialogue, where(number))
        if not encoded[number]:
            raise DataError(f"{where(number)}: the text {dialogue!r} has no tokens at all")
    return encoded


def _encode_alone(tokenizer: PreTrainedTokenizerBase, text: Any, place: str) -> list[int]:
    try:
        ids: list[int] = tokenizer(text)["input_ids"]
    except (TypeError, UnicodeError) as error:
        raise DataError(f"{place}: the tokenizer cannot read {text!r}: {error}") from error
    return ids


def _with_specials(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], append_eos: bool) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos] and text.startswith(str(tokenizer.bos_token)):
        ids = ids[1:]
    return [*ids, eos] if append_eos and eos is not None and ids[-1:] != [eos] else ids


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, place: str) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"{place}: the text is a list of messages, but the reward model's tokenizer has no chat template: take a "
            "tokenizer that has one or write prompts and answers as plain strings"
        )
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(repr(message["role"]) for message in messages)
        raise DataError(f"{place}: the chat template rejects messages with the roles {roles}: {error}") from error


def _messages(value: Any, what: str) -> Messages:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"the {what} is {value!r} ({type(value).__name__}); a string or a list of messages is wanted")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f'the {what} has {message!r}; an object {{"role": ..., "content": ...}} is wanted')
    # Columnar files fill the keys that only some messages have with null; templates ask whether a key is there.
    return [{key: item for key, item in one.items() if item is not None or key == "content"} for one in value]
