"""The policy of a checkpoint on the CPU: without the module's reference, critic and optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlhf.errors import CheckpointError
from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.loading import load_causal_lm, load_config
from lit_rlhf.models.lora import POLICY_ADAPTER, REFERENCE_ADAPTER, VALUE_ADAPTER
from lit_rlhf.models.quantization import dequantized_base
from lit_rlhf.modules.causal_lm import CausalLMModule
from lit_rlhf.modules.pretrained import DTYPES, PretrainedModule


@dataclass(frozen=True)
class RestoredPolicy:
    """A trained policy, ready to be written.

    Args:
        model: A Hugging Face model with its weights, or a peft model of whose weights the adapter's alone are there.
        adapter: Whether it is the latter.
        adapter_rank: Of the adapter in the run, merged by now or not; 0 without one.
    """

    model: Any
    adapter: bool
    adapter_rank: int

    @property
    def kind(self) -> str:
        """What it is, in a few words."""
        if self.adapter:
            return f"Adapter of rank {self.adapter_rank}"
        return f"Policy with its adapter of rank {self.adapter_rank} merged" if self.adapter_rank else "Policy"

    @property
    def dtype(self) -> str:
        """Type of the weights, in torch's word."""
        return str(next(p.dtype for p in self.model.parameters() if not p.is_meta)).removeprefix("torch.")

    @property
    def num_parameters(self) -> int:
        """Of what is written."""
        return sum(parameter.numel() for parameter in self.model.parameters() if not parameter.is_meta)

    def save(self, folder: Path, max_shard_size: str) -> None:
        """Write the weights and what describes them.

        Args:
            folder: Existing.
            max_shard_size: Of a file of weights, such as ``5GB``. An adapter is one file.
        """
        if self.adapter:
            self.model.save_pretrained(folder, selected_adapters=[POLICY_ADAPTER])
        else:
            self.model.save_pretrained(folder, max_shard_size=max_shard_size)


def restore_policy(
    hparams: Mapping[str, Any], weights: dict[str, Tensor], merge: bool, dtype: torch.dtype | None = None
) -> RestoredPolicy:
    """Put a checkpoint's weights back into the model they were trained in.

    The base's weights are read only where an adapter is to be merged and the checkpoint does not hold them.

    Args:
        hparams: The module's hyperparameters; ``policy`` names the base model.
        weights: Of the policy, by name.
        merge: Merge the adapter into its base.
        dtype: Of the written weights; as they were trained by default. An adapter is merged before it is rounded.

    Raises:
        CheckpointError: The weights are not those of this model.
    """
    module = CausalLMModule(**_known(hparams))
    others = f".{VALUE_ADAPTER}.", f".{REFERENCE_ADAPTER}."  # adapters on the same base
    weights = {name: value for name, value in weights.items() if not any(other in name for other in others)}
    skeleton = _skeleton(module)
    unexpected = skeleton.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    if unexpected or not weights:
        what = f"{unexpected[0]!r} is no weight of it" if unexpected else "there are none"
        raise CheckpointError(f"the checkpoint's weights do not fit {module.model_name} ({what})")
    base_of(skeleton).tie_weights()
    absent = sorted(name for name, parameter in skeleton.named_parameters() if parameter.is_meta)
    if not module.lora_rank:
        _refuse_incomplete(module, absent)
        return RestoredPolicy(_cast(skeleton, dtype), False, 0)
    _refuse_incomplete(module, [name for name in absent if f".{POLICY_ADAPTER}." in name])
    if not merge:
        config: Any = skeleton.peft_config[POLICY_ADAPTER]  # type: ignore[index]
        config.base_model_name_or_path = _lasting(module.model_name)
        config.task_type = "CAUSAL_LM"
        return RestoredPolicy(_cast(skeleton, dtype), True, module.lora_rank)
    dtype = dtype or DTYPES[module.dtype_name]
    if absent:
        adapter = {name: value for name, value in weights.items() if f".{POLICY_ADAPTER}." in name}
        skeleton = module.add_adapter(_whole_base(module), POLICY_ADAPTER)
        skeleton.load_state_dict(adapter, strict=False)
    return RestoredPolicy(merge_exactly(skeleton, dtype), False, module.lora_rank)


def merge_exactly(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Merge a model's adapter into its base in float32, layer by layer; each weight is rounded once.

    Args:
        model: A peft model with a policy adapter; it is used up.
        dtype: Of the merged weights.

    Returns:
        The Hugging Face model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            base = layer.get_base_layer()
            layer.float()
            layer.merge(adapter_names=[POLICY_ADAPTER])
            base.to(dtype)
    return model.unload().to(dtype)  # type: ignore[operator]


def _known(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that make the model; the others are an algorithm's."""
    names = {
        name
        for kind in (CausalLMModule, PretrainedModule)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return {"lr": 1.0, **{name: value for name, value in hparams.items() if name in names and name != "random_init"}}


def _skeleton(module: CausalLMModule) -> nn.Module:
    """The run's model without memory for its weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        config = load_config(module.model_name)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[module.dtype_name])
    with contextlib.suppress(OSError):  # the base has none
        model.generation_config = GenerationConfig.from_pretrained(module.model_name)
    with torch.device("meta"):
        return module.add_adapter(model, POLICY_ADAPTER) if module.lora_rank else model


def _whole_base(module: CausalLMModule) -> nn.Module:
    """The base with the weights that training computed with, quantised ones in float32."""
    base = load_causal_lm(module.model_name, dtype=DTYPES[module.dtype_name], quantization=module.quantization)
    return base if module.quantization is None else dequantized_base(base)


def _cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return model if dtype is None else model.to(dtype)


def _refuse_incomplete(module: CausalLMModule, absent: list[str]) -> None:
    if absent:
        raise CheckpointError(
            f"the checkpoint lacks {len(absent)} weights of {module.model_name}, the first is {absent[0]!r}"
        )


def _lasting(name: str) -> str:
    """A folder's path from the root: the adapter may be loaded from anywhere."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
