"""Log-probabilities and entropy straight from hidden states: the matrix of logits never exists."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_rlhf.functional.logit_tiles import EntropyMode, LogitTiles, TilePlan, tile_shape

KEPT_BYTES = 128 * 2**20
# A tile stays in a CPU's outer cache between the passes over it; elsewhere its kernels must outlast their launch.
CPU_TILE_BYTES, TILE_BYTES = 4 * 2**20, 256 * 2**20


def hidden_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: EntropyMode = "none",
    tile_bytes: int | None = None,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor | None]:
    r"""Log-probability of each given token, and on request the exact entropy, without the matrix of logits.

    .. math:: z = c \tanh\left(s\,(W h + b) / c\right) / \tau, \qquad \log\pi(y) = z_y - \log\sum_v e^{z_v}

    Equal, in value and gradient, to :func:`token_log_probs` and :func:`entropy` of the logits, whatever the tiles.
    Beyond inputs, outputs and gradients it needs a few buffers of one tile, and what the backward pass is spared to
    recompute. Low-precision products round as those of ``nn.Linear`` do, with and without autocast; everything after
    them, and the sum of the weight's gradient over tiles, is in float32 (float64 for float64 states).

    Args:
        hidden: ``(..., H)`` states that the vocabulary head receives.
        weight: ``(V, H)``; its gradient is only computed where it requires one.
        token_ids: ``(...)`` integers in ``[0, V)``.
        bias: ``(V,)``; ``-inf`` marks impossible tokens.
        temperature: ``tau > 0``, the one the tokens were sampled with.
        scale: ``s``, the factor of the logits in some architectures.
        softcap: ``c``, the bound of the logits in some architectures.
        entropy: ``none``; ``detached``, for a log; ``train``, with a graph.
        tile_bytes: Limit of one tile. By default 4 MiB on a CPU, 256 MiB elsewhere.
        kept_bytes: Tiles of this call that are kept for the backward pass; those beyond are recomputed there.

    Returns:
        Log-probs ``(...)`` and entropies ``(...)`` in nats, float32 or float64; the latter None for ``none``.

    Raises:
        ValueError: If shapes do not fit, a token id lies outside the vocabulary, or an option is out of its range.

    >>> log_probs, entropies = hidden_log_probs(
    ...     torch.zeros(1, 3), torch.ones(4, 3), torch.tensor([2]), entropy="detached"
    ... )
    >>> log_probs.exp(), entropies.exp()
    (tensor([0.2500]), tensor([4.]))
    """
    _check(hidden, weight, token_ids, bias, temperature, softcap, entropy, tile_bytes)
    device = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    precision = torch.float64 if dtype == torch.float64 else torch.float32

    size = tile_bytes or (CPU_TILE_BYTES if device == "cpu" else TILE_BYTES)
    rows, columns = tile_shape(token_ids.numel(), len(weight), max(1, size // precision.itemsize))
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    plan = TilePlan(
        dtype=dtype,
        precision=precision,
        scale=scale / temperature,
        softcap=None if softcap is None else softcap / temperature,
        entropy=entropy,
        # A -inf can only come from the bias, or from a product beyond float16.
        bounded=bias is not None or dtype == torch.float16,
        rows=rows,
        columns=columns,
        kept_bytes=kept_bytes if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs) else 0,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    log_probs, entropies = _HiddenLogProbs.apply(flat, weight, bias, token_ids.reshape(-1), plan)
    shape = token_ids.shape
    return log_probs.view(shape), None if entropies is None else entropies.view(shape)


def _check(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    entropy: str,
    tile_bytes: int | None,
) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, token_ids {tuple(token_ids.shape)}"
    if weight.ndim != 2 or hidden.shape != (*token_ids.shape, weight.shape[1]):
        raise ValueError(f"expected hidden (..., H), weight (V, H) and token_ids (...), got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected a bias of shape ({len(weight)},), got {tuple(bias.shape)}")
    for name, value in (("temperature", temperature), ("softcap", softcap), ("tile_bytes", tile_bytes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if entropy not in get_args(EntropyMode):
        raise ValueError(f"entropy must be one of {', '.join(get_args(EntropyMode))}, got {entropy!r}")
    if token_ids.numel():
        low, high = torch.stack(token_ids.aminmax()).tolist()  # a GPU is waited for once
        if low < 0 or high >= len(weight):
            raise ValueError(f"token ids lie in [{low}, {high}], outside the vocabulary of {len(weight)}")


class _HiddenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, plan: TilePlan
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            log_probs, ctx.record = LogitTiles(plan, hidden, weight, bias, token_ids).forward()
        ctx.save_for_backward(hidden, weight, bias, token_ids)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        # An output kept on ctx itself would never be freed.
        entropies = None if ctx.record.entropies is None else ctx.record.entropies.clone()
        if entropies is not None and plan.entropy == "detached":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> Any:
        hidden, weight, bias, token_ids = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = LogitTiles(ctx.plan, hidden, weight, bias, token_ids)
            grads = tiles.backward(ctx.record, grad_log_probs, grad_entropies, ctx.needs_input_grad[:3])
        cast = [
            None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, (hidden, weight, bias), strict=True)
        ]
        return *cast, None, None
