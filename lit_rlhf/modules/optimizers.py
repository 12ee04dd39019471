"""AdamW in 32 or in 8 bits, by name."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from lit_rlhf.errors import ConfigurationError, reason_of
from lit_rlhf.models.quantization import require_bitsandbytes

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)

_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
# bitsandbytes keeps the moments of smaller tensors in 32 bits.
_SMALLEST = 4096


def make_optimizer(name: OptimizerName, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer over parameter groups.

    The moments take 8 bytes per weight with ``adamw`` and 2 with the others (Dettmers et al., arXiv 2110.02861); the
    paged one moves them to the host's memory while a GPU has none left.

    Args:
        name: ``adamw``, ``adamw_8bit`` or ``paged_adamw_8bit``.
        groups: Parameters, or groups of them.
        options: ``lr``, ``betas``, ``weight_decay``, and ``fused``, which ``adamw`` alone knows.
    """
    if name == "adamw":
        return torch.optim.AdamW(groups, **options)
    import bitsandbytes

    options.pop("fused", None)
    return getattr(bitsandbytes.optim, _BITSANDBYTES[name])(groups, **options)


def check_optimizer(name: OptimizerName, device: torch.device, sharded: bool) -> None:
    """Refuse an optimizer that would not run, before a model is loaded.

    Args:
        name: Of the optimizer.
        device: Of the weights.
        sharded: Whether each rank keeps only a part of each weight.

    Raises:
        ConfigurationError: Saying what is in the way and what to write instead.
    """
    if name == "adamw":
        return
    require_bitsandbytes(f"optimizer: {name}")
    if sharded:
        raise ConfigurationError(
            f"optimizer: {name} cannot update weights that are sharded over ranks: write adamw, whose moments are "
            "sharded with them, or use ddp"
        )
    if name.startswith("paged") and device.type == "cpu":
        raise ConfigurationError(
            f"optimizer: {name} moves moments between a GPU and the host, but this run is on a CPU: write adamw_8bit"
        )
    trial = torch.nn.Parameter(torch.zeros(_SMALLEST, device=device))
    trial.grad = torch.ones_like(trial)
    try:
        make_optimizer(name, [trial], lr=1.0).step()
    except Exception as error:  # whatever a build of bitsandbytes lacks for this device
        raise ConfigurationError(
            f"optimizer: {name} does not run on {device}, bitsandbytes says: {reason_of(error)}; write adamw"
        ) from error
    if not bool((trial < 0).all()):
        raise ConfigurationError(f"optimizer: {name} does nothing on {device} with this bitsandbytes; write adamw")
