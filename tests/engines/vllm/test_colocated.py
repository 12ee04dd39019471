"""The real vLLM in this process: trained, handed over, sampled."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, VLLMEngine, make_engine
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.errors import ConfigurationError, EngineError
from lit_rlhf.models.lora import add_lora

KEYS = row_keys(5, 0, 0, range(3), 8)


def sample(engine: Any, policy: Any, tokenizer: Any) -> Any:
    prompts = [tokenizer(text).input_ids for text in ("12+34=", "7+7=", "99+38=")]
    sampling = SamplingParams(8, 1.3, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=0)
    return engine.generate(policy, prompts, 8, sampling, KEYS, tokenizer)


def equal(one: Any, other: Any) -> None:
    assert torch.equal(one.completion_ids, other.completion_ids)
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.finished, other.finished)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-4)


@pytest.mark.vllm
def test_ten_iterations_learn_as_with_the_transformers_engine(quickstart):
    _, expected = quickstart("transformers", 10)
    _, history = quickstart("vllm", 10)
    assert max(history["sampling/log_prob_gap"]) < 1e-4
    assert history["reward"][-1] > history["reward"][0] + 0.2
    # The same completions, but for those that rounding decides.
    assert history["reward"] == pytest.approx(expected["reward"], abs=0.03)


@pytest.mark.vllm
@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_an_adapter_is_sampled_as_trained(quickstart, lora):
    engine = VLLMEngine(lora=lora)
    module, history = quickstart(engine, 3, lora_rank=4, lr=3e-3)
    assert max(history["sampling/log_prob_gap"]) < 1e-4
    assert history["reward"][-1] > history["reward"][0]
    equal(
        sample(engine, module.policy, module.tokenizer), sample(TransformersEngine(), module.policy, module.tokenizer)
    )


class Forgetful(VLLMEngine):
    """Hands the weights over once."""

    def _hand_over(self, policy: Any, version: str) -> None:
        if self.version is None:
            super()._hand_over(policy, version)


class Lying(VLLMEngine):
    """Hands over the label, but the weights only once."""

    def _load(self, weights: Any) -> None:
        if not hasattr(self, "loaded"):
            super()._load(weights)
        self.loaded = True


@pytest.mark.vllm
def test_an_engine_with_stale_weights_is_found_out(quickstart):
    with pytest.raises(EngineError, match=r"sampled with weights \w{16}, but the policy's are \w{16}"):
        quickstart(Forgetful(), 2)


@pytest.mark.vllm
def test_even_weights_with_a_wrong_label_show_in_the_gap(quickstart):
    _, history = quickstart(Lying(), 3)
    assert history["sampling/log_prob_gap"][0] < 1e-4
    assert min(history["sampling/log_prob_gap"][1:]) > 1e-2


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["plain", "merged", "adapter"])
def test_whatever_changes_the_weights_changes_the_completions(arithmetic, kind):
    from transformers import AutoModelForCausalLM

    base, tokenizer = arithmetic
    policy = AutoModelForCausalLM.from_pretrained(base.name_or_path).eval()
    if kind != "plain":
        policy = add_lora(policy, 4)
    engine = VLLMEngine(lora="adapter" if kind == "adapter" else "merged")
    first = sample(engine, policy, tokenizer)
    equal(first, sample(TransformersEngine(), policy, tokenizer))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    for parameter in trained:
        parameter.data += 0.1 * torch.randn_like(parameter)
    second = sample(engine, policy, tokenizer)
    assert not torch.equal(first.log_probs, second.log_probs)
    equal(second, sample(TransformersEngine(), policy, tokenizer))
    base_weight = next(
        parameter for name, parameter in policy.named_parameters() if name.endswith("embed_tokens.weight")
    )
    base_weight.data *= 1.2
    equal(sample(engine, policy, tokenizer), sample(TransformersEngine(), policy, tokenizer))


@pytest.mark.vllm
def test_a_policy_of_another_shape_is_refused(arithmetic, make_policy):
    policy, tokenizer = arithmetic
    engine = VLLMEngine()
    sample(engine, policy, tokenizer)
    with pytest.raises(ConfigurationError, match="built for another model"):
        engine.generate(make_policy("llama"), [[5]], 1, SamplingParams(2), KEYS[:1])


@pytest.mark.vllm
@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"max_model_len": 10_000}], ids=str)
def test_what_vllm_refuses_is_told_in_a_line(make_policy, options):
    with pytest.raises(ConfigurationError, match="vLLM refuses this model or these options: ") as told:
        VLLMEngine(options=options).generate(make_policy("llama"), [[5]], 1, SamplingParams(2), KEYS[:1])
    assert next(iter(options)) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.vllm
def test_adapters_that_vllm_does_not_have_are_refused_before_it_is_built(make_policy):
    policy = add_lora(make_policy("llama"), 4, use_dora=True)
    with pytest.raises(ConfigurationError, match="no adapters with use_dora; use lora='merged'"):
        VLLMEngine(lora="adapter").generate(policy, [[5]], 1, SamplingParams(2), KEYS[:1])


def test_without_vllm_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lit-rlhf\[vllm\]'"):
        make_engine("vllm").check_installed()


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 0},
        {"max_model_len": 1},
        {"gpu_memory_utilization": 1.5},
        {"dtype": "int8"},
        {"lora": "both"},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=f"VLLMEngine: {next(iter(options))}"):
        VLLMEngine(**options)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigurationError, match="engine must be one of transformers, vllm, got 'sglang'"):
        make_engine("sglang")
