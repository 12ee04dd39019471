"""Low-rank adapters of one frozen base: the policy's, a critic's, and the one that the policy started from."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.loading import first_line
from lit_rlhf.models.quantization import dequantized_base, is_quantized

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# peft writes the adapter of this name to the top of an exported folder, where plain transformers finds it.
POLICY_ADAPTER, VALUE_ADAPTER, REFERENCE_ADAPTER = "default", "value", "reference"


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    target_modules: str | Sequence[str] = "all-linear",
    adapter_name: str = POLICY_ADAPTER,
    **options: Any,
) -> PeftModel:
    """Freeze a model and train a low-rank adapter on it; at the start the adapter changes nothing.

    Args:
        model: A Hugging Face model, or a peft model that gets a further adapter.
        rank: Of the update.
        alpha: The update is scaled by ``alpha / rank``; twice the rank by default.
        target_modules: Names of the linear layers, or ``all-linear``.
        adapter_name: Of the adapter.
        options: Further ones of ``peft.LoraConfig``.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    # No dropout: log-probs at rollout and in training are compared.
    scale: Any = 2 * rank if alpha is None else alpha  # peft's annotation says int, its arithmetic takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=targets, **options)
    if isinstance(model, PeftModel):
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        with _explained(targets):
            model.add_adapter(adapter_name, config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable or f".{adapter_name}." in name)
        return model
    with _explained(targets):
        return get_peft_model(model, config, adapter_name=adapter_name)


def load_adapter_weights(model: nn.Module, folder: str | Path, adapter_name: str = POLICY_ADAPTER) -> None:
    """Give an adapter the weights of a saved one.

    Args:
        model: A peft model with an adapter of that name, made from the options of the saved one.
        folder: As peft's ``save_pretrained`` writes it.
        adapter_name: Of the adapter.

    Raises:
        ConfigurationError: There are no weights, or they are another model's.
    """
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
    from safetensors import SafetensorError

    try:
        weights = load_peft_weights(str(folder), device="cpu")
        found: Any = set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigurationError(
            f"adapter {str(folder)!r} cannot be loaded into this policy: {first_line(error)}"
        ) from error
    missing = [name for name in found.missing_keys if adapter_name in name.split(".")]
    if missing or found.unexpected_keys:
        name = [*missing, *found.unexpected_keys][0]
        raise ConfigurationError(
            f"adapter {str(folder)!r} does not fit this policy: {len(missing)} of its weights are missing, "
            f"{len(found.unexpected_keys)} have no place, for instance {name}"
        )


def freeze_adapter(model: nn.Module, adapter_name: str) -> None:
    """Exclude an adapter from training.

    Args:
        model: A peft model.
        adapter_name: Of the adapter.
    """
    for name, parameter in model.named_parameters():
        if adapter_name in name.split("."):
            parameter.requires_grad_(False)


@contextlib.contextmanager
def _explained(targets: str | list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(f"lora_target_modules={targets!r} cannot be adapted: {error}") from error


def is_adapted(model: nn.Module | None) -> bool:
    """Whether a model carries adapters.

    Args:
        model: Any module.
    """
    return hasattr(model, "peft_config")


def merged_model(model: nn.Module) -> PreTrainedModel:
    """A copy of the base with the policy's adapter merged in; the model itself, and other adapters, stay as they are.

    A quantised base is made whole first and merged into in float32: rounded to 4 bits again, the sum would lose a good
    part of the adapter. The result has the type that the quantised model computes in.

    Args:
        model: A peft model.
    """
    if not is_quantized(model):
        return copy.deepcopy(model).cpu().merge_and_unload(adapter_names=[POLICY_ADAPTER])  # type: ignore[operator]
    from peft import get_peft_model
    from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict

    config: Any = copy.deepcopy(model.peft_config[POLICY_ADAPTER])  # type: ignore[index]
    adapter = get_peft_model_state_dict(model, adapter_name=POLICY_ADAPTER)
    whole: Any = get_peft_model(dequantized_base(model), config, adapter_name=POLICY_ADAPTER)
    set_peft_model_state_dict(whole, {name: value.cpu() for name, value in adapter.items()}, POLICY_ADAPTER)
    return whole.merge_and_unload(adapter_names=[POLICY_ADAPTER]).to(model.get_base_model().dtype)  # type: ignore[operator]


def adapter_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of a model that carry adapters, or copies of their own (``modules_to_save``).

    Args:
        model: With or without adapters.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper))


@contextlib.contextmanager
def active_adapter(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Run the block with one adapter active; afterwards the active one, and who is trained, is as before.

    Args:
        model: A peft model.
        adapter_name: Of the adapter.
    """
    layers = list(adapter_layers(model))
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = adapter_name  # set_adapter would also freeze the others
    try:
        yield
    finally:
        for layer, name in zip(layers, before, strict=True):
            layer._active_adapter = name


def checkpoint_contexts(
    model: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Contexts of a checkpointed forward pass and of its recomputation, which must run with the same adapter.

    The backward pass runs after :func:`active_adapter` was left, so the adapter of the forward pass is noted here.

    Args:
        model: With or without adapters.
    """
    layer = next(adapter_layers(model), None)  # each layer of each pass asks: none walks through all of them
    recompute = contextlib.nullcontext() if layer is None else active_adapter(model, layer.active_adapters[0])
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
