"""What differs between Lightning's strategies: the only place that knows FSDP2 from DDP from a single device."""

from lit_rlhf.strategies.fsdp2 import (
    ROLLOUT_WEIGHTS,
    RolloutWeights,
    check_mesh,
    is_shard,
    rollout_weights,
    run_inside,
    saves_shards,
    shard_module,
    whole,
    whole_state_dict,
)
from lit_rlhf.strategies.in_step import together
from lit_rlhf.strategies.kinds import check_strategy, shards_weights

__all__ = [
    "ROLLOUT_WEIGHTS",
    "RolloutWeights",
    "check_mesh",
    "check_strategy",
    "is_shard",
    "rollout_weights",
    "run_inside",
    "saves_shards",
    "shard_module",
    "shards_weights",
    "together",
    "whole",
    "whole_state_dict",
]
