"""Decoding with shared prompts against the plain path and against one unpadded forward pass per row."""

from __future__ import annotations

import copy

import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, cache, decode_layout, shared_prompt, transformers
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.models.layouts import runs_layouts
from tests.models.zoo import TINY

GENERATOR = torch.Generator().manual_seed(8)
PROMPTS = [torch.randint(3, 48, (length,), generator=GENERATOR).tolist() for length in (19, 3, 33, 1, 19)]
NUM_SAMPLES = 3
KEYS = row_keys(4, 0, 0, range(len(PROMPTS)), NUM_SAMPLES)
# Twice the sliding windows of the fixtures, so that prompts leave them whole.
SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.8, eos_token_ids=(2, 9, 31))

SMALL = {**TINY, "vocab_size": 48, "max_position_embeddings": 96}
GPT = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MORE = {
    "gpt_neox": SMALL,
    "phi": SMALL,
    "phi3": {**SMALL, "sliding_window": 6},
    "cohere": SMALL,
    "granite": {**SMALL, "attention_multiplier": 0.3},
    "olmo2": SMALL,
    "starcoder2": {**SMALL, "sliding_window": 5},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {**SMALL, "no_rope_layers": [1, 0]},
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 4},
    "gpt_bigcode": {**GPT, "multi_query": True},
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}
# Positions inside the scores, or an attention of their own: these are decoded on the plain path.
OTHERS = {"bloom": {**SMALL, "n_layer": 2, "n_head": 4}, "falcon": {**SMALL, "multi_query": True}}


def build(kind, options, seed=1, initializer_range=0.25):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **options)
    config.initializer_range = initializer_range
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", params=list(MORE))
def another_policy(request):
    return build(request.param, MORE[request.param])


def sample(policy, prompts=PROMPTS, num_samples=NUM_SAMPLES, sampling=SAMPLING, keys=KEYS, tokenizer=None, **options):
    return TransformersEngine(**options).generate(policy, prompts, num_samples, sampling, keys, tokenizer)


@pytest.fixture
def plain(monkeypatch):
    """Sample on the plain path, whatever the model can do."""

    def run(policy, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(transformers, "runs_layouts", lambda model: False)
            return sample(policy, *args, **options)

    return run


def assert_same(actual, expected, tolerance=1e-5):
    assert actual.completion_ids.tolist() == expected.completion_ids.tolist()
    assert actual.lengths.tolist() == expected.lengths.tolist()
    assert actual.finished.tolist() == expected.finished.tolist()
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=0, atol=tolerance)


def assert_log_probs_of_each_row_alone(policy, generation, prompts=PROMPTS, temperature=0.8, tolerance=1e-5):
    for row in range(len(generation.lengths)):
        prompt, length = prompts[row * len(prompts) // len(generation.lengths)], int(generation.lengths[row])
        completion = generation.completion_ids[row, :length]
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + completion.tolist()])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.float() / temperature).log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(generation.log_probs[row, :length], expected, rtol=0, atol=tolerance)


def assert_varied(generation):
    assert len(set(generation.lengths.tolist())) > 3, "the rows must end at different times"
    assert not generation.finished.all(), "some row must run to the limit"


def test_tokens_and_log_probs_are_those_of_the_plain_path(policy, plain):
    assert runs_layouts(policy)
    generation = sample(policy)
    assert_varied(generation)
    assert_same(generation, plain(policy))


def test_more_architectures(another_policy, plain):
    assert runs_layouts(another_policy)
    generation = sample(another_policy)
    assert_same(generation, plain(another_policy))
    assert_log_probs_of_each_row_alone(another_policy, generation)


def test_greedy_tokens_are_those_of_the_plain_path(policy, plain):
    greedy = SamplingParams(16, eos_token_ids=(2,)).greedy()
    assert_same(sample(policy, sampling=greedy), plain(policy, sampling=greedy))


@pytest.mark.parametrize(("block", "read"), [(1, 1), (3, 2), (4, 32), (19, 32), (20, 7), (64, 4)])
def test_neither_blocks_nor_what_is_read_at_once_change_anything(policy, monkeypatch, block, read):
    expected = sample(policy)
    monkeypatch.setitem(cache.BLOCK, "cpu", block)
    monkeypatch.setattr(decode_layout, "READ", read)
    assert_same(sample(policy), expected)


@pytest.mark.parametrize("tokens", [1, 22, 38])
def test_prompts_may_be_prefilled_in_several_passes(policy, monkeypatch, tokens):
    expected = sample(policy)
    monkeypatch.setattr(shared_prompt, "PREFILL_TOKENS", tokens)
    assert_same(sample(policy), expected)


@pytest.mark.parametrize("compact_below", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("max_rows", [1, 6])
def test_neither_dropping_rows_nor_batches_change_anything(policy, plain, compact_below, max_rows):
    assert_same(sample(policy, compact_below=compact_below, max_rows=max_rows), plain(policy))


@pytest.mark.parametrize("num_samples", [1, 2, 9])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 33])
def test_any_group_size_and_limit(make_policy, plain, num_samples, max_new_tokens):
    policy = make_policy("gemma2")
    sampling = SamplingParams(max_new_tokens, eos_token_ids=(2,))
    keys = row_keys(5, 0, 0, range(len(PROMPTS)), num_samples)
    generation = sample(policy, PROMPTS, num_samples, sampling, keys)
    assert_same(generation, plain(policy, PROMPTS, num_samples, sampling, keys))
    assert_log_probs_of_each_row_alone(policy, generation, temperature=1.0)


def test_completions_much_longer_than_the_prompt_and_the_window(make_policy, plain):
    policy, sampling = make_policy("mistral"), SamplingParams(70)
    generation = sample(policy, [[7], [8, 9, 10]], 2, sampling, KEYS[:4])
    assert_same(generation, plain(policy, [[7], [8, 9, 10]], 2, sampling, KEYS[:4]))


@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("gemma3_text", {"sliding_window": 8})])
def test_stop_strings_end_the_same_rows(kind, more, tokenizer, plain):
    policy = build(kind, {**SMALL, "vocab_size": len(tokenizer), **more}, seed=2, initializer_range=0.05)
    assert runs_layouts(policy)
    stop = tuple("bcefghijklmnoqr")  # no letter of a special token
    sampling = SamplingParams(24, eos_token_ids=(2, 40, 41), stop=stop)
    prompts = [[token % len(tokenizer) for token in prompt] for prompt in PROMPTS]
    generation = sample(policy, prompts, sampling=sampling, tokenizer=tokenizer)
    assert_same(generation, plain(policy, prompts, sampling=sampling, tokenizer=tokenizer))
    texts = [
        tokenizer.decode(row[:length])
        for row, length in zip(generation.completion_ids, generation.lengths.tolist(), strict=True)
    ]
    ended = [any(string in text for string in stop) for text in texts]
    assert 1 < sum(ended) < len(texts)
    assert all(generation.finished[row] for row, ends in enumerate(ended) if ends)
    assert not any(string in text[:-1] for text in texts for string in stop)


def test_an_adapter_counts_while_it_is_switched_on(make_policy, plain):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = make_policy("qwen2")
    expected = sample(base)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(base), config).eval()
    assert runs_layouts(adapted)
    generation = sample(adapted)
    assert_same(generation, plain(adapted))
    assert_log_probs_of_each_row_alone(adapted, generation)
    assert generation.completion_ids.tolist() != expected.completion_ids.tolist()
    with adapted.disable_adapter():
        assert_same(sample(adapted), expected)


@pytest.mark.parametrize("kind", list(OTHERS))
def test_an_architecture_without_layouts_takes_the_plain_path(kind):
    policy = build(kind, OTHERS[kind])
    assert not runs_layouts(policy)
    generation = sample(policy)
    assert_varied(generation)
    assert_log_probs_of_each_row_alone(policy, generation)
    assert_same(sample(policy, max_rows=4, compact_below=1.0), generation)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_bfloat16(make_policy, name):
    policy = make_policy(name).to(torch.bfloat16)
    assert runs_layouts(policy)
    generation = sample(policy)
    assert generation.log_probs.dtype == torch.float32
    # One unit in the last place of a bfloat16 logit near 8 is 0.06.
    assert_log_probs_of_each_row_alone(policy, generation, tolerance=0.35)
    errors = generation.log_probs - generation.log_probs.to(torch.bfloat16)
    assert errors.abs().max() > 0, "log-probs are not rounded to bfloat16"


def test_autocast_to_bfloat16(llama):
    with torch.autocast("cpu", torch.bfloat16):
        generation = sample(llama)
        assert_log_probs_of_each_row_alone(llama, generation, tolerance=0.35)


def test_two_ranks_sample_what_one_does(policy):
    together, half = sample(policy), len(PROMPTS) // 2 * NUM_SAMPLES
    parts = [
        sample(policy, PROMPTS[: len(PROMPTS) // 2], keys=KEYS[:half]),
        sample(policy, PROMPTS[len(PROMPTS) // 2 :], keys=KEYS[half:]),
    ]
    rows = [row[:length] for part in parts for row, length in zip(part.completion_ids, part.lengths, strict=True)]
    assert len(rows) == len(together.lengths)
    for row, length, expected in zip(together.completion_ids, together.lengths, rows, strict=True):
        assert row[:length].tolist() == expected.tolist()
