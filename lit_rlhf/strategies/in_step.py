"""Forward passes over weights that stay sharded: each of them gathers, and every rank has to take part in gathering.

In a rollout ranks do not run equally many passes: completions differ in length, and micro-batches in number. So each
pass is announced, and a rank that is done lends its shards to the passes of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_running: ContextVar[_InStep | None] = ContextVar("lit_rlhf_in_step", default=None)


class _InStep:
    """What the ranks agree on before each pass.

    Args:
        models: Of each sharded model its sharded modules in the order in which a pass gathers them, the model first.
    """

    def __init__(self, models: Sequence[Sequence[Any]]) -> None:
        self.models = models
        self.announcing = False

    def announce(self, model: nn.Module) -> None:
        """This rank is about to run a model."""
        if self.announcing:
            self._agree(1 + next(number for number, modules in enumerate(self.models) if modules[0] is model))

    def accompany(self) -> None:
        """Gather with the other ranks, until none of them runs a model any more."""
        while number := self._agree(0):
            model, *layers = self.models[number - 1]
            model.unshard()
            for layer in layers:
                layer.unshard()
                layer.reshard()
            model.reshard()

    def _agree(self, number: int) -> int:
        """The model that is run next, counted from 1, or 0; ranks that run one are at the same."""
        device = next(self.models[0][0].parameters()).device
        value = torch.tensor(number, device=device)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return int(value)


@contextlib.contextmanager
def gathering_each_pass(models: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Let passes inside the block gather one layer after the other; those :func:`together` need not be equally many.

    Args:
        models: Of each sharded model its sharded modules in the order in which a pass gathers them, the model first.
    """
    in_step = _InStep(models)
    hooks = []
    for model, *layers in models:
        for module in (model, *layers):
            module.set_reshard_after_forward(True, recurse=False)
        # Before torch's own hook, which gathers.
        hooks.append(model.register_forward_pre_hook(lambda module, inputs: in_step.announce(module), prepend=True))
    token = _running.set(in_step)
    try:
        yield
    finally:
        _running.reset(token)
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that every rank enters, and in which each runs one model at a time, as often as it has to.

    It is left by all ranks at once. Where no weights are gathered inside of it, it does nothing.
    """
    in_step = _running.get()
    if in_step is None:
        yield
        return
    in_step.announcing = True
    try:
        yield
    finally:
        in_step.announcing = False
        in_step.accompany()


def announce(model: nn.Module) -> None:
    """Say that a sharded model is entered otherwise than by calling it.

    Args:
        model: The sharded one.
    """
    in_step = _running.get()
    if in_step is not None:
        in_step.announce(model)
