"""The frozen reference inside a training module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_rlhf.models.reference import FrozenReference, forget_missing_reference

IDS = torch.tensor([[5, 6, 7, 8]])


class Parent(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.reference = FrozenReference(policy)
        self.reference_scale = nn.Parameter(torch.ones(()))  # a name that begins like the reference's
        self.register_load_state_dict_post_hook(forget_missing_reference)


@pytest.fixture
def parent(model):
    return Parent(model.train())


def logits(module):
    with torch.no_grad():
        return module(IDS).logits


def test_it_computes_what_the_policy_computed(parent):
    assert torch.equal(logits(parent.reference.model), logits(parent.policy))


def test_it_has_no_entry_in_the_state_dict_and_loads_without_one(parent, make_model):
    state = parent.state_dict()
    expected = {f"policy.{name}" for name in parent.policy.state_dict()} | {"reference_scale"}
    assert set(state) == expected
    assert parent.reference.state_dict() == {}

    other = Parent(make_model(parent.policy.config.model_type))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    before = logits(other.reference.model)
    assert other.load_state_dict(state, strict=True) == ([], [])
    assert torch.equal(logits(other.policy), logits(parent.policy))
    assert torch.equal(logits(other.reference.model), before)


@pytest.mark.parametrize("missing", ["reference_scale", "policy.lm_head.weight"])
def test_anything_else_that_is_missing_is_still_an_error(parent, missing):
    state = parent.state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{missing}"'):
        parent.load_state_dict(state)


def test_an_unexpected_key_is_still_an_error(parent):
    with pytest.raises(RuntimeError, match="Unexpected key"):
        parent.load_state_dict({**parent.state_dict(), "critic.weight": torch.ones(1)})


def test_it_stays_in_eval_mode(parent):
    parent.train()
    assert not any(module.training for module in parent.reference.modules())
    assert all(module.training for module in parent.policy.modules())
    parent.reference.train()
    assert not any(module.training for module in parent.reference.modules())


def test_it_has_no_gradients_and_leaves_those_of_the_policy_alone(parent):
    assert not any(parameter.requires_grad for parameter in parent.reference.parameters())
    assert all(parameter.requires_grad for parameter in parent.policy.parameters())
    (parent.policy(IDS).logits - parent.reference.model(IDS).logits).pow(2).sum().backward()
    assert all(parameter.grad is None for parameter in parent.reference.parameters())


def test_training_the_policy_does_not_move_it(parent):
    before = logits(parent.policy)
    optimizer = torch.optim.SGD(parent.policy.parameters(), lr=0.1)
    parent.policy(IDS).logits.log_softmax(-1)[..., 3].sum().backward()
    optimizer.step()
    assert torch.equal(logits(parent.reference.model), before)
    assert not torch.allclose(logits(parent.policy), before, atol=1e-3)


def test_it_moves_with_its_parent(parent):
    before = logits(parent.reference.model)
    parent.to(torch.float64)
    assert {parameter.dtype for parameter in parent.reference.parameters()} == {torch.float64}
    after = logits(parent.reference.model)
    assert after.dtype == torch.float64
    torch.testing.assert_close(after, before.double(), rtol=0, atol=1e-4)
