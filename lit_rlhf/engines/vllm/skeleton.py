"""The folder that vLLM is built from: what kind of model it is and its tokenizer, without any weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lit_rlhf.models.layouts import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_skeleton(policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> dict[str, Any]:
    """Write configuration and tokenizer.

    Args:
        policy: A Hugging Face model or a peft model around one.
        tokenizer: Without it vLLM can look for no stop strings.
        folder: Exists.

    Returns:
        The configuration, for :func:`same_architecture`.
    """
    config = copy.deepcopy(base_of(policy).config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the policy's own copy of the weights; vLLM gets them whole
    config.architectures = [_class_name(policy)]
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return _architecture(policy)


def same_architecture(config: dict[str, Any], policy: nn.Module) -> bool:
    """Whether a policy's weights fit into the model that was made from a configuration.

    Args:
        config: Of :func:`write_skeleton`.
        policy: The one to sample from now.
    """
    return config == _architecture(policy)


def _architecture(policy: nn.Module) -> dict[str, Any]:
    weights = {name: tuple(weight.shape) for name, weight in base_of(policy).named_parameters() if "lora_" not in name}
    return {"class": _class_name(policy), "weights": weights}


def _class_name(policy: nn.Module) -> str:
    """FSDP2 puts a class of its own over the model's."""
    return next(cls.__name__ for cls in type(base_of(policy)).__mro__ if "FSDP" not in cls.__name__)
