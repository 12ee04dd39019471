r"""The logits of a vocabulary head in tiles of some tokens by some of the vocabulary, one at a time.

With ``M`` tokens, hidden size ``H`` and vocabulary ``V`` the logits are an ``(M, V)`` matrix of which a policy loss
needs one number per token. A tile ``k`` of a token's logits leaves its log-sum-exp :math:`l_k` and entropy :math:`H_k`;
then

.. math::
    l = \log\sum_k e^{l_k}, \qquad w_k = e^{l_k - l}, \qquad \log\pi(y) = z_y - l, \qquad
    H = \sum_k w_k H_k - \sum_k w_k \log w_k

(the last one is the chain rule of entropy). The backward pass builds the gradient of the logits tile by tile,

.. math:: \partial z_v = g\,(\delta_{vy} - \pi_v) - g_H\,\pi_v\,(\log\pi_v + H)

for upstream gradients :math:`g` of the log-prob and :math:`g_H` of the entropy, and multiplies each with the weight and
the hidden states at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EntropyMode = Literal["none", "detached", "train"]

# Stands for -inf inside a tile, where 0 * -inf would be NaN: its exponential is 0 just the same.
_IMPOSSIBLE = -1e30


def tile_shape(tokens: int, vocabulary: int, numbers: int) -> tuple[int, int]:
    """Rows and columns of a tile: a square reads the least of weight and states per product.

    Args:
        tokens: ``M``.
        vocabulary: ``V``.
        numbers: That a tile may hold.
    """
    rows = max(1, min(tokens, math.isqrt(numbers)))
    columns = min(vocabulary, max(1, numbers // rows))
    return max(1, min(tokens, numbers // columns)), columns


@dataclass(frozen=True)
class TilePlan:
    """How one call is computed.

    Args:
        dtype: Of the matrix products.
        precision: Of everything else.
        scale: Factor of the logits, temperature included.
        softcap: Bound of the logits, temperature included.
        entropy: The caller's.
        bounded: Whether logits may be ``-inf``.
        rows: Tokens of a tile.
        columns: Vocabulary of a tile.
        kept_bytes: 0 where no backward pass follows.
    """

    dtype: torch.dtype
    precision: torch.dtype
    scale: float
    softcap: float | None
    entropy: EntropyMode
    bounded: bool
    rows: int
    columns: int
    kept_bytes: int

    @property
    def keeps(self) -> str:
        """What the backward pass needs of a tile: its probabilities do, unless the gradient asks for the logits too."""
        return "logits" if self.entropy == "train" or self.softcap is not None else "probs"


@dataclass
class TileRecord:
    """What the forward pass leaves to the backward pass.

    Args:
        totals: ``(M,)`` log-sum-exp of each token's logits.
        shares: ``(M, tiles)`` probability of each tile of the vocabulary.
        entropies: ``(M,)``, if asked for.
        kept: Logits or probabilities by first row and tile. The backward pass takes them out and overwrites them, so
            that a second one recomputes.
    """

    totals: Tensor
    shares: Tensor
    entropies: Tensor | None
    kept: dict[tuple[int, int], Tensor]


class LogitTiles:
    """One pass over the tiles of the logits, in buffers that each tile overwrites.

    Args:
        plan: How to compute.
        hidden: ``(M, H)``.
        weight: ``(V, H)``.
        bias: ``(V,)`` or None.
        token_ids: ``(M,)``.
    """

    def __init__(self, plan: TilePlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor) -> None:
        self.plan, self.token_ids = plan, token_ids
        self.hidden, self.weight = hidden.to(plan.dtype), weight.to(plan.dtype)
        self.bias = None if bias is None else bias.to(plan.dtype)
        self.rows, self.parts = _pieces(len(hidden), plan.rows), _pieces(len(weight), plan.columns)
        self._buffers: dict[str, Tensor] = {}

    def forward(self) -> tuple[Tensor, TileRecord]:
        """Log-probs ``(M,)``, and what the backward pass needs."""
        tokens, plan = len(self.hidden), self.plan
        log_probs, totals = self._new(tokens), self._new(tokens)
        entropies = None if plan.entropy == "none" else self._new(tokens)
        shares = self._new(tokens, len(self.parts))
        kept: dict[tuple[int, int], Tensor] = {}
        left = plan.kept_bytes
        for rows in self.rows:
            chosen = self._new(rows.stop - rows.start)
            tile_totals, tile_entropies = torch.empty_like(shares[rows]), torch.empty_like(shares[rows])
            for k, part in enumerate(self.parts):
                shape = (rows.stop - rows.start, part.stop - part.start)
                own = None
                if (size := math.prod(shape) * plan.precision.itemsize) <= left:
                    own = kept[rows.start, k] = self._new(*shape)
                    left -= size
                logits, probs = self._memory(shape, own)
                self._logits(rows, part, logits)
                position, inside = self._position(rows, part)
                chosen = torch.where(inside, logits.gather(1, position).squeeze(1), chosen)
                self._softmax(logits, probs)
                # The most likely token has probability exp(its logit - log-sum-exp), which tells the latter.
                tile_totals[:, k] = logits.amax(-1) - probs.amax(-1).log_()
                if entropies is not None:
                    # The products go where nothing is needed any more.
                    products = logits.mul_(probs) if plan.keeps == "probs" else probs.mul_(logits)
                    tile_entropies[:, k] = tile_totals[:, k] - products.sum(-1)
            totals[rows] = tile_totals.logsumexp(-1)
            shares[rows] = (tile_totals - totals[rows, None]).exp_()
            log_probs[rows] = chosen - totals[rows]
            if entropies is not None:
                entropies[rows] = (shares[rows] * tile_entropies + torch.special.entr(shares[rows])).sum(-1)
        return log_probs, TileRecord(totals, shares, entropies, kept)

    def backward(
        self, record: TileRecord, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of hidden states, weight and bias, each if needed.

        Args:
            record: Of the forward pass; what it keeps is used up.
            grad_log_probs: ``(M,)``, or None where the loss does not depend on them.
            grad_entropies: ``(M,)``, or None likewise.
            needed: Which of the three to compute.
        """
        nothing = torch.zeros_like(record.totals)
        upstream, upstream_entropies = (
            nothing if grad is None else grad * self.plan.scale for grad in (grad_log_probs, grad_entropies)
        )
        inputs = (self.hidden, self.weight, self.bias)
        hidden_grad, weight_grad, bias_grad = (
            torch.zeros_like(tensor, dtype=self.plan.precision) if tensor is not None and wanted else None
            for tensor, wanted in zip(inputs, needed, strict=True)
        )
        for rows in self.rows:
            for k, part in enumerate(self.parts):
                grad = self._logits_grad(record, rows, k, upstream[rows, None], upstream_entropies[rows, None])
                if bias_grad is not None:
                    bias_grad[part] += grad.sum(0)
                grad = grad.to(self.plan.dtype)
                if hidden_grad is not None:
                    _add_product(hidden_grad[rows], grad, self.weight[part])
                if weight_grad is not None:
                    _add_product(weight_grad[part], grad.t(), self.hidden[rows])
        return [hidden_grad, weight_grad, bias_grad]

    def _logits_grad(
        self, record: TileRecord, rows: slice, k: int, upstream: Tensor, upstream_entropies: Tensor
    ) -> Tensor:
        """Gradient ``(m, v)`` of a tile's products ``W h + b``, over the scale that ``upstream`` ``(m, 1)`` holds."""
        part, plan = self.parts[k], self.plan
        shape = (rows.stop - rows.start, part.stop - part.start)
        kept = record.kept.pop((rows.start, k), None)
        if kept is not None and plan.keeps == "probs":
            logits = grad = kept  # nothing below reads the logits
        else:
            logits, grad = self._memory(shape, kept)
            if kept is None:
                self._logits(rows, part, logits)
            self._softmax(logits, grad)
        slope = None
        if plan.softcap is not None:  # 1 - tanh^2
            slope = torch.mul(logits, 1 / plan.softcap, out=self._buffer("slope", shape)).square_().neg_().add_(1)
        share = record.shares[rows, k, None]
        if plan.entropy == "train":
            assert record.entropies is not None
            logits.sub_((record.totals - record.entropies)[rows, None]).mul_(upstream_entropies).add_(upstream)
            grad.mul_(logits).mul_(-share)
        else:
            grad.mul_(upstream * -share)
        position, inside = self._position(rows, part)
        grad.scatter_add_(1, position, upstream * inside.unsqueeze(1))
        return grad if slope is None else grad.mul_(slope)

    def _logits(self, rows: slice, part: slice, out: Tensor) -> None:
        """Scaled and capped logits ``(m, v)`` of one tile, written to ``out``."""
        plan = self.plan
        hidden, weight = self.hidden[rows], self.weight[part]
        bias = None if self.bias is None else self.bias[part]
        if plan.dtype == plan.precision:
            start, beta = (out, 0.0) if bias is None else (bias, plan.scale)
            torch.addmm(start, hidden, weight.t(), beta=beta, alpha=plan.scale, out=out)
        else:  # rounded where nn.Linear rounds
            out.copy_(torch.nn.functional.linear(hidden, weight, bias))
            if plan.scale != 1.0:
                out.mul_(plan.scale)
        if plan.softcap is not None:
            out.mul_(1 / plan.softcap).tanh_().mul_(plan.softcap)

    def _softmax(self, logits: Tensor, out: Tensor) -> None:
        if self.plan.bounded:
            logits.clamp_(min=_IMPOSSIBLE)
        torch.softmax(logits, -1, out=out)

    def _position(self, rows: slice, part: slice) -> tuple[Tensor, Tensor]:
        """Where in a tile each row's token stands ``(m, 1)``, and whether it stands in this tile at all ``(m,)``."""
        position = self.token_ids[rows] - part.start
        last = part.stop - part.start - 1
        return position.clamp(0, last).unsqueeze(1), (position >= 0) & (position <= last)

    def _memory(self, shape: tuple[int, int], own: Tensor | None) -> tuple[Tensor, Tensor]:
        """For the logits and probabilities of a tile: what is kept in memory of its own, the rest in buffers."""
        logits, probs = (
            own if own is not None and name == self.plan.keeps else self._buffer(name, shape)
            for name in ("logits", "probs")
        )
        return logits, probs

    def _buffer(self, name: str, shape: tuple[int, int]) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = self._new(self.plan.rows * self.plan.columns)
        return self._buffers[name][: math.prod(shape)].view(shape)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.plan.precision, device=self.hidden.device)


def _pieces(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
