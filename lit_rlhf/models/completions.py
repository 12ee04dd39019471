"""Completions in a forward pass: which tokens count, and what was computed at each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from lit_rlhf.functional.masking import mask_from_lengths


class CompletionRows(Protocol):
    """``N`` prompts and their completions; a rollout batch is one."""

    @property
    def prompt_ids(self) -> Tensor:
        """``(N, P)``, left-padded, at least one token each."""
        ...

    @property
    def prompt_lengths(self) -> Tensor:
        """``(N,)`` real tokens in each prompt."""
        ...

    @property
    def completion_ids(self) -> Tensor:
        """``(N, T)``, right-padded."""
        ...

    @property
    def completion_lengths(self) -> Tensor:
        """``(N,)`` real tokens in each completion."""
        ...

    @property
    def group_index(self) -> Tensor:
        """``(N,)``; rows of one number have the same prompt."""
        ...


@dataclass(frozen=True)
class Completions:
    """The plain form of :class:`CompletionRows`, whose fields see."""

    prompt_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor
    group_index: Tensor


@dataclass(frozen=True)
class CompletionCells:
    """The ``M`` completion tokens of ``N`` rows of width ``T``, row after row.

    Args:
        token_ids: ``(M,)``.
        cells: ``(M,)`` their places in the flattened ``(N, T)`` completions.
        lengths: ``(N,)`` tokens of each row.
        width: ``T``.
    """

    token_ids: Tensor
    cells: Tensor
    lengths: Tensor
    width: int

    @classmethod
    def of(cls, rows: CompletionRows) -> CompletionCells:
        """The tokens of a batch.

        Args:
            rows: The batch.
        """
        width = rows.completion_ids.shape[1]
        cells = mask_from_lengths(rows.completion_lengths, width).flatten().nonzero()[:, 0]
        return cls(rows.completion_ids.flatten()[cells], cells, rows.completion_lengths, width)

    def unpack(self, values: Tensor) -> Tensor:
        """Numbers of the tokens at their places.

        Args:
            values: ``(M,)``.

        Returns:
            ``(N, T)``, 0 on padding.
        """
        flat = values.new_zeros(len(self.lengths) * self.width)
        return flat.index_copy(0, self.cells, values).unflatten(0, (len(self.lengths), self.width))


@dataclass(frozen=True)
class CompletionStates:
    """Last hidden states around the tokens of completions.

    Args:
        before: ``(M, H)`` before each token: the state that predicts it.
        after: ``(N, H)`` after each row's last token.
        cells: Where the tokens belong.
    """

    before: Tensor
    after: Tensor
    cells: CompletionCells

    def detach(self) -> CompletionStates:
        """The same without a graph."""
        return CompletionStates(self.before.detach(), self.after.detach(), self.cells)

    def values(self, head: Callable[[Tensor], Tensor]) -> Tensor:
        """What a value head says before each token and after the last one.

        Args:
            head: From ``(..., H)`` to ``(...)``.

        Returns:
            ``(N, T + 1)``, 0 beyond a row's end.
        """
        before = F.pad(self.cells.unpack(head(self.before)), (0, 1))
        return before.scatter(1, self.cells.lengths[:, None], head(self.after)[:, None])


@dataclass(frozen=True)
class CompletionOutputs:
    """What one forward pass says about the tokens of completions; 0 on padding.

    Args:
        log_probs: ``(N, T)`` float32 nats of each token given what stands before it.
        entropy: ``(N, T)`` of the distribution each token was drawn from, if asked for.
        states: Hidden states around the tokens, if asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    states: CompletionStates | None = None
