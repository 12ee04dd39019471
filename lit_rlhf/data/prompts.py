"""Prompts: rows of a source turned into token ids, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset

from lit_rlhf.data.cutting import cut_prompt
from lit_rlhf.data.encoding import Messages, encode_prompt, encode_together
from lit_rlhf.data.formats import Format
from lit_rlhf.data.reading import RowReader
from lit_rlhf.data.rows import Rows, read_rows
from lit_rlhf.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "PromptDataset", "encode_prompt", "load_prompts", "read_prompts"]

Overlong = Literal["drop", "cut", "error"]

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

    Args:
        prompts: The prompts kept.
        rows: All rows of the source.
        columns: Names of the columns that every ``Prompt.columns`` has.
        max_prompt_length: The limit in tokens that the prompts were held to, if any.
        overlong: Length in tokens of each prompt left out because it is longer, by its row.
        cut: Length in tokens that each prompt had before it was cut, by its row.
        refused: Why a row gives no prompt, by row.
        repeats: How many rows were left out because their prompt had been there before.
        contradictions: How many of those have another reference answer than the row that is kept.
        reader: Where the prompts come from.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rows: Rows,
        columns: Sequence[str],
        max_prompt_length: int | None = None,
        overlong: Mapping[int, int] | None = None,
        cut: Mapping[int, int] | None = None,
        refused: Mapping[int, str] | None = None,
        repeats: int = 0,
        contradictions: int = 0,
        reader: RowReader | None = None,
    ) -> None:
        self.prompts = tuple(prompts)
        self.rows = rows
        self.columns = list(columns)
        self.max_prompt_length = max_prompt_length
        self.overlong = dict(overlong or {})
        self.cut = dict(cut or {})
        self.refused = dict(refused or {})
        self.repeats = repeats
        self.contradictions = contradictions
        self.reader = reader

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    @property
    def name(self) -> str:
        """The path of the source, or what kind of source it is."""
        return self.rows.name

    @property
    def dropped(self) -> int:
        """How many rows were left out."""
        return len(self.rows) - len(self.prompts)

    @property
    def longest(self) -> int:
        """Length of the longest prompt kept, in tokens."""
        return max(len(prompt.ids) for prompt in self.prompts)

    def where(self, position: int) -> str:
        """The place of a kept prompt in words, such as ``train.jsonl, line 7``."""
        return self.rows.where(self.prompts[position].index)

    def report(self) -> str | None:
        """One line about the rows left out and the prompts cut, ``None`` if there are none."""
        parts = [self._length_report("dropped", self.overlong), self._length_report("cut", self.cut)]
        if self.repeats:
            other = f", {self.contradictions} of them with another gold" if self.contradictions else ""
            parts.append(f"{self.repeats} of {len(self.rows)} rows repeat an earlier prompt and are dropped{other}")
        if self.refused:
            first = next(iter(self.refused))
            parts.append(
                f"{len(self.refused)} of {len(self.rows)} rows give no prompt and are dropped, "
                f"the first: {self._place(first)}: {self.refused[first]}"
            )
        said = [part for part in parts if part]
        return f"{self.name}: {'; '.join(said)}" if said else None

    def _length_report(self, verb: str, lengths: Mapping[int, int]) -> str | None:
        if not lengths:
            return None
        worst = max(lengths, key=lambda key: lengths[key])
        return (
            f"{len(lengths)} of {len(self.rows)} prompts longer than {self.max_prompt_length} tokens {verb}, "
            f"longest {lengths[worst]} ({self._place(worst)})"
        )

    def _place(self, index: int) -> str:
        return self.rows.where(index).removeprefix(f"{self.name}, ")

    def raise_unusable(self, overlong: Overlong = "drop", bad_prompts: Literal["error", "drop"] = "drop") -> None:
        """Refuse the source where it has what may not be, or nothing is left of it.

        Args:
            overlong: ``error`` refuses prompts that are too long.
            bad_prompts: ``error`` refuses rows that give no prompt.

        Raises:
            DataError: Naming the file, the row and the option.
        """
        if self.refused and (bad_prompts == "error" or not self.prompts):
            first = next(iter(self.refused))
            advice = "; `lit-rlhf data check` lists them, `bad_prompts: drop` leaves them out" if self.prompts else ""
            count = f"{len(self.refused)} of {len(self.rows)} rows give no prompt"
            raise DataError(f"{self.rows.where(first)}, {self.refused[first]} ({count}{advice})")
        if self.overlong and (overlong == "error" or not self.prompts):
            advice = "raise `max_prompt_length`"
            if self.prompts:
                advice += " or set `overlong_prompts` to `drop` or `cut`"
            raise DataError(f"{self.name}: {self._length_report('refused', self.overlong)}; {advice}")


def read_prompts(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    format: Format | None = None,
    prompt_column: str | None = None,
    prompt_template: str | None = None,
    as_chat: bool = False,
    system_prompt: str | None = None,
    chat_template_options: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    overlong: Overlong = "drop",
    drop_duplicates: bool | None = None,
    split: str | None = None,
) -> PromptDataset:
    """Read a source and tokenize its prompts; what cannot be used is noted in the result, row by row.

    Args:
        source: See :func:`load_prompts`, and so are the others.
        tokenizer: The policy's tokenizer.
        format: Published layout of the rows.
        prompt_column: Column with the prompt.
        prompt_template: Jinja template of the prompt.
        as_chat: Make messages of prompts that are text.
        system_prompt: Put in front of messages that have no system message.
        chat_template_options: Further variables of the chat template.
        max_prompt_length: Longest prompt allowed, in tokens.
        overlong: Whether longer ones are cut.
        drop_duplicates: Leave out repeats of earlier prompts.
        split: Which split of a source that has several.

    Raises:
        DataError: The source cannot be read or lacks a column.
        ConfigurationError: An option is out of range or contradicts the prompts.
    """
    if overlong not in ("drop", "cut", "error"):
        raise ConfigurationError(f"overlong={overlong!r} is not possible: 'drop', 'cut' or 'error'")
    if max_prompt_length is not None and max_prompt_length < 1:
        raise ConfigurationError(f"max_prompt_length={max_prompt_length} is not possible: at least 1 token, or none")
    rows = read_rows(source, split)
    reader = RowReader(rows, format, prompt_column, prompt_template, as_chat, system_prompt)
    refused: dict[int, str] = {}
    texts: dict[int, str | Messages] = {}
    for index, row in enumerate(rows.rows):
        try:
            texts[index] = reader.prompt_of(row)
        except ConfigurationError as error:
            raise ConfigurationError(f"{rows.where(index)}: {error}") from error
        except DataError as error:
            refused[index] = f"{reader.source}: {error}"
    repeats = contradictions = 0
    if reader.repeats_prompts if drop_duplicates is None else drop_duplicates:
        texts, repeats, contradictions = _without_repeats(texts, rows, reader)

    def encode(text: str | Messages) -> tuple[int, ...]:
        return encode_prompt(tokenizer, text, chat_template_options=chat_template_options)

    together = encode_together(tokenizer, texts)
    prompts: list[Prompt] = []
    too_long: dict[int, int] = {}
    cut: dict[int, int] = {}
    for index, text in texts.items():
        try:
            ids = together.get(index) or encode(text)
        except DataError as error:
            refused[index] = f"{reader.source}: {error}"
            continue
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            shorter = cut_prompt(text, encode, max_prompt_length) if overlong == "cut" else None
            if shorter is None:
                too_long[index] = len(ids)
                continue
            cut[index] = len(ids)
            text, ids = shorter
        prompts.append(Prompt(index, ids, text, reader.columns_of(rows.rows[index])))
    refused = dict(sorted(refused.items()))
    return PromptDataset(
        prompts, rows, reader.columns, max_prompt_length, too_long, cut, refused, repeats, contradictions, reader
    )


def load_prompts(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    bad_prompts: Literal["error", "drop"] = "error",
    overlong: Overlong = "drop",
    **options: Any,
) -> PromptDataset:
    """Read a source and tokenize its prompts; say what is left out, refuse what cannot be used.

    Args:
        source: Anything that :func:`~lit_rlhf.data.rows.read_rows` reads.
        tokenizer: The policy's tokenizer.
        bad_prompts: What happens to rows that give no prompt (empty, ``null``, no messages, rejected by the chat
            template): ``"error"`` refuses the source, ``"drop"`` leaves them out and warns.
        overlong: What happens to prompts longer than ``max_prompt_length``: ``"drop"`` leaves them out and warns,
            ``"cut"`` leaves out the middle of the longest user message and warns, ``"error"`` refuses the source.
        options: Of :func:`read_prompts`. ``format``: a published layout, see :mod:`lit_rlhf.data.formats`.
            ``prompt_column``: column with the prompt, a string or a list of messages
            ``{"role": ..., "content": ...}``; ``"prompt"`` by default. ``prompt_template``: Jinja over the columns,
            instead. ``as_chat``: make one user message of a prompt that is text. ``system_prompt``: put in front of
            messages that have no system message. ``chat_template_options``: further variables of the chat template.
            ``max_prompt_length``: in tokens, inclusive. ``drop_duplicates``: leave out rows whose prompt was there
            before; by default only for formats whose published file repeats its prompts. ``split``: of a source that
            has several.

    Returns:
        The prompts with all other columns of their rows.

    Raises:
        DataError: The source cannot be read, lacks a column, has what may not be, or nothing of it is left.
        ConfigurationError: An option is out of range, or ``system_prompt`` is set and a prompt is a plain string.
    """
    if bad_prompts not in ("error", "drop"):
        raise ConfigurationError(f"bad_prompts={bad_prompts!r} is not possible: 'error' or 'drop'")
    prompts = read_prompts(source, tokenizer, overlong=overlong, **options)
    prompts.raise_unusable(overlong, bad_prompts)
    if report := prompts.report():
        from lightning.pytorch.utilities.rank_zero import rank_zero_only  # heavy: it brings the Trainer along

        rank_zero_only(_log.warning)(report)
    return prompts


def _without_repeats(
    texts: Mapping[int, str | Messages], rows: Rows, reader: RowReader
) -> tuple[dict[int, str | Messages], int, int]:
    """The first row of each prompt, the number of others, and how many of those have another reference answer."""
    first: dict[str, int] = {}
    contradictions = 0
    for index, text in texts.items():
        kept = first.setdefault(repr(text), index)
        if kept != index and reader.has_gold:
            contradictions += reader.gold_of(rows.rows[index]) != reader.gold_of(rows.rows[kept])
    return {index: texts[index] for index in first.values()}, len(texts) - len(first), contradictions
