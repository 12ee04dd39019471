"""What every DataModule of prompts shares: where they are, and how rows become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L

from lit_rlhf.data.formats import Format
from lit_rlhf.data.prompts import PromptDataset, load_prompts, read_prompts
from lit_rlhf.data.reading import check_prompt_options
from lit_rlhf.data.source import PromptSource
from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataModule(L.LightningDataModule):
    """Sources of prompts and how they are read.

    Args:
        train: Prompts to train on.
        val: Held-out prompts for ``validate`` and during ``fit``.
        test: Held-out prompts for ``test`` and ``predict``; ``val`` by default.
        train_split: Which split of ``train``, where it is a dataset or folder with several.
        val_split: Which split of ``val``.
        test_split: Which split of ``test``.
        format: Published layout of the rows: it says where the prompt is and adds the reference answer alone as
            ``gold``.
        prompt_column: Column with the prompt, text or a list of chat messages; the format's, else ``prompt``.
        prompt_template: Jinja template that makes the prompt from the columns, instead.
        as_chat: Make a user's chat message of a prompt that is text.
        system_prompt: Put before chat messages that have no system message of their own.
        chat_template_options: Variables for the chat template, such as ``{enable_thinking: false}``.
        max_prompt_length: Longest prompt in tokens.
        overlong_prompts: ``drop`` longer prompts, ``cut`` the middle of the user's message (either is counted and
            said), or ``error``.
        bad_prompts: ``error`` refuses a source with a row that gives no prompt; ``drop`` leaves it out, counted and
            said.
        drop_duplicates: Leave out rows whose prompt was there before; by default where the format is known for that.
    """

    def __init__(
        self,
        train: str | Path | PromptSource | Sequence[Any] | None = None,
        val: str | Path | PromptSource | Sequence[Any] | None = None,
        test: str | Path | PromptSource | Sequence[Any] | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        test_split: str | None = None,
        format: Format | None = None,
        prompt_column: str | None = None,
        prompt_template: str | None = None,
        as_chat: bool = False,
        system_prompt: str | None = None,
        chat_template_options: dict[str, Any] | None = None,
        max_prompt_length: int | None = None,
        overlong_prompts: Literal["drop", "cut", "error"] = "drop",
        bad_prompts: Literal["error", "drop"] = "error",
        drop_duplicates: bool | None = None,
    ) -> None:
        super().__init__()
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ConfigurationError(f"max_prompt_length must be at least 1, got {max_prompt_length}")
        check_prompt_options(format, prompt_column, prompt_template)
        own_test = test is not None
        self.sources = {"train": train, "val": val, "test": test if own_test else val}
        self.splits = {"train": train_split, "val": val_split, "test": test_split if own_test else val_split}
        self.format = format
        self.prompt_column = prompt_column
        self.prompt_template = prompt_template
        self.as_chat = as_chat
        self.system_prompt = system_prompt
        self.chat_template_options = chat_template_options
        self.max_prompt_length = max_prompt_length
        self.overlong_prompts = overlong_prompts
        self.bad_prompts = bad_prompts
        self.drop_duplicates = drop_duplicates

    def load_prompts(self, split: str, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """Read and tokenize the prompts of a split; what is left out is said.

        Args:
            split: ``train``, ``val`` or ``test``.
            tokenizer: The policy's.

        Raises:
            DataError: Something in the source cannot be used.
        """
        options = self._options(split)
        return load_prompts(self.sources[split], tokenizer, bad_prompts=self.bad_prompts, **options)

    def read_prompts(self, split: str, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """The same, with all that cannot be used noted in the result.

        Args:
            split: ``train``, ``val`` or ``test``.
            tokenizer: The policy's.

        Raises:
            DataError: The source cannot be read at all, or lacks a column.
        """
        return read_prompts(self.sources[split], tokenizer, **self._options(split))

    def _options(self, split: str) -> dict[str, Any]:
        return {
            "split": self.splits[split],
            "format": self.format,
            "prompt_column": self.prompt_column,
            "prompt_template": self.prompt_template,
            "as_chat": self.as_chat,
            "system_prompt": self.system_prompt,
            "chat_template_options": self.chat_template_options,
            "max_prompt_length": self.max_prompt_length,
            "overlong": self.overlong_prompts,
            "drop_duplicates": self.drop_duplicates,
        }
