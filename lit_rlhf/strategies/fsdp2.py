"""FSDP2, Lightning's ``ModelParallelStrategy``: each rank keeps a shard of every parameter.

Source: torch.distributed.fsdp (``fully_shard``); Zhao et al., arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.strategies.in_step import announce, gathering_each_pass

if TYPE_CHECKING:
    import lightning as L
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

RolloutWeights = Literal["whole", "sharded"]
ROLLOUT_WEIGHTS: tuple[str, ...] = get_args(RolloutWeights)

_INSIDE = "lit_rlhf_inside"


def shard_module(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters over the ranks of a mesh.

    The layers that transformers never splits over devices are gathered one at a time; what is left, embeddings, last
    norm and vocabulary head, with the model itself. Adapters are sharded with the layers they sit in.

    Args:
        model: A Hugging Face model, or any other module, which is gathered as a whole; one that is sharded already
            stays as it is. Of a peft model give the base inside it: sharded from the outside, its forward pass would
            mix whole and sharded parameters.
        mesh: Of one dimension.
    """
    import torch.distributed
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if isinstance(model, FSDPModule):
        return
    for parameter in model.parameters():
        if parameter.requires_grad:  # new weights, an adapter's for instance, may be drawn differently on each rank
            torch.distributed.broadcast(parameter.data, 0)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in layers and module is not model:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    setattr(model, _INSIDE, types.MethodType(lambda self, function: function(), model))
    register_fsdp_forward_method(model, _INSIDE)


def check_mesh(trainer: L.Trainer) -> None:
    """Refuse to split single layers over devices, which is Lightning's default for one node.

    Args:
        trainer: With a ``ModelParallelStrategy``.

    Raises:
        ConfigurationError: Naming the option and the value to write.
    """
    mesh: Any = trainer.strategy.device_mesh  # type: ignore[attr-defined]
    if mesh["tensor_parallel"].size() != 1:
        raise ConfigurationError(
            f"ModelParallelStrategy(tensor_parallel_size={mesh['tensor_parallel'].size()}) splits single layers over "
            "devices, which is not supported: write data_parallel_size="
            f"{trainer.world_size} and tensor_parallel_size=1"
        )


def run_inside(model: nn.Module, function: Callable[[], Result]) -> Result:
    """Run a function that uses a model's parts as if it were the model's own forward pass.

    Outside of it the parameters that a sharded model holds itself (embeddings, vocabulary head) are shards.

    Args:
        model: Sharded or not.
        function: Without arguments; it must not call the model itself, only its parts. It returns a tensor, or tuples,
            lists or dictionaries of tensors.
    """
    inside: Any = getattr(model, _INSIDE, None)
    if inside is None:
        return function()
    announce(model)
    return inside(function)


def is_shard(value: Tensor) -> bool:
    """Whether a tensor is spread over the ranks, each of which holds a part of it.

    Args:
        value: Any.
    """
    return hasattr(value, "full_tensor")


def whole(value: Tensor) -> Tensor:
    """A tensor as one piece on every rank; every rank has to ask.

    Args:
        value: Sharded or not.
    """
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def saves_shards(trainer: L.Trainer | None) -> bool:
    """Whether checkpoints are folders of shards, which have to hold every weight to be loaded again.

    Args:
        trainer: If there is one.
    """
    return bool(getattr(getattr(trainer, "strategy", None), "_save_distributed_checkpoint", False))


def whole_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """Every weight of a sharded model on the first rank's CPU; every rank has to ask.

    Args:
        model: Any.

    Returns:
        The state dict, empty on the other ranks; ``None`` where nothing is sharded.
    """
    if not _sharded_modules(model):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)  # type: ignore[return-value]


@contextlib.contextmanager
def rollout_weights(model: nn.Module, kind: RolloutWeights = "whole") -> Iterator[None]:
    """Where the weights of sharded models are while a rollout samples and scores.

    A rollout runs hundreds of forward passes with the same weights, and not the same number on every rank.

    Args:
        model: With sharded modules at any depth, or without.
        kind: ``whole`` gathers every parameter once for the block, so that no forward pass in it has to; ``sharded``
            gathers one layer after the other in each pass, on all ranks (see
            :func:`~lit_rlhf.strategies.in_step.together`).
    """
    sharded = _sharded_modules(model)
    if not sharded:
        yield
    elif kind == "whole":
        with _unsharded(sharded):
            yield
    else:
        with gathering_each_pass(_models(model)):
            yield


@contextlib.contextmanager
def _unsharded(sharded: list[Any]) -> Iterator[None]:
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def _models(module: nn.Module) -> list[list[Any]]:
    """Sharded modules by the outermost one that they are in, which is their first."""
    if found := _sharded_modules(module):
        if found[0] is module:
            return [found]
        return [model for child in module.children() for model in _models(child)]
    return []


def _sharded_modules(model: nn.Module) -> list[Any]:
    import torch.distributed

    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
