"""The policy's weights as a Hugging Face checkpoint has them, and a label that tells them from any others."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlhf.models.layouts import base_of
from lit_rlhf.models.lora import POLICY_ADAPTER, adapter_layers, is_adapted, merged_model
from lit_rlhf.models.quantization import dequantized_base, is_quantized
from lit_rlhf.strategies import is_shard, whole

_OF_THE_ADAPTER = f".{POLICY_ADAPTER}."
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_version(policy: nn.Module, separate: bool = False) -> str:
    """A label of the weights: another one as soon as any of them changes, the same in every process that has them.

    Read off the weights themselves, so that nothing can change them unseen: an optimizer, a checkpoint, a callback. (It
    sums bits: were the numbers of a tensor exchanged for one another, it would not notice.) It costs reading them once.
    Of sharded weights each process reads its own part, and all have to ask.

    Args:
        policy: A Hugging Face model or a peft model around one.
        separate: Label what is below the policy's adapter and the adapter each by itself.

    Returns:
        16 hexadecimal digits; where separate twice, with ``+`` between them.
    """
    if not separate:
        return _digest(policy.named_parameters())
    adapter = ((name, weight) for name, weight in policy.named_parameters() if _OF_THE_ADAPTER in name)
    return f"{_digest(_below(policy))}+{_digest(adapter)}"


def same_base(one: str | None, other: str) -> bool:
    """Whether the labels of two separately labelled versions say that only the adapter differs, if anything.

    Args:
        one: A label, if there is one.
        other: A label.
    """
    return one is not None and one.partition("+")[0] == other.partition("+")[0]


def _digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    names, sums, shards = [], [], []
    for name, weight in weights:
        shards.append(is_shard(weight))
        own: Any = weight.detach()
        own = own.to_local() if shards[-1] else own
        bits = own.contiguous().flatten().view(_INTEGERS[own.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
        names.append(name)
    found = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
    if any(shards):
        if torch.distributed.get_rank() != 0:  # what is whole on every process counts once
            found = found.where(torch.tensor(shards, device=found.device), torch.zeros_like(found))
        torch.distributed.all_reduce(found)
    return hashlib.sha256(repr(list(zip(names, found.tolist(), strict=True))).encode()).hexdigest()[:16]


def is_sharded(policy: nn.Module) -> bool:
    """Whether this process has but a part of the weights, so that all of them are needed to read one.

    Args:
        policy: Any model.
    """
    return any(is_shard(parameter) for parameter in policy.parameters())


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], folder: Path | None, file_bytes: int = 2**31) -> None:
    """Write weights as they come, never more of them in memory than go into a file.

    Args:
        weights: By their names in a checkpoint.
        folder: Is made, for safetensors files; without it the weights are only asked for.
        file_bytes: A file is closed once it has as much.
    """
    from safetensors.torch import save_file

    file: dict[str, Tensor] = {}
    size = number = 0
    failed: Exception | None = None

    def close() -> None:
        nonlocal size, number, failed
        assert folder is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(file, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        except Exception as error:  # other processes go on asking for shards, and so does this one
            failed = error
        file.clear()
        size, number = 0, number + 1

    for name, weight in weights:
        if folder is None or failed is not None:
            continue
        file[name] = weight.detach().to("cpu", copy=True).contiguous()
        size += file[name].nbytes
        if size >= file_bytes:
            close()
    if file:
        close()
    if failed is not None:
        raise failed


def checkpoint_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in a checkpoint, the policy's adapter merged in; the policy stays as it is.

    A layer is merged in a copy of its own, so that no second model is ever in memory. (A quantised model is the
    exception: it is made whole first.) Sharded weights are gathered one at a time; all processes have to ask.

    Args:
        policy: A Hugging Face model or a peft model around one.
    """
    if is_adapted(policy) and is_quantized(policy):
        policy = merged_model(policy)
    base = base_of(policy)
    layers = set(adapter_layers(policy))
    adapted = {layer: name for name, layer in base.named_modules() if layer in layers}
    inside = tuple(f"{name}." for name in adapted.values())
    for name, parameter in _every_name(base):
        if not name.startswith(inside):
            yield name, whole(parameter).detach()
    for layer, name in adapted.items():
        for own, parameter in _merged(layer).named_parameters():
            yield f"{name}.{own}", parameter.detach()


def base_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights below the adapters, by their names in a checkpoint.

    Args:
        policy: A peft model. Sharded weights are gathered one at a time; all processes have to ask.
    """
    source = dequantized_base(policy).named_parameters() if is_quantized(policy) else _below(policy)
    for name, parameter in source:
        yield name, whole(parameter).detach()


def _below(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights that belong to no adapter, as they are."""
    base, layers = base_of(policy), set(adapter_layers(policy))
    inside = tuple(f"{name}." for name, layer in base.named_modules() if layer in layers)
    for name, parameter in _every_name(base):
        if not name.startswith(inside):
            yield name, parameter
        elif ".base_layer." in name:
            yield name.replace(".base_layer.", "."), parameter


def _every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights by all of their names: of a tied head vLLM may keep a copy in another form."""
    return model.named_parameters(remove_duplicate=False)


def _merged(layer: Any) -> nn.Module:
    """The plain layer that a layer with the policy's adapter amounts to."""
    if hasattr(layer, "modules_to_save"):
        return _whole_copy(layer.modules_to_save[POLICY_ADAPTER])
    with torch.no_grad():
        single = _whole_copy(layer)
        single.merge(adapter_names=[POLICY_ADAPTER])
    plain: nn.Module = single.get_base_layer()
    return plain


def _whole_copy(layer: nn.Module) -> Any:
    """A copy of a layer that has its weights in one piece."""
    single = copy.deepcopy(layer)
    for module in single.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_shard(parameter):
                setattr(module, name, nn.Parameter(whole(parameter), requires_grad=False))
    return single
