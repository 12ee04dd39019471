"""Pairs of answers of which one was preferred, for reward models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_rlhf.data.dialogues import encode_dialogues, join_dialogue
from lit_rlhf.data.encoding import Messages
from lit_rlhf.data.rows import Rows, read_rows
from lit_rlhf.errors import ConfigurationError, DataError
from lit_rlhf.functional.masking import mask_from_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

# How turns are opened in the dialogues of HH-RLHF.
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True)
class PreferencePair:
    """Two whole texts with the same prompt.

    Attributes:
        index: Place of the row in its source, counted from 0.
        chosen_ids: Token ids of the prompt with the preferred answer, without padding.
        rejected_ids: The same with the other answer.
    """

    index: int
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


class PreferenceDataset(Dataset):
    """Pairs tokenized once, in the order of their source."""

    def __init__(self, pairs: Sequence[PreferencePair], name: str) -> None:
        self.pairs = tuple(pairs)
        self.name = name

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, position: int) -> PreferencePair:
        return self.pairs[position]


class PreferenceDataModule(L.LightningDataModule):
    r"""Batches of preference pairs, tokenized once with the tokenizer of the module under training.

    Three layouts of a row are read:

    * prompt, chosen and rejected answer, each a string or a list of messages;
    * the same where the answers are whole dialogues (UltraFeedback): the prompt column is then not used;
    * no prompt column: chosen and rejected are whole dialogues with a common beginning, as lists of messages or as
      text (HH-RLHF, turns opened by ``\n\nHuman:`` and ``\n\nAssistant:``).

    Strings are written one after the other and end with the end-of-sequence token; messages are rendered with the chat
    template. A batch is a dict of ``chosen_ids`` and ``rejected_ids`` ``(N, L)`` int64, padded on the right, and
    ``chosen_mask`` and ``rejected_mask`` ``(N, L)`` bool, True = a real token.

    Args:
        train: Source of the training pairs: a file, a folder of Hugging Face datasets, a dataset or a list of mappings.
        val: Source of the validation pairs.
        train_split: Which split of ``train`` where it has several.
        val_split: Which split of ``val`` where it has several.
        prompt_column: Column with the prompt. Where the rows have no such column, the answers must be whole dialogues;
            ``None`` takes any strings for whole texts.
        chosen_column: Column with the preferred answer.
        rejected_column: Column with the other.
        append_eos: End strings with the end-of-sequence token. Say the same to the ``RewardModel`` that scores later.
        unusable: What happens to pairs that teach nothing, being identical or dialogues with different beginnings:
            ``drop`` (counted and said), or ``error``.
        batch_size: Pairs in a training batch on each rank.
        val_batch_size: Pairs in a validation batch on each rank; ``batch_size`` by default.
        max_length: Longest text allowed, in tokens; pairs with a longer one are left out with a warning, none is cut.
        num_workers: Worker processes that pad batches; the pairs are tokenized already, so 0 is usually fastest.
        seed: Of the order in which training pairs are drawn.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        train_split: str | None = None,
        val_split: str | None = None,
        prompt_column: str | None = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        append_eos: bool = True,
        unusable: Literal["drop", "error"] = "drop",
        batch_size: int = 32,
        val_batch_size: int | None = None,
        max_length: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "val_batch_size": val_batch_size, "max_length": max_length}
        for option, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} must be at least 1, got {value}")
        if unusable not in ("drop", "error"):
            raise ConfigurationError(f"unusable={unusable!r} is not possible: 'drop' or 'error'")
        self.sources = {"train": (train, train_split), "val": (val, val_split)}
        self.prompt_column = prompt_column
        self.chosen_column = chosen_column
        self.rejected_column = rejected_column
        self.append_eos = append_eos
        self.unusable = unusable
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.max_length = max_length
        self.num_workers = num_workers
        self.seed = seed
        self.pairs: dict[str, PreferenceDataset] = {}
        self._pad_id = 0

    def setup(self, stage: str) -> None:
        """Read and tokenize what the stage needs, once.

        Raises:
            DataError: A source, a column or a row cannot be used.
            ConfigurationError: The module has no tokenizer, or nothing is given for the stage.
        """
        module = self.trainer.lightning_module if self.trainer else None
        tokenizer = getattr(module, "tokenizer", None)
        if tokenizer is None:
            raise ConfigurationError("PreferenceDataModule needs a module with a tokenizer, such as RewardModelModule")
        # Padding never counts, so any id will do; the vocabulary is left as it is.
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        needed = "train" if stage == "fit" else "val"
        if self.sources[needed][0] is None:
            raise ConfigurationError(f"PreferenceDataModule: {stage} needs pairs, give them in `{needed}`")
        for split in dict.fromkeys((needed, "val")):
            if split not in self.pairs and self.sources[split][0] is not None:
                self.pairs[split] = self._load(*self.sources[split], tokenizer)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches; the order depends on ``seed`` and on how many epochs this run has drawn."""
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader("train", self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches in the order of the source; none without ``val``."""
        return self._loader("val", self.val_batch_size or self.batch_size) if "val" in self.pairs else []

    def collate(self, pairs: Sequence[PreferencePair]) -> dict[str, Tensor]:
        """Pad on the right; the masks come from the lengths.

        Args:
            pairs: N pairs.

        Returns:
            ``chosen_ids``, ``chosen_mask``, ``rejected_ids`` and ``rejected_mask``, ``(N, L)``, L the longest text.
        """
        rows = [*(pair.chosen_ids for pair in pairs), *(pair.rejected_ids for pair in pairs)]
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([[*row, *[self._pad_id] * (width - len(row))] for row in rows])
        mask = mask_from_lengths(lengths, width)
        count = len(pairs)
        return {
            "chosen_ids": ids[:count],
            "chosen_mask": mask[:count],
            "rejected_ids": ids[count:],
            "rejected_mask": mask[count:],
        }

    def _loader(self, split: str, batch_size: int, **options: Any) -> DataLoader:
        return DataLoader(
            self.pairs[split], batch_size=batch_size, collate_fn=self.collate, num_workers=self.num_workers, **options
        )

    def _load(self, source: Any, split: str | None, tokenizer: PreTrainedTokenizerBase) -> PreferenceDataset:
        rows = read_rows(source, split)
        columns = (("chosen_column", self.chosen_column), ("rejected_column", self.rejected_column))
        for option, column in columns:
            if column not in rows.columns:
                raise DataError(
                    f"{rows.name}: there is no column {column!r}. It has {', '.join(map(repr, rows.columns))}; "
                    f"name the right one with the option `{option}`"
                )
        kept, chosen, rejected = self._dialogues(rows)
        sides = [
            encode_dialogues(tokenizer, side, self.append_eos, lambda number: rows.where(kept[number]))
            for side in (chosen, rejected)
        ]
        pairs = [PreferencePair(i, tuple(c), tuple(r)) for i, c, r in zip(kept, *sides, strict=True)]
        return PreferenceDataset(self._short_enough(pairs, rows), rows.name)

    def _dialogues(self, rows: Rows) -> tuple[list[int], list[str | Messages], list[str | Messages]]:
        """Numbers of the usable rows with their chosen and rejected texts."""
        column = self.prompt_column
        implicit = column is None or column not in rows.columns
        kept: list[int] = []
        sides: tuple[list[str | Messages], list[str | Messages]] = ([], [])
        unusable: list[str] = []
        for index, row in enumerate(rows.rows):
            prompt = row.get(column) if column is not None else None
            if not implicit and not prompt:
                raise DataError(f"{rows.where(index)}, column {column!r}: the prompt is {prompt!r}")
            chosen, rejected = (
                self._dialogue(rows, index, prompt, side) for side in (self.chosen_column, self.rejected_column)
            )
            problem = None
            if chosen == rejected:
                problem = "chosen and rejected are the same"
            elif implicit and column is not None and not _begin_alike(chosen, rejected):
                problem = f"there is no column {column!r}, and no dialogues with the same beginning"
            if problem is None:
                kept.append(index)
                sides[0].append(chosen)
                sides[1].append(rejected)
            else:
                unusable.append(f"{rows.where(index)}: {problem}")
        if unusable and (self.unusable == "error" or not kept):
            hint = f"; name the prompt's column with `prompt_column`, there are {', '.join(rows.columns)}"
            raise DataError(
                f"{unusable[0]} ({len(unusable)} of {len(rows)} rows are of no use){hint if implicit else ''}"
            )
        if unusable:
            _warn(f"{rows.name}: {len(unusable)} of {len(rows)} pairs dropped, the first: {unusable[0]}")
        return kept, *sides

    def _dialogue(self, rows: Rows, index: int, prompt: Any, column: str) -> str | Messages:
        answer = rows.rows[index].get(column)
        if isinstance(prompt, str) and isinstance(answer, str) and _HUMAN in prompt and answer.startswith(prompt):
            prompt = None  # an HH-RLHF dialogue beside its own prompt
        try:
            return join_dialogue(prompt, answer)
        except DataError as error:
            raise DataError(f"{rows.where(index)}, column {column!r}: {error}") from error

    def _short_enough(self, pairs: list[PreferencePair], rows: Rows) -> list[PreferencePair]:
        if self.max_length is None:
            return pairs
        longest = {pair.index: max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs}
        kept = [pair for pair in pairs if longest[pair.index] <= self.max_length]
        dropped = f"{len(pairs) - len(kept)} of {len(pairs)} pairs longer than {self.max_length} tokens"
        if not kept:
            raise DataError(f"{rows.name}: {dropped}, none is left; raise `max_length`")
        if len(kept) < len(pairs):
            worst = max(longest, key=lambda index: longest[index])
            _warn(f"{rows.name}: {dropped} dropped, longest {longest[worst]} ({rows.where(worst)})")
        return kept


def _begin_alike(chosen: str | Messages, rejected: str | Messages) -> bool:
    """Whether two dialogues without a prompt column answer the same prompt, as far as their beginnings tell."""
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return chosen[0] == rejected[0]
    first_prompt, assistant, _ = chosen.partition(_ASSISTANT)
    return _HUMAN in first_prompt and bool(assistant) and rejected.startswith(first_prompt + assistant)


def _warn(message: str) -> None:
    rank_zero_only(_log.warning)(message)
