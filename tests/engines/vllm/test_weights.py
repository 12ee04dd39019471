"""What is handed to vLLM, and the label that tells whose weights they are. None of it needs vLLM."""

from __future__ import annotations

import copy

import pytest
import torch

from lit_rlhf.engines.vllm.weights import base_weights, checkpoint_weights, weights_version
from lit_rlhf.models.lora import POLICY_ADAPTER, add_lora, merged_model


def adapted(policy, **options):
    torch.manual_seed(0)
    model = add_lora(policy, 4, **options)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.2)
    return model


def same(weights, expected):
    assert set(weights) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def test_weights_of_a_plain_policy_are_its_state_dict(policy):
    same(dict(checkpoint_weights(policy)), {name: policy.state_dict()[name] for name, _ in checkpoint_weights(policy)})
    assert {name for name, _ in policy.named_parameters()} <= set(dict(checkpoint_weights(policy)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"use_rslora": True}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", {"rank_pattern": {"q_proj": 2}, "alpha": 3.0}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),  # weights the other way round
    ],
    ids=str,
)
def test_an_adapter_is_merged_layer_by_layer_and_the_policy_stays_as_it_is(make_policy, name, options):
    model = adapted(make_policy(name), **options)
    before = copy.deepcopy(model.state_dict())
    weights = {name: value.clone() for name, value in checkpoint_weights(model)}
    expected = dict(merged_model(model).named_parameters(remove_duplicate=False))
    same(weights, {name: value.detach() for name, value in expected.items()})
    same(model.state_dict(), before)
    assert any((weights[name] - value).abs().max() > 1e-3 for name, value in base_weights(model))


def test_a_further_adapter_is_not_merged(make_policy):
    model = adapted(make_policy("llama"))
    alone = {name: value.clone() for name, value in checkpoint_weights(model)}
    add_lora(model, 2, adapter_name="value")
    for name, parameter in model.named_parameters():
        if ".value." in name:
            parameter.data.fill_(1.0)
    same(dict(checkpoint_weights(model)), alone)


def test_the_weights_below_an_adapter_are_those_before_it(make_policy):
    plain = make_policy("llama")
    expected = {name: value.clone() for name, value in checkpoint_weights(plain)}
    same(dict(base_weights(adapted(plain))), expected)


def test_the_version_follows_the_weights_and_nothing_else(make_policy):
    model = make_policy("llama")
    version = weights_version(model)
    assert version == weights_version(copy.deepcopy(model)) == weights_version(model.train())
    model.model.norm.weight.data[3] += 1e-6
    changed = weights_version(model)
    assert changed != version
    model.model.norm.weight.data[3] -= 1e-6
    assert weights_version(make_policy("llama")) == version
    assert weights_version(adapted(model)) not in (version, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_version_is_told_from_any_type(make_policy, dtype):
    model = make_policy("llama").to(dtype)
    version = weights_version(model)
    weight = model.lm_head.weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf, dtype=dtype))
    assert weights_version(model) != version


def test_the_version_depends_on_the_adapter(make_policy):
    model = adapted(make_policy("llama"))
    version = weights_version(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_B[POLICY_ADAPTER].weight.data[0, 0] += 0.1
    assert weights_version(model) != version
