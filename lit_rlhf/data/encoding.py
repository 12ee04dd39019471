"""Token ids of prompts: the one place where text or messages become the ids that a policy continues.

The sampler, the policy and the reference all get these ids and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lit_rlhf.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

# What jinja2 and the code inside templates raise; jinja2's own errors derive from Exception alone.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError)

CHUNK = 10_000
"""Texts handed to the tokenizer at once: enough for its threads, small enough that their encodings fit in memory."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    system_prompt: str | None = None,
    chat_template_options: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of one prompt, ready to be continued.

    A string follows the tokenizer's own convention for special tokens, except that an end-of-sequence token which the
    tokenizer appends is left off, and that a beginning-of-sequence token which the string begins with is not put in
    front of it again. Messages go through the chat template with the assistant's header at the end; the template alone
    decides about special tokens, so a beginning-of-sequence token is never doubled.

    Args:
        tokenizer: The policy's tokenizer.
        prompt: A string, or messages ``{"role": ..., "content": ...}``. The text goes through unchanged.
        system_prompt: Put in front of messages that have no system message.
        chat_template_options: Variables that the chat template knows besides the messages, such as
            ``{"enable_thinking": False}``.

    Raises:
        DataError: The prompt is empty, of another type, gives no tokens, or the chat template is missing or rejects it.
        ConfigurationError: ``system_prompt`` is set and the prompt is a string.
    """
    text = checked_prompt(prompt, system_prompt)
    if isinstance(text, str):
        ids = encode_texts(tokenizer, [text])[0]
    else:
        ids = _encode_messages(tokenizer, text, chat_template_options or {})
    if not ids:
        raise DataError(f"the prompt {text!r} has no tokens at all, so nothing can be generated from it")
    return tuple(ids)


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of many plain-string prompts at once; the same ids as :func:`encode_prompt`, many times faster.

    Args:
        tokenizer: The policy's tokenizer.
        texts: The prompts.

    Raises:
        DataError: The tokenizer cannot read a text.
    """
    if not texts:
        return []
    try:
        encoded: list[list[int]] = tokenizer(texts)["input_ids"]
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        subject = f"the prompt {texts[0]!r}" if len(texts) == 1 else "one of the prompts"
        raise DataError(f"the tokenizer cannot read {subject}: {error}") from error
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for row, (ids, text) in enumerate(zip(encoded, texts, strict=True)):
        doubled = bos is not None and ids[:2] == [bos, bos]
        ended = eos is not None and ids[-1:] == [eos]
        if doubled or ended:
            # Only what the tokenizer added goes: tokens that are written in the text itself are the user's.
            written: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ended:
                ids = ids[: len(ids) - _trailing(ids, eos) + _trailing(written, eos)]
            encoded[row] = ids[1:] if doubled and len(ids) > len(written) else ids
    return encoded


def encode_together(
    tokenizer: PreTrainedTokenizerBase, texts: Mapping[int, str | Messages]
) -> dict[int, tuple[int, ...]]:
    """Token ids of the prompts that are strings; those that are missing are to be encoded alone, to find the error.

    Args:
        tokenizer: The policy's tokenizer.
        texts: Prompts by row.
    """
    strings = [(index, text) for index, text in texts.items() if isinstance(text, str)]
    encoded: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(strings), CHUNK):
        chunk = strings[start : start + CHUNK]
        try:
            ids = encode_texts(tokenizer, [text for _, text in chunk])
        except DataError:
            continue
        encoded.update((index, tuple(row)) for (index, _), row in zip(chunk, ids, strict=True))
    return encoded


def _trailing(ids: list[int], token: int | None) -> int:
    return next((count for count, other in enumerate(reversed(ids)) if other != token), len(ids))


def _encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages, options: Mapping[str, Any]) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"the prompt is a list of messages (roles {_roles(messages)}), but the tokenizer has no chat template: "
            "take an instruction-tuned model's tokenizer or write the prompts as plain strings"
        )

    def render(part: Messages) -> Any:
        return tokenizer.apply_chat_template(
            part, tokenize=True, add_generation_prompt=True, return_dict=False, **options
        )

    try:
        return list(render(messages))
    except _TEMPLATE_ERRORS as error:
        role = _rejected_role(render, messages)
        subject = f"messages with the roles {_roles(messages)}" if role is None else f"the role {role!r}"
        raise DataError(f"the tokenizer's chat template rejects {subject}: {error}") from error


def _rejected_role(render: Callable[[Messages], Any], messages: Messages) -> str | None:
    """The role without which the template takes the messages."""
    for role in dict.fromkeys(message["role"] for message in messages):
        if role == "user":
            continue
        try:
            render([message for message in messages if message["role"] != role])
        except _TEMPLATE_ERRORS:
            continue
        return role
    return None


def checked_prompt(prompt: Any, system_prompt: str | None) -> str | Messages:
    """The prompt itself if it is sound, with the system prompt in front of messages that have none.

    Args:
        prompt: What a row has in its prompt column.
        system_prompt: Put in front of messages that have no system message; a row's own wins.

    Raises:
        DataError: The prompt is missing, empty, or neither a string nor messages that the assistant can answer.
        ConfigurationError: ``system_prompt`` is set and the prompt is a string.
    """
    if prompt is None:
        raise DataError("the prompt is missing (null)")
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("the prompt is an empty string")
        if system_prompt is not None:
            raise ConfigurationError(
                "`system_prompt` is set, but the prompt is a plain string: the prompt column must hold messages "
                '([{"role": "user", "content": ...}]) for a system prompt to have a place, or `as_chat` make them'
            )
        return prompt
    if not isinstance(prompt, (list, tuple)):
        raise DataError(f"the prompt is {prompt!r} ({type(prompt).__name__}); a string or a list of messages is wanted")
    if not prompt:
        raise DataError("the prompt is an empty list of messages")
    messages = [_checked_message(message, number) for number, message in enumerate(prompt, start=1)]
    last = messages[-1]
    if last["role"] == "assistant":
        raise DataError("the last message has the role 'assistant'; it must be one that the assistant answers")
    if not last["content"]:
        raise DataError(f"the last message (role {last['role']!r}) is empty")
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f'message {number} is {message!r}; an object {{"role": ..., "content": ...}} is wanted')
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
        raise DataError(f"message {number} (role {message['role']!r}) has the content {content!r}; a string is wanted")
    # Columnar files fill the keys that only some messages have with null; templates ask whether a key is there.
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _roles(messages: Messages) -> str:
    return ", ".join(repr(role) for role in dict.fromkeys(message["role"] for message in messages))
