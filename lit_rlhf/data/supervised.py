"""Prompts with given completions, for supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_rlhf.data.encoding import CHUNK, encode_prompt, encode_together
from lit_rlhf.data.rows import Rows, read_rows
from lit_rlhf.errors import ConfigurationError, DataError
from lit_rlhf.functional.masking import mask_from_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One prompt with its completion.

    Attributes:
        ids: Token ids of the prompt, the completion and the end-of-sequence token, without padding.
        prompt_length: How many of them belong to the prompt.
    """

    ids: tuple[int, ...]
    prompt_length: int


class ExampleDataset(Dataset):
    """Examples tokenized once, in the order of their source."""

    def __init__(self, examples: Sequence[Example], name: str) -> None:
        self.examples = tuple(examples)
        self.name = name

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, position: int) -> Example:
        return self.examples[position]


class SupervisedDataModule(L.LightningDataModule):
    """Batches of prompts and completions, tokenized once with the tokenizer of the module under training.

    Each row becomes the prompt's ids (as at rollout time), the completion's ids and the end-of-sequence token. A batch
    is a dict of ``input_ids`` ``(N, L)`` int64, padded on the right, ``attention_mask`` ``(N, L)`` bool, True = a real
    token, and ``completion_mask`` ``(N, L)`` bool, True = a token of the completion or its end-of-sequence token.

    Args:
        train: Source of the training rows: a file, a folder of Hugging Face datasets, a dataset or a list of mappings.
        val: Source of the validation rows.
        prompt_column: Column with the prompt, a string or a list of messages.
        completion_column: Column with the completion, a string or a list of one message from the assistant.
        batch_size: Rows in a training batch on each rank.
        val_batch_size: Rows in a validation batch on each rank; ``batch_size`` by default.
        max_length: Longest row allowed, in tokens with the end-of-sequence token; longer rows are left out with a
            warning, none is ever cut.
        num_workers: Worker processes that pad batches; the rows are tokenized already, so 0 is usually fastest.
        seed: Of the order in which training rows are drawn.
    """

    def __init__(
        self,
        train: Any,
        val: Any = None,
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        batch_size: int = 32,
        val_batch_size: int | None = None,
        max_length: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for option, value in (
            ("batch_size", batch_size),
            ("val_batch_size", val_batch_size),
            ("max_length", max_length),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} must be at least 1, got {value}")
        self.train = train
        self.val = val
        self.prompt_column = prompt_column
        self.completion_column = completion_column
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.max_length = max_length
        self.num_workers = num_workers
        self.seed = seed
        self._pad_id = 0
        self._train: ExampleDataset | None = None
        self._val: ExampleDataset | None = None

    def setup(self, stage: str) -> None:
        """Read and tokenize what the stage needs, once.

        Raises:
            DataError: A source, a column or a row cannot be used.
            ConfigurationError: The module has no tokenizer, or the tokenizer no end-of-sequence token.
        """
        module = self.trainer.lightning_module if self.trainer else None
        tokenizer = getattr(module, "tokenizer", None)
        if tokenizer is None:
            raise ConfigurationError("SupervisedDataModule needs a module with a tokenizer, such as SFTModule")
        # Padding never counts, so any id will do; the vocabulary is left as it is.
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        if stage == "fit" and self._train is None:
            self._train = self._load(self.train, tokenizer)
        if stage in ("fit", "validate") and self.val is not None and self._val is None:
            self._val = self._load(self.val, tokenizer)

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches; the order depends on ``seed`` and on how many epochs this run has drawn."""
        assert self._train is not None
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self._train, self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches in the order of the source; none without ``val``."""
        return [] if self._val is None else self._loader(self._val, self.val_batch_size or self.batch_size)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Pad on the right; the masks come from the lengths.

        Args:
            examples: N examples.

        Returns:
            ``input_ids``, ``attention_mask`` and ``completion_mask``, each ``(N, L)``, L the longest example.
        """
        lengths = torch.tensor([len(example.ids) for example in examples])
        width = int(lengths.max())
        ids = torch.tensor([[*example.ids, *[self._pad_id] * (width - len(example.ids))] for example in examples])
        attention_mask = mask_from_lengths(lengths, width)
        prompt_mask = mask_from_lengths(torch.tensor([example.prompt_length for example in examples]), width)
        return {"input_ids": ids, "attention_mask": attention_mask, "completion_mask": attention_mask & ~prompt_mask}

    def _loader(self, dataset: ExampleDataset, batch_size: int, **options: Any) -> DataLoader:
        return DataLoader(
            dataset, batch_size=batch_size, collate_fn=self.collate, num_workers=self.num_workers, **options
        )

    def _load(self, source: Any, tokenizer: PreTrainedTokenizerBase) -> ExampleDataset:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError("the tokenizer has no end-of-sequence token, so the model could not learn to stop")
        rows = read_rows(source)
        for option, column in (("prompt_column", self.prompt_column), ("completion_column", self.completion_column)):
            if column not in rows.columns:
                raise DataError(
                    f"{rows.name}: there is no column {column!r}. It has {', '.join(map(repr, rows.columns))}; "
                    f"name the right one with the option `{option}`"
                )
        prompts = _encode_prompts(rows, self.prompt_column, tokenizer)
        completions = _encode_completions(rows, self.completion_column, tokenizer)
        examples = [
            Example((*prompt, *completion, tokenizer.eos_token_id), len(prompt))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if self.max_length is not None:
            kept = [example for example in examples if len(example.ids) <= self.max_length]
            dropped = f"{len(examples) - len(kept)} of {len(examples)} rows longer than {self.max_length} tokens"
            if not kept:
                raise DataError(f"{rows.name}: {dropped}, none is left; raise `max_length`")
            if len(kept) < len(examples):
                longest = max(len(example.ids) for example in examples)
                rank_zero_only(_log.warning)(f"{rows.name}: {dropped} dropped, longest {longest}")
            examples = kept
        return ExampleDataset(examples, rows.name)


def _encode_prompts(rows: Rows, column: str, tokenizer: PreTrainedTokenizerBase) -> list[Sequence[int]]:
    values: list[Any] = [row.get(column) for row in rows.rows]
    texts: dict[int, Any] = {index: value for index, value in enumerate(values) if isinstance(value, str) and value}
    together = encode_together(tokenizer, texts)
    encoded: list[Sequence[int]] = []
    for index, value in enumerate(values):
        try:
            encoded.append(together.get(index) or encode_prompt(tokenizer, value))
        except DataError as error:
            raise DataError(f"{rows.where(index)}, column {column!r}: {error}") from error
    return encoded


def _encode_completions(rows: Rows, column: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts: list[str] = []
    for index, row in enumerate(rows.rows):
        value = row.get(column)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0].get("content") if value[0].get("role") == "assistant" else value
        if not isinstance(value, str):
            raise DataError(
                f"{rows.where(index)}, column {column!r}: the completion is {value!r} ({type(value).__name__}); "
                "a string or a list of one message from the assistant is wanted"
            )
        texts.append(value)
    encoded: list[list[int]] = []
    for start in range(0, len(texts), CHUNK):
        encoded += tokenizer(texts[start : start + CHUNK], add_special_tokens=False)["input_ids"]
    return encoded
