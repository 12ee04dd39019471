"""What differs between Lightning's strategies: the only place that knows FSDP2 from DDP from a single device."""

from lit_rlhf.strategies.fsdp2 import (
    check_mesh,
    run_inside,
    saves_shards,
    shard_module,
    unsharded,
    whole,
    whole_state_dict,
)
from lit_rlhf.strategies.kinds import check_strategy, shards_weights

__all__ = [
    "check_mesh",
    "check_strategy",
    "run_inside",
    "saves_shards",
    "shard_module",
    "shards_weights",
    "unsharded",
    "whole",
    "whole_state_dict",
]
