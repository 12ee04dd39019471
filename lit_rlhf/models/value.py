"""The critic: a value head on a backbone of its own, on the policy's, or on a second adapter of the shared base."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lit_rlhf.models.forward import completion_inputs
from lit_rlhf.models.lora import VALUE_ADAPTER, active_adapter

CriticKind = Literal["own", "shared", "adapter"]
CRITICS: tuple[str, ...] = get_args(CriticKind)


class ValueHead(nn.Module):
    """One number per hidden state, in float32. It starts at 0 everywhere: the first advantages are the returns.

    Args:
        hidden_size: ``H`` of the backbone.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(...)`` of hidden states ``(..., H)``."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)


class Critic(nn.Module):
    """Expectation of the return, before each token of a completion is sampled.

    Args:
        hidden_size: ``H`` of the backbone it reads.
        backbone: Of its own; without one it reads the policy's.
    """

    def __init__(self, hidden_size: int, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(hidden_size)


def decoder(model: nn.Module) -> nn.Module:
    """The part of a causal language model below its vocabulary head; adapters inside it stay in place.

    Args:
        model: A Hugging Face model or a peft model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner.base_model  # type: ignore[return-value]


def completion_hidden(
    backbone: nn.Module, prompt_ids: Tensor, prompt_lengths: Tensor, completion_ids: Tensor, completion_lengths: Tensor
) -> Tensor:
    """Hidden state before each completion token, and after the last column.

    Args:
        backbone: A model that returns ``last_hidden_state``.
        prompt_ids: ``(N, P)``, left-padded.
        prompt_lengths: ``(N,)``.
        completion_ids: ``(N, T)``, right-padded.
        completion_lengths: ``(N,)``.

    Returns:
        ``(N, T + 1, H)``. Column ``t`` has seen the prompt and ``t`` completion tokens.
    """
    inputs = completion_inputs(backbone, prompt_ids, prompt_lengths, completion_ids, completion_lengths)
    return backbone(**inputs).last_hidden_state[:, -(completion_ids.shape[1] + 1) :]


def adapter_hidden(policy: nn.Module, *completion: Tensor) -> Tensor:
    """The same from the policy's base with the critic's adapter.

    Args:
        policy: A peft model with both adapters.
        completion: The tensors of :func:`completion_hidden`.
    """
    with active_adapter(policy, VALUE_ADAPTER):
        return completion_hidden(decoder(policy), *completion)


def value_after_last(values: Tensor, completion_lengths: Tensor) -> Tensor:
    """Value of the state that each completion ends in.

    Args:
        values: ``(N, T + 1)`` of all columns.
        completion_lengths: ``(N,)``.

    Returns:
        ``(N,)``.
    """
    return torch.gather(values, 1, completion_lengths[:, None])[:, 0]
