"""The critic: a value head on a backbone of its own, on the policy's, or on a second adapter of the shared base."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lit_rlhf.models.completions import CompletionRows, CompletionStates
from lit_rlhf.models.forward import completion_states
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


def adapter_states(policy: nn.Module, rows: CompletionRows) -> CompletionStates:
    """Hidden states of completions from the policy's base with the critic's adapter.

    Args:
        policy: A peft model with both adapters.
        rows: What to run.
    """
    with active_adapter(policy, VALUE_ADAPTER):
        return completion_states(policy, rows)


def value_after_last(values: Tensor, completion_lengths: Tensor) -> Tensor:
    """Value of the state that each completion ends in.

    Args:
        values: ``(N, T + 1)`` of all columns.
        completion_lengths: ``(N,)``.

    Returns:
        ``(N,)``.
    """
    return torch.gather(values, 1, completion_lengths[:, None])[:, 0]
