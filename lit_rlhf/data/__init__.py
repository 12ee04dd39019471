"""Files and datasets to prompts and training examples; imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_rlhf.data.encoding import encode_prompt
    from lit_rlhf.data.preferences import PreferenceDataModule
    from lit_rlhf.data.prompt_datamodule import PromptDataModule
    from lit_rlhf.data.prompts import Prompt, PromptDataset, load_prompts
    from lit_rlhf.data.reasoning_gym import ReasoningGym
    from lit_rlhf.data.rows import Rows, read_rows
    from lit_rlhf.data.source import PromptSource
    from lit_rlhf.data.supervised import SupervisedDataModule

__all__ = [
    "PreferenceDataModule",
    "Prompt",
    "PromptDataModule",
    "PromptDataset",
    "PromptSource",
    "ReasoningGym",
    "Rows",
    "SupervisedDataModule",
    "encode_prompt",
    "load_prompts",
    "read_rows",
]

_HOMES = {
    "PreferenceDataModule": "preferences",
    "Prompt": "prompts",
    "PromptDataModule": "prompt_datamodule",
    "PromptDataset": "prompts",
    "PromptSource": "source",
    "ReasoningGym": "reasoning_gym",
    "encode_prompt": "encoding",
    "load_prompts": "prompts",
    "Rows": "rows",
    "read_rows": "rows",
    "SupervisedDataModule": "supervised",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
