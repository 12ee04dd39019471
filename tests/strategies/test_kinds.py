from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_rlhf import GRPOModule
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


class OtherEngine:
    """Samples elsewhere, from a copy of the weights."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is refused before it samples")


@pytest.mark.parametrize("strategy", [ModelParallelStrategy(), DDPStrategy()])
def test_sharded_rollouts_go_with_the_engine_that_calls_the_policy(strategy, policy_dir, make_data):
    module = GRPOModule(policy_dir, rollout_weights="sharded")
    module._trainer = SimpleNamespace(
        strategy=strategy, datamodule=make_data(engine=OtherEngine()), num_sanity_val_steps=0, callbacks=[]
    )
    if isinstance(strategy, DDPStrategy):
        module.setup("fit")  # nothing is sharded
        return
    with pytest.raises(ConfigurationError, match=r"rollout_weights: sharded.*OtherEngine.*rollout_weights: whole"):
        module.setup("fit")


def test_rollout_weights_are_whole_or_sharded(policy_dir):
    with pytest.raises(ConfigurationError, match="rollout_weights must be one of whole, sharded, got 'half'"):
        GRPOModule(policy_dir, rollout_weights="half")
