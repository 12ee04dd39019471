"""Base models in 8 or 4 bits with bitsandbytes: how one is loaded, and how it is made whole again.

Sources: Dettmers et al., *LLM.int8()* (arXiv 2208.07339) and *QLoRA* (arXiv 2305.14314).
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["8bit", "4bit"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


def require_bitsandbytes(option: str) -> None:
    """Refuse an option that needs bitsandbytes where it is not installed.

    Args:
        option: As the user wrote it.

    Raises:
        ConfigurationError: Naming the option and the package.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigurationError(f"{option} needs bitsandbytes, which is not installed: pip install bitsandbytes")


def quantization_options(
    kind: Quantization, dtype: torch.dtype, device: torch.device | None = None, keep: Sequence[str] | None = None
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load the linear layers in fewer bits.

    4 bits are NF4 with quantised constants, as in QLoRA: 4.13 bits per weight. 8 bits scale each row of the weights and
    of the activations by itself: LLM.int8()'s outlier columns are those of a whole batch, so that what a completion is
    worth would depend on the others that it is run with.

    Args:
        kind: ``8bit`` or ``4bit``.
        dtype: Type that is computed in, and of the layers that stay as they are.
        device: Where the model is put while it is loaded; the CPU by default.
        keep: Layers that stay as they are, by a part of their name; the vocabulary head by default.
    """
    from transformers import BitsAndBytesConfig

    # It says in each pass of each layer that activations become float16 on the way to 8 bits.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    bits: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
    if kind == "4bit":
        bits = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }
    config = BitsAndBytesConfig(llm_int8_skip_modules=None if keep is None else list(keep), **bits)
    return {"quantization_config": config, "device_map": {"": device or torch.device("cpu")}}


def steady(model: nn.Module) -> None:
    """Have quantised layers compute the same in evaluation as in training.

    On a CPU bitsandbytes rounds activations to 8 bits in evaluation mode, but not in training. And where the CPU knows
    AVX512-BF16, it repacks 4-bit weights at their first use in evaluation mode and rounds their scales to bfloat16, for
    good: the frozen base would move. With either a rollout's log-probs would not be the trainer's.

    Args:
        model: Just loaded; one without such layers stays as it is.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010
        if hasattr(module, "init_8bit_state"):
            module.register_forward_pre_hook(_as_in_training)


def _as_in_training(layer: nn.Module, arguments: Any) -> None:
    """A layer in 8 bits looks at its mode for nothing else."""
    layer.training = True


def is_quantized(model: nn.Module) -> bool:
    """Whether a model's layers are quantised.

    Args:
        model: A Hugging Face model, or a peft model around one.
    """
    from lit_rlhf.models.layouts import base_of

    return bool(getattr(base_of(model), "is_quantized", False))


def dequantized_base(model: nn.Module) -> PreTrainedModel:
    """A new model on the CPU with the weights that a quantised one computes with, in float32.

    Args:
        model: A quantised Hugging Face model with adapters in it, which are left out, or without; it stays as it is.
    """
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    from lit_rlhf.models.layouts import base_of

    base = base_of(model)
    config = copy.deepcopy(base.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.generation_config = copy.deepcopy(base.generation_config)
    layers = {_without_wrappers(name): layer for name, layer in base.named_modules()}
    with torch.no_grad():
        for name, own in plain.named_modules():
            source: Any = layers[name]
            for kind, parameter in own.named_parameters(recurse=False):
                value = getattr(source, kind)
                if kind == "weight":
                    value = _whole_weight(source)
                    # GPT-2's layers become linear ones when they are quantised, whose weights lie the other way round.
                    value = value.T if isinstance(own, Conv1D) and not isinstance(source, Conv1D) else value
                parameter.copy_(value)
    return plain


def _whole_weight(layer: Any) -> Tensor:
    """A layer's weight as it is computed with; the layer stays as it is."""
    weight = layer.weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state)
    if weight.dtype == torch.int8:
        # Once it was used, bitsandbytes keeps the scales, each row's largest weight, beside the layer.
        scales = weight.SCB if layer.state.SCB is None else layer.state.SCB
        return weight.data.float() * (scales.float() / 127)[:, None]
    return weight


def _without_wrappers(name: str) -> str:
    """Name of a layer in the plain model; adapters keep it in ``base_layer`` or ``original_module``."""
    return name.replace(".base_layer", "").replace(".original_module", "")
