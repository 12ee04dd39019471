"""Prompts: rows of a source turned into token ids, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset

from lit_rlhf.data.encoding import Messages, checked_prompt, encode_prompt
from lit_rlhf.data.rows import Rows, read_rows
from lit_rlhf.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "PromptDataset", "encode_prompt", "load_prompts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: Place of its row in the source, counted from 0. It stays the same whatever else is dropped or shuffled,
            and is the key of the prompt's random numbers.
        ids: Token ids, never empty, without padding.
        text: What ``ids`` were made from: the string, or the messages including a system prompt that was put in front.
        columns: The row's other columns; ``None`` where the row has no value.
    """

    index: int
    ids: tuple[int, ...]
    text: str | Messages
    columns: dict[str, Any] = field(default_factory=dict)


class PromptDataset(Dataset):
    """The prompts of one source, in its order; made by :func:`load_prompts`.

    Attributes:
        prompts: The prompts kept.
        columns: Names of the columns that every ``Prompt.columns`` has.
        max_prompt_length: The limit in tokens that the prompts were held to, if any.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rows: Rows,
        columns: Sequence[str],
        max_prompt_length: int | None = None,
        dropped: Mapping[int, int] | None = None,
    ) -> None:
        self.prompts = tuple(prompts)
        self.columns = list(columns)
        self.max_prompt_length = max_prompt_length
        self._rows = rows
        self._dropped = dict(dropped or {})

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    @property
    def name(self) -> str:
        """The path of the source, or what kind of source it is."""
        return self._rows.name

    @property
    def dropped(self) -> int:
        """How many prompts were longer than the limit and left out."""
        return len(self._dropped)

    @property
    def longest(self) -> int:
        """Length of the longest prompt kept, in tokens."""
        return max(len(prompt.ids) for prompt in self.prompts)

    def where(self, position: int) -> str:
        """The place of a kept prompt in words, such as ``train.jsonl, line 7``."""
        return self._rows.where(self.prompts[position].index)

    def report(self) -> str | None:
        """One line about the prompts left out, ``None`` if there are none."""
        if not self._dropped or self.max_prompt_length is None:
            return None
        return _overlong(self._rows, self._dropped, self.max_prompt_length, "dropped")


def load_prompts(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    system_prompt: str | None = None,
    max_prompt_length: int | None = None,
    overlong: Literal["drop", "error"] = "drop",
    split: str | None = None,
) -> PromptDataset:
    """Read a source and tokenize its prompts.

    Args:
        source: Anything that :func:`~lit_rlhf.data.rows.read_rows` reads.
        tokenizer: The policy's tokenizer.
        prompt_column: Column with the prompt: a string, or a list of messages ``{"role": ..., "content": ...}``.
        system_prompt: Put in front of messages that have no system message; a row's own system message wins.
        max_prompt_length: Longest prompt allowed, in tokens, inclusive. No prompt is ever cut.
        overlong: What happens to longer ones: ``"drop"`` leaves them out and warns, ``"error"`` refuses the source.
        split: Which split of a source that has several.

    Returns:
        The prompts with all other columns of their rows.

    Raises:
        DataError: The source cannot be read, has no column ``prompt_column``, holds a prompt that is empty, neither a
            string nor messages, or rejected by the chat template, or all its prompts are too long.
        ConfigurationError: An option is out of range, or ``system_prompt`` is set and a prompt is a plain string.
    """
    if overlong not in ("drop", "error"):
        raise ConfigurationError(f"overlong={overlong!r} is not possible: 'drop' or 'error'")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ConfigurationError(f"max_prompt_length={max_prompt_length} is not possible: at least 1 token, or none")
    rows = read_rows(source, split)
    if prompt_column not in rows.columns:
        raise DataError(
            f"{rows.name}: there is no column {prompt_column!r}. It has {', '.join(map(repr, rows.columns))}; "
            "name the one that holds the prompt with the option `prompt_column`"
        )
    columns = [name for name in rows.columns if name != prompt_column]
    prompts: list[Prompt] = []
    dropped: dict[int, int] = {}
    for index, row in enumerate(rows.rows):
        try:
            text = checked_prompt(row.get(prompt_column), system_prompt)
            ids = encode_prompt(tokenizer, text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{rows.where(index)}: {error}") from error
        except DataError as error:
            raise DataError(f"{rows.where(index)}, column {prompt_column!r}: {error}") from error
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            dropped[index] = len(ids)
            continue
        prompts.append(Prompt(index, ids, text, {name: row.get(name) for name in columns}))
    if dropped and max_prompt_length is not None:
        if overlong == "error" or not prompts:
            advice = "raise `max_prompt_length`" + (" or set `overlong: drop`" if prompts else "")
            raise DataError(f"{_overlong(rows, dropped, max_prompt_length, 'refused')}; {advice}")
        from lightning.pytorch.utilities.rank_zero import rank_zero_only  # heavy: it brings the Trainer along

        rank_zero_only(_log.warning)(_overlong(rows, dropped, max_prompt_length, "dropped"))
    return PromptDataset(prompts, rows, columns, max_prompt_length, dropped)


def _overlong(rows: Rows, lengths: Mapping[int, int], limit: int, verb: str) -> str:
    index = max(lengths, key=lambda key: lengths[key])
    place = rows.where(index).removeprefix(f"{rows.name}, ")
    return (
        f"{rows.name}: {len(lengths)} of {len(rows)} prompts longer than {limit} tokens {verb}, "
        f"longest {lengths[index]} ({place})"
    )
