"""What a Trainer's strategy can and cannot do, asked before a model is loaded."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lit_rlhf.errors import ConfigurationError


def shards_weights(trainer: L.Trainer | None) -> bool:
    """Whether a rank keeps only a part of each weight.

    Args:
        trainer: If there is one.
    """
    return isinstance(getattr(trainer, "strategy", None), ModelParallelStrategy | FSDPStrategy | DeepSpeedStrategy)


def check_strategy(trainer: L.Trainer) -> None:
    """Refuse strategies under which rollouts would not work.

    Args:
        trainer: With its strategy.

    Raises:
        ConfigurationError: Naming the strategy and what to write instead.
    """
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise ConfigurationError(
            f"strategy: {type(trainer.strategy).__name__} is not supported, it has no way to sample from sharded "
            "weights here; shard with lightning.pytorch.strategies.ModelParallelStrategy (FSDP2, see "
            "recipes/trainer/fsdp2.yaml), or use ddp"
        )
