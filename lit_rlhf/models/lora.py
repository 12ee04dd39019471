"""Low-rank adapters: one for the policy, and one for a critic on the same base."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# peft writes the adapter of this name to the top of an exported folder, where plain transformers finds it.
POLICY_ADAPTER, VALUE_ADAPTER = "default", "value"


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    target_modules: str | Sequence[str] = "all-linear",
    adapter_name: str = POLICY_ADAPTER,
) -> PeftModel:
    """Freeze a model and train a low-rank adapter on it; at the start the adapter changes nothing.

    Args:
        model: A Hugging Face model, or a peft model that gets a further adapter.
        rank: Of the update.
        alpha: The update is scaled by ``alpha / rank``; twice the rank by default.
        target_modules: Names of the linear layers, or ``all-linear``.
        adapter_name: Of the adapter.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    # No dropout: log-probs at rollout and in training are compared.
    scale: Any = 2 * rank if alpha is None else alpha  # peft's annotation says int, its arithmetic takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=targets)
    if isinstance(model, PeftModel):
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        model.add_adapter(adapter_name, config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable or f".{adapter_name}." in name)
        return model
    return get_peft_model(model, config, adapter_name=adapter_name)


def is_adapted(model: nn.Module | None) -> bool:
    """Whether a model carries adapters.

    Args:
        model: Any module.
    """
    return hasattr(model, "peft_config")


def merged_model(model: nn.Module) -> PreTrainedModel:
    """A copy of the base with the policy's adapter merged in; the model itself, and other adapters, stay as they are.

    Args:
        model: A peft model.
    """
    return copy.deepcopy(model).cpu().merge_and_unload(adapter_names=[POLICY_ADAPTER])  # type: ignore[operator]


def _adapter_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that carry adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextlib.contextmanager
def active_adapter(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Run the block with one adapter active; afterwards the active one, and who is trained, is as before.

    Args:
        model: A peft model.
        adapter_name: Of the adapter.
    """
    layers = _adapter_layers(model)
    before = [list(layer.active_adapters) for layer in layers]
    for layer in layers:
        layer._active_adapter = [adapter_name]  # set_adapter would also freeze the others
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


def checkpoint_contexts(
    model: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Contexts of a checkpointed forward pass and of its recomputation, which must run with the same adapter.

    The backward pass runs after :func:`active_adapter` was left, so the adapter of the forward pass is noted here.

    Args:
        model: With or without adapters.
    """
    layers = _adapter_layers(model)
    recompute = active_adapter(model, layers[0].active_adapters[0]) if layers else contextlib.nullcontext()
    return contextlib.nullcontext(), recompute


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass of a Hugging Face model.

    Args:
        model: Before or after it gets adapters.
    """
    options = {"use_reentrant": False, "context_fn": functools.partial(checkpoint_contexts, model)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Run the block with the bare base model: the reference of an adapter that started at zero.

    Afterwards everything is as before, also when the block raises. (peft's own context leaves every adapter but the
    active one frozen.)

    Args:
        model: A peft model.
    """
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        with model.disable_adapter():  # type: ignore[operator]
            yield
    finally:
        for parameter, flag in trained.items():
            parameter.requires_grad_(flag)
