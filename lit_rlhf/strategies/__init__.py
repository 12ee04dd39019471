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

__all__ = ["check_mesh", "run_inside", "saves_shards", "shard_module", "unsharded", "whole", "whole_state_dict"]
