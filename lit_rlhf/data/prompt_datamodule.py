"""What every DataModule of prompts shares: where they are, and how rows become token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import lightning as L

from lit_rlhf.data.formats import Format
from lit_rlhf.data.prompts import PromptDataset, load_prompts, read_prompts
from lit_rlhf.data.reading import check_prompt_options
from lit_rlhf.data.rows import is_hugging_face
from lit_rlhf.data.source import PromptSource
from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A set's name is part of the names of metrics and files.
_SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


HeldOutSource = str | Path | PromptSource | Sequence[Any] | dict[str, str | Path | PromptSource | Sequence[Any]] | None


class PromptDataModule(L.LightningDataModule):
    """Sources of prompts and how they are read.

    Args:
        train: Prompts to train on.
        val: Held-out prompts for ``validate`` and during ``fit``; several data sets as a mapping of names to sources.
        test: Held-out prompts for ``test`` and ``predict``, the same way; ``val`` by default.
        train_split: Which split of ``train``, where it is a dataset or folder with several.
        val_split: Which split of ``val``, of each of its data sets.
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
        val: HeldOutSource = None,
        test: HeldOutSource = None,
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
        for split, source in (("val", val), ("test", test)):
            if _is_several(source):
                _check_set_names(split, source, prompt_column or "prompt")
        own_test = test is not None
        self.sources: dict[str, Any] = {"train": train, "val": val, "test": test if own_test else val}
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

    def parts(self, split: str) -> list[str]:
        """Names of the data sets of a split: ``val``, or ``val/sums`` and ``val/words`` where it names several.

        Args:
            split: ``train``, ``val`` or ``test``.
        """
        source = self.sources[split]
        if source is None:
            return []
        return [f"{split}/{name}" for name in source] if _is_several(source) else [split]

    def source_of(self, part: str) -> Any:
        """Where the prompts of a data set are.

        Args:
            part: One of :meth:`parts`.
        """
        split, _, name = part.partition("/")
        return self.sources[split][name] if name else self.sources[split]

    def load_prompts(self, part: str, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """Read and tokenize the prompts of a data set; what is left out is said.

        Args:
            part: One of :meth:`parts`.
            tokenizer: The policy's.

        Raises:
            DataError: Something in the source cannot be used.
        """
        options = self._options(part)
        return load_prompts(self.source_of(part), tokenizer, bad_prompts=self.bad_prompts, **options)

    def read_prompts(self, part: str, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
        """The same, with all that cannot be used noted in the result.

        Args:
            part: One of :meth:`parts`.
            tokenizer: The policy's.

        Raises:
            DataError: The source cannot be read at all, or lacks a column.
        """
        return read_prompts(self.source_of(part), tokenizer, **self._options(part))

    def _options(self, part: str) -> dict[str, Any]:
        return {
            "split": self.splits[part.partition("/")[0]],
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


def _is_several(source: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a source is a mapping of names to sources, not one of a dataset's splits."""
    return isinstance(source, Mapping) and not is_hugging_face(source)


def _check_set_names(split: str, source: Mapping[Any, Any], prompt_column: str) -> None:
    if prompt_column in source:
        raise ConfigurationError(
            f"{split}: a mapping names data sets, but this one has a column {prompt_column!r}: pass a list of "
            "mappings, one per row"
        )
    if "class_path" in source:
        raise ConfigurationError(
            f"{split}: {source['class_path']} is no class of a PromptSource, or not with these options"
        )
    for name, part in source.items():
        if not _SET_NAME.fullmatch(str(name)):
            raise ConfigurationError(
                f"{split}: the name {name!r} of a data set becomes part of names of metrics and files: letters, "
                "digits, _, . and - only"
            )
        if part is None:
            raise ConfigurationError(f"{split}: the data set {name!r} has no source")
    if not source:
        raise ConfigurationError(f"{split}: names no data set; leave it out for none")
