"""Rollouts of weights that stay sharded, in a group of one process; two are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_rlhf.models.value import ValueHead
from lit_rlhf.strategies import is_shard, rollout_weights, run_inside, shard_module, together
from lit_rlhf.strategies.in_step import _InStep

IDS = torch.arange(3, 11)[None]


@pytest.fixture
def mesh(tmp_path):
    """Of one CPU process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def models(policy_dir, mesh):
    """A policy and a value head, sharded; and the policy's logits from before."""
    policy = AutoModelForCausalLM.from_pretrained(policy_dir).eval()
    head = ValueHead(policy.config.hidden_size)
    with torch.no_grad():
        logits = policy(IDS).logits
    for model in (policy, head):
        shard_module(model, mesh)
    return nn.ModuleDict({"policy": policy, "head": head}), logits


@pytest.fixture
def agreed(monkeypatch):
    """What the ranks agreed on, in order."""
    numbers, agree = [], _InStep._agree

    def noted(self, number):
        numbers.append(agree(self, number))
        return numbers[-1]

    monkeypatch.setattr(_InStep, "_agree", noted)
    return numbers


@torch.no_grad()
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_weights_during_a_rollout_and_after_it(models, kind):
    both, expected = models
    for _ in range(2):
        with rollout_weights(both, kind):
            assert {is_shard(p) for p in both.parameters()} == {kind == "sharded"}
            with together():
                assert torch.equal(both["policy"](IDS).logits, expected)
                assert torch.equal(both["policy"](IDS).logits, expected)
            assert {is_shard(p) for p in both.parameters()} == {kind == "sharded"}
        assert all(is_shard(p) for p in both.parameters())


@torch.no_grad()
def test_each_pass_is_announced_and_then_the_end(models, agreed):
    both, _ = models
    policy, head = both["policy"], both["head"]
    with rollout_weights(both, "sharded"):
        policy(IDS)  # as often on each rank: outside of a block nobody is asked
        assert agreed == []
        with together():
            policy(IDS)
            run_inside(policy, lambda: policy.model(IDS).last_hidden_state)
            head(torch.zeros(1, policy.config.hidden_size))
        assert agreed == [1, 1, 2, 0]
        with together():
            pass
        assert agreed == [1, 1, 2, 0, 0]
    policy(IDS)
    assert len(agreed) == 5


@torch.no_grad()
def test_an_error_ends_the_block_once_the_others_are_done(models, agreed):
    both, expected = models

    def fail():
        with together():
            both["policy"](IDS)
            raise MemoryError

    with rollout_weights(both, "sharded"):
        with pytest.raises(MemoryError):
            fail()
        assert agreed == [1, 0]
        with together():
            assert torch.equal(both["policy"](IDS).logits, expected)


@torch.no_grad()
def test_gathering_for_others_leaves_no_weight_whole(models, monkeypatch):
    both, expected = models
    others = iter([1, 2, 1, 0])  # what the ranks run on which this one waits
    monkeypatch.setattr(_InStep, "_agree", lambda self, number: next(others))
    with rollout_weights(both, "sharded"):
        with together():
            pass
        assert next(others, None) is None
        assert all(is_shard(p) for p in both.parameters())
        assert torch.equal(both["policy"](IDS).logits, expected)


def test_without_shards_there_is_nothing_to_do(policy_dir, agreed):
    policy = AutoModelForCausalLM.from_pretrained(policy_dir)
    with rollout_weights(policy, "sharded"), together():
        policy(IDS)
    assert agreed == []
