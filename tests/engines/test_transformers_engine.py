"""The decoding loop against plain forward passes and against ``model.generate``."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine
from lit_rlhf.engines.decoding import left_pad
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.functional import mask_from_lengths
from lit_rlhf.models.completions import Completions
from lit_rlhf.models.forward import completion_outputs

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 48, (length,), generator=GENERATOR).tolist() for length in (5, 40, 1)]
NUM_SAMPLES = 4
ROW_PROMPTS = [prompt for prompt in PROMPTS for _ in range(NUM_SAMPLES)]
KEYS = row_keys(11, 0, 2, range(len(PROMPTS)), NUM_SAMPLES)
SAMPLING = SamplingParams(max_new_tokens=14, temperature=0.7, eos_token_ids=(2, 5, 17, 30, 41))


def sample(policy, prompts=PROMPTS, num_samples=NUM_SAMPLES, sampling=SAMPLING, keys=KEYS, **options):
    return TransformersEngine(**options).generate(policy, prompts, num_samples, sampling, keys)


def rows(generation):
    return [
        row[:length]
        for row, length in zip(generation.completion_ids.tolist(), generation.lengths.tolist(), strict=True)
    ]


def test_sampled_log_probs_are_those_of_the_training_forward(policy):
    generation = sample(policy)
    assert len(set(generation.lengths.tolist())) > 2, "the rows must end at different times"
    assert 0 < generation.finished.sum() < len(ROW_PROMPTS), "some rows must end, some must hit the limit"

    prompt_ids, prompt_mask = left_pad(ROW_PROMPTS, 0, torch.device("cpu"))
    with torch.no_grad():
        alone = torch.arange(len(ROW_PROMPTS))
        rows = Completions(prompt_ids, prompt_mask.sum(1), generation.completion_ids, generation.lengths, alone)
        padded = completion_outputs(policy, rows, temperature=0.7)
    mask = mask_from_lengths(generation.lengths, generation.completion_ids.shape[1])
    torch.testing.assert_close(generation.log_probs[mask], padded.log_probs[mask], rtol=0, atol=1e-5)
    assert generation.log_probs[mask].exp().std() > 0.1, "peaked distributions, or mistakes would not show"


def test_sampled_log_probs_are_those_of_each_row_alone_without_padding(policy):
    generation = sample(policy)
    for place, (prompt, completion) in enumerate(zip(ROW_PROMPTS, rows(generation), strict=True)):
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.7).log_softmax(-1)[range(len(completion)), completion]
        actual = generation.log_probs[place, : len(completion)].double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"compact_below": 0.0},
        {"compact_below": 1.0},
        {"max_rows": 1},
        {"max_rows": 8},
        {"max_rows": 8, "compact_below": 1.0},
    ],
    ids=str,
)
def test_batching_and_dropping_finished_rows_change_nothing(policy, options):
    expected, actual = sample(policy), sample(policy, **options)
    assert rows(actual) == rows(expected)
    assert actual.finished.tolist() == expected.finished.tolist()
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=0, atol=1e-5)


def test_rows_sampled_alone_equal_rows_sampled_together(policy):
    together = rows(sample(policy))
    assert len({tuple(row) for row in together}) > len(PROMPTS), "the samples of a prompt must differ"
    for place, prompt in enumerate(ROW_PROMPTS):
        alone = sample(policy, [prompt], 1, keys=KEYS[place : place + 1])
        assert rows(alone) == [together[place]]


def test_greedy_completions_equal_those_alone_and_of_generate(policy):
    keys = np.zeros(len(PROMPTS), dtype=np.uint64)
    endless = rows(sample(policy, num_samples=1, sampling=SamplingParams(12).greedy(), keys=keys))
    eos = (endless[0][3], endless[1][7])
    greedy = SamplingParams(12, temperature=0.0, eos_token_ids=eos)
    together = sample(policy, num_samples=1, sampling=greedy, keys=keys)
    assert int(together.lengths[0]) <= 4
    for place, prompt in enumerate(PROMPTS):
        alone = sample(policy, [prompt], 1, sampling=greedy, keys=keys[:1])
        ids = torch.tensor([prompt])
        reference = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=list(eos),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert rows(alone) == [reference]
        assert rows(together)[place] == reference


def test_frequencies_are_those_of_the_temperature_scaled_distribution(llama):
    generation = sample(
        llama, [PROMPTS[0]], 4000, keys=row_keys(0, 0, 0, [0], 4000), sampling=SamplingParams(1, 0.7), max_rows=4000
    )
    with torch.no_grad():
        probs = (llama(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(-1)
    frequencies = torch.bincount(generation.completion_ids[:, 0], minlength=len(probs)) / 4000
    assert (frequencies - probs).abs().max() < 0.02  # 2.5 standard deviations of a fair coin
    torch.testing.assert_close(
        generation.log_probs[:, 0], probs.log()[generation.completion_ids[:, 0]], rtol=0, atol=1e-5
    )
    assert not generation.finished.any()


def test_a_restricted_draw_keeps_the_unrestricted_log_probs(llama):
    sampling = SamplingParams(1, top_k=2)
    generation = sample(llama, [PROMPTS[0]], 64, keys=row_keys(0, 0, 0, [0], 64), sampling=sampling)
    with torch.no_grad():
        log_probs = llama(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    drawn = generation.completion_ids[:, 0]
    assert set(drawn.tolist()) == set(log_probs.topk(2).indices.tolist())
    torch.testing.assert_close(generation.log_probs[:, 0], log_probs[drawn], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [0, 2], ids=["pad differs from eos", "pad is eos"])
@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_finished_and_lengths_come_from_eos_alone(scripted_policy, pad, compact_below):
    scripts = {(20, 21): [7, 8, 2], (22,): [7, 8, 9, 10], (23, 24, 25): [7, 8, 9, 2], (26,): [2]}
    policy = scripted_policy(scripts)
    sampling = SamplingParams(4, temperature=0.0, eos_token_ids=(2,), pad_token_id=pad)
    keys = np.zeros(4, dtype=np.uint64)
    generation = sample(policy, list(scripts), 1, sampling, keys, compact_below=compact_below)
    assert generation.completion_ids.tolist() == [[7, 8, 2, pad], [7, 8, 9, 10], [7, 8, 9, 2], [2, pad, pad, pad]]
    assert generation.finished.tolist() == [True, False, True, True]
    assert generation.lengths.tolist() == [3, 4, 4, 1]
    each = policy.LOGIT - math.log(math.exp(policy.LOGIT) + 47)
    expected = torch.tensor([[each] * 3 + [0.0], [each] * 4, [each] * 4, [each] + [0.0] * 3])
    torch.testing.assert_close(generation.log_probs, expected, rtol=0, atol=1e-6)


def test_any_of_several_eos_ids_ends_a_row_and_the_width_is_the_longest_row(scripted_policy):
    scripts = {(20,): [7, 3], (21,): [8, 9, 2], (22,): [0, 0, 4]}  # 0 is also the padding
    sampling = SamplingParams(9, temperature=0.0, eos_token_ids=(2, 3, 4))
    generation = sample(scripted_policy(scripts), list(scripts), 2, sampling, np.zeros(6, dtype=np.uint64))
    assert rows(generation) == [[7, 3], [7, 3], [8, 9, 2], [8, 9, 2], [0, 0, 4], [0, 0, 4]]
    assert generation.completion_ids.shape == (6, 3)
    assert generation.finished.all()


def test_without_eos_ids_every_row_runs_to_the_limit(scripted_policy):
    generation = sample(scripted_policy({(20,): [2, 2, 2]}), [[20]], 1, SamplingParams(3, 0.0), KEYS[:1])
    assert rows(generation) == [[2, 2, 2]]
    assert generation.finished.tolist() == [False]


def test_one_new_token(scripted_policy):
    scripts = {(20,): [7], (21,): [2]}
    sampling = SamplingParams(1, temperature=0.0, eos_token_ids=(2,))
    generation = sample(scripted_policy(scripts), list(scripts), 1, sampling, KEYS[:2])
    assert generation.completion_ids.tolist() == [[7], [2]]
    assert generation.lengths.tolist() == [1, 1]
    assert generation.finished.tolist() == [False, True]


def test_train_and_eval_flags_are_left_as_they_are(make_policy):
    policy = make_policy("llama")
    policy.model.layers[1].train()
    before = {name: module.training for name, module in policy.named_modules()}
    sample(policy)
    assert {name: module.training for name, module in policy.named_modules()} == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in policy.parameters())


@pytest.fixture(scope="module")
def near_uniform():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def test_the_generation_config_of_the_checkpoint_has_no_effect(near_uniform):
    keys = row_keys(0, 0, 0, [0], 400)
    plain = sample(near_uniform, [[3]], 400, SamplingParams(1), keys).completion_ids[:, 0].tolist()
    policy = copy.deepcopy(near_uniform)
    changes = {"top_k": 2, "temperature": 0.1, "do_sample": True, "repetition_penalty": 3.0, "eos_token_id": plain[0]}
    for name, value in changes.items():
        setattr(policy.generation_config, name, value)
    before = policy.generation_config.to_dict()
    restricted = sample(policy, [[3]], 400, SamplingParams(1), keys)
    assert len(set(plain)) > 150
    assert restricted.completion_ids[:, 0].tolist() == plain
    assert not restricted.finished.any()
    assert policy.generation_config.to_dict() == before


def test_gradient_checkpointing_changes_nothing_in_eval_mode(make_policy):
    policy = make_policy("qwen2")
    expected = sample(policy)
    # The newer of two names of the same method.
    getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)()
    assert policy.model.layers[0].gradient_checkpointing
    actual = sample(policy)
    assert rows(actual) == rows(expected)
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=0, atol=0)


def test_dropout_of_the_configuration_is_not_applied_in_eval_mode(make_policy):
    from transformers import GPT2LMHeadModel

    policy = make_policy("gpt2")
    config = copy.deepcopy(policy.config)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    dropping = GPT2LMHeadModel(config)
    dropping.load_state_dict(policy.state_dict())
    actual = sample(dropping.eval())
    assert rows(actual) == rows(sample(policy))
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert not torch.allclose(dropping.train()(ids).logits, policy(ids).logits), "dropout would have mattered"


def test_a_policy_with_an_adapter_is_sampled_with_it(make_policy):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.5, init_lora_weights=False
    )
    adapted = get_peft_model(make_policy("gpt2"), config).eval()
    generation = sample(adapted)
    assert rows(generation) != rows(sample(make_policy("gpt2")))
    for place, (prompt, completion) in enumerate(zip(ROW_PROMPTS, rows(generation), strict=True)):
        with torch.no_grad():
            logits = adapted(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[range(len(completion)), completion]
        torch.testing.assert_close(generation.log_probs[place, : len(completion)], expected, rtol=0, atol=1e-5)


def test_the_global_random_state_is_neither_read_nor_changed(llama):
    torch.manual_seed(3)
    np.random.seed(3)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = rows(sample(llama))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()
    torch.manual_seed(4)
    assert rows(sample(llama)) == first


def test_other_keys_give_other_completions(llama):
    assert rows(sample(llama)) != rows(sample(llama, keys=row_keys(12, 0, 2, range(len(PROMPTS)), NUM_SAMPLES)))


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"max_tokens": 0}, {"compact_below": -0.1}, {"compact_below": 1.1}], ids=str
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} must .* got {next(iter(options.values()))}"):
        TransformersEngine(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.5},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.0},
        {"min_p": -0.1},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigurationError, match=f"{name} must be .* got {value}"):
        SamplingParams(**{"max_new_tokens": 4, **options})


def test_a_key_is_needed_for_every_row(llama):
    with pytest.raises(ValueError, match="12, got 11"):
        sample(llama, keys=KEYS[:-1])


def test_a_prompt_without_tokens_is_refused(llama):
    with pytest.raises(ValueError, match=r"at least one token, these have none: \[1, 2\]"):
        sample(llama, [[5], [], [], [6]], 1, keys=KEYS[:4])


def test_no_prompts_give_no_rows(llama):
    generation = sample(llama, [], 4, keys=KEYS[:0])
    assert generation.completion_ids.shape[0] == generation.log_probs.shape[0] == 0
    assert generation.lengths.tolist() == generation.finished.tolist() == []


def test_neutral_sampling_is_unrestricted_and_greedy_drops_every_restriction():
    assert not SamplingParams(4, temperature=0.5).restricted
    restricted = [SamplingParams(4, top_k=3), SamplingParams(4, top_p=0.9), SamplingParams(4, min_p=0.1)]
    assert all(sampling.restricted and not sampling.greedy().restricted for sampling in restricted)
    greedy = SamplingParams(4, top_k=3, stop=("x",), eos_token_ids=(2,), pad_token_id=1).greedy()
    assert greedy == SamplingParams(4, temperature=0.0, stop=("x",), eos_token_ids=(2,), pad_token_id=1)
