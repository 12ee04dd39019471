from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.strategies import check_strategy, shards_weights


def trainer_with(strategy: Any) -> Any:
    """Lightning refuses FSDPStrategy on a CPU before anybody else can."""
    return SimpleNamespace(strategy=strategy)


def test_fsdp1_is_refused_with_what_to_write_instead():
    with pytest.raises(ConfigurationError, match=r"strategy: FSDPStrategy is not supported.*ModelParallelStrategy"):
        check_strategy(trainer_with(FSDPStrategy()))


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [(SingleDeviceStrategy(), False), (DDPStrategy(), False), (ModelParallelStrategy(), True), (FSDPStrategy(), True)],
)
def test_who_shards(strategy, shards):
    assert shards_weights(trainer_with(strategy)) == shards
    if not isinstance(strategy, FSDPStrategy):
        check_strategy(trainer_with(strategy))


def test_without_a_trainer_nothing_is_sharded():
    assert not shards_weights(None)
