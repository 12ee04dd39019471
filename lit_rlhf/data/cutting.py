"""Prompts that are too long, cut inside what the user says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_rlhf.data.encoding import Messages
from lit_rlhf.errors import DataError


def cut_prompt(
    prompt: str | Messages, encode: Callable[[str | Messages], Sequence[int]], limit: int
) -> tuple[str | Messages, tuple[int, ...]] | None:
    """Leave out the middle of the longest user message until the prompt has at most ``limit`` tokens.

    Instructions stand at the beginning or at the end of a message, so both stay, and so does everything outside of it:
    beginning-of-sequence token, system message, other turns, the assistant's header. Of a plain string, all is the
    user's.

    Args:
        prompt: A string or messages.
        encode: Gives the token ids of a prompt.
        limit: Longest prompt, in tokens.

    Returns:
        The shorter prompt with its ids, which are those that ``encode`` gives for it; ``None`` where the prompt is
        too long even with next to nothing of the message.
    """
    place = _longest_user_message(prompt)
    if place is None:
        return None
    text = prompt if isinstance(prompt, str) else str(prompt[place]["content"])

    def shortened(characters: int) -> tuple[str | Messages, tuple[int, ...]]:
        head = -(-characters // 2)
        kept = text[:head] + text[len(text) - (characters - head) :]
        if isinstance(prompt, str):
            return kept, tuple(encode(kept))
        messages = [*prompt[:place], {**prompt[place], "content": kept}, *prompt[place + 1 :]]
        return messages, tuple(encode(messages))

    # More characters are not always more tokens, but nearly so: the search ends at a prompt that does fit.
    best = None
    low, high = 1, len(text) - 1
    while low <= high:
        middle = (low + high) // 2
        try:
            candidate = shortened(middle)
        except DataError:  # nothing but white space is left, and the template strips it
            low = middle + 1
            continue
        if len(candidate[1]) <= limit:
            best, low = candidate, middle + 1
        else:
            high = middle - 1
    return best


def _longest_user_message(prompt: str | Messages) -> int | None:
    if isinstance(prompt, str):
        return 0
    lengths = {
        place: len(message["content"])
        for place, message in enumerate(prompt)
        if message["role"] == "user" and isinstance(message["content"], str)
    }
    return max(lengths, key=lambda place: lengths[place], default=None)
