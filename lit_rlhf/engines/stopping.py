"""Stop strings: one rule for when a row ends and one for what its text is, for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Tells whether the newest token of a row completed a stop string.

    Args:
        tokenizer: Decodes the tail of the row.
        stop: The strings, none of them empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        # A token may hold as little as one byte of a stop string; two more cover what surrounds it.
        self.tail = max(len(text.encode()) for text in stop) + 2

    def ends(self, completion_ids: Sequence[int]) -> bool:
        """Whether a stop string stands in the text of the last tokens.

        Args:
            completion_ids: The row's tokens so far.
        """
        text = self.tokenizer.decode(list(completion_ids[-self.tail :]), skip_special_tokens=False)
        return any(stop in text for stop in self.stop)


def completion_text(tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Text of a completion for rewards and logs: special tokens left out, nothing after the earliest stop string.

    Args:
        tokenizer: The policy's.
        completion_ids: Sampled ids without padding.
        stop: Stop strings; the one that is complete first in the text is kept and ends it, as it did while decoding.
    """
    text = str(tokenizer.decode(list(completion_ids), skip_special_tokens=True))
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text
