"""The shape of a causal language model: what its memory depends on, without its weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder.

    Args:
        name: In the model.
        inputs: Features.
        outputs: Features.
    """

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """What a causal language model's memory depends on.

    Args:
        parameters: Numbers, tied ones once.
        head: Numbers of the vocabulary head that are not the embedding's.
        hidden: ``H``.
        vocabulary: ``V``.
        layers: Of the decoder.
        layer: Numbers of the largest layer.
        keys_and_values: Numbers that the cache holds per token, over all layers.
        heads: Attention heads.
        attention: Numbers of all their outputs.
        linears: Linear layers of the decoder.
    """

    parameters: int
    head: int
    hidden: int
    vocabulary: int
    layers: int
    layer: int
    keys_and_values: int
    heads: int
    attention: int
    linears: tuple[Linear, ...]

    @property
    def linear_numbers(self) -> int:
        """Weights of the linear layers, which are those that can be quantised."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def outside(self) -> int:
        """Numbers in no layer: embeddings, last norm, vocabulary head."""
        return self.parameters - self.layers * self.layer

    @property
    def widest(self) -> int:
        """Outputs of the widest linear layer."""
        return max((linear.outputs for linear in self.linears), default=self.hidden)

    @property
    def activations(self) -> int:
        """Numbers of each token that a backward pass needs.

        What goes in and out of linear layers, and in each layer what comes out of the activation function; norms and
        residual sums are among them.
        """
        return sum(linear.inputs + linear.outputs for linear in self.linears) + self.layers * self.widest

    def adapted(self, targets: str | Sequence[str] | None = "all-linear") -> tuple[Linear, ...]:
        """The linear layers that get an adapter.

        Args:
            targets: As ``peft.LoraConfig`` has them; without, all of them are counted.
        """
        if targets is None or targets == "all-linear":
            return self.linears
        if isinstance(targets, str):
            return tuple(linear for linear in self.linears if re.fullmatch(targets, linear.name))
        return tuple(
            linear
            for linear in self.linears
            if any(linear.name == name or linear.name.endswith(f".{name}") for name in targets)
        )


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The shape of a causal language model, built on torch's ``meta`` device.

    Args:
        config: Of the model, of any size.

    Raises:
        ConfigurationError: It is no configuration of a decoder with attention.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return _shape(model, config.get_text_config())
    except (AttributeError, TypeError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"the shape of a {type(config).__name__} cannot be read ({reason})") from error


def _shape(model: Any, text: Any) -> ModelShape:
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    blocks = [module for module in model.modules() if type(module).__name__ in set(model._no_split_modules or ())]
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        head=0 if head is None or tied else head.weight.numel(),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        layer=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
        keys_and_values=2 * text.num_hidden_layers * key_heads * dim,
        heads=heads,
        attention=heads * dim,
        linears=tuple(_linears(model, head)),
    )


def classifier_numbers(config: PretrainedConfig) -> tuple[int, int]:
    """Numbers of a sequence classifier, and those among them that can be quantised.

    Args:
        config: Of the model.
    """
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    linears = _linears(model, getattr(model, "score", None))
    return sum(p.numel() for p in model.parameters()), sum(linear.inputs * linear.outputs for linear in linears)


def _linears(model: nn.Module, head: nn.Module | None) -> list[Linear]:
    from transformers.pytorch_utils import Conv1D

    found = []
    for name, module in model.named_modules():
        if module is head or not isinstance(module, nn.Linear | Conv1D):
            continue
        rows, columns = module.weight.shape
        inputs, outputs = (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)
        found.append(Linear(name, inputs, outputs))
    return found
