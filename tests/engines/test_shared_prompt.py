"""Decoding with shared prompts against the plain path and against one unpadded forward pass per row."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, cache, decode_layout, shared_prompt, transformers
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.models.layouts import runs_layouts

GENERATOR = torch.Generator().manual_seed(8)
PROMPTS = [torch.randint(3, 48, (length,), generator=GENERATOR).tolist() for length in (19, 3, 33, 1, 19)]
NUM_SAMPLES = 3
KEYS = row_keys(4, 0, 0, range(len(PROMPTS)), NUM_SAMPLES)
# Twice the sliding windows of the fixtures, so that prompts leave them whole.
SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.8, eos_token_ids=(2, 9, 31))

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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


def build(kind, options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **options)
    config.initializer_range = 0.25
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
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    options = {**SMALL, "vocab_size": len(tokenizer), "initializer_range": 0.05}
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options, **more)).eval()
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


ONE_END = SamplingParams(8, eos_token_ids=(2,))


class Scripted(TransformersEngine):
    """Ends row ``n`` after ``n % 7 + 1`` tokens that name row and step; notes the rows of every step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def sample(self, logits, uniform, sampling, rows, step):
        self.seen.append((step, rows.tolist()))
        ids = torch.where(rows % 7 == step, 2, 3 + (5 * rows + step) % 40)
        return ids, -rows - step / 10


@pytest.mark.parametrize("options", [{}, {"compact_below": 1.0}, {"max_rows": 4}, {"compact_below": 0.0}], ids=str)
def test_a_subclass_may_choose_the_tokens(llama, options):
    engine = Scripted(**options)
    generation = engine.generate(llama, PROMPTS, NUM_SAMPLES, ONE_END, KEYS)
    for row, length in enumerate(generation.lengths.tolist()):
        assert length == row % 7 + 1
        expected = [3 + (5 * row + step) % 40 for step in range(length - 1)] + [2]
        assert generation.completion_ids[row].tolist() == expected + [0] * (7 - length)
        log_probs = [-row - step / 10 for step in range(length)] + [0.0] * (7 - length)
        assert generation.log_probs[row].tolist() == pytest.approx(log_probs)
    assert generation.finished.all()


def test_finished_rows_are_dropped_at_once_or_as_late_as_asked(llama):
    def counts(**options):
        engine = Scripted(**options)
        engine.generate(llama, PROMPTS, NUM_SAMPLES, ONE_END, KEYS)
        return [len(rows) for _, rows in engine.seen]

    alive = [sum(row % 7 >= step for row in range(15)) for step in range(7)]
    assert counts(compact_below=1.0) == alive
    assert counts(compact_below=0.0) == [15] * 7
    between = counts(compact_below=0.6)
    assert all(few <= rows for few, rows in zip(alive, between, strict=True))
    assert 1 < len(set(between)) < len(set(alive))


@pytest.mark.parametrize("max_tokens", [1, 60, 120, 200, 10_000])
@pytest.mark.parametrize("copies", [1, NUM_SAMPLES], ids=["shared prompts", "plain path"])
def test_a_batch_holds_at_most_the_given_tokens(llama, monkeypatch, max_tokens, copies):
    monkeypatch.setattr(transformers, "runs_layouts", lambda model: copies == 1 and runs_layouts(model))
    engine = Scripted(max_tokens=max_tokens, compact_below=0.0)
    expected = Scripted().generate(llama, PROMPTS, NUM_SAMPLES, ONE_END, KEYS)
    assert_same(engine.generate(llama, PROMPTS, NUM_SAMPLES, ONE_END, KEYS), expected)
    batches = [sorted({row // NUM_SAMPLES for row in rows}) for step, rows in engine.seen if step == 0]
    assert sorted(index for batch in batches for index in batch) == list(range(len(PROMPTS)))

    def cost(batch):
        return len(batch) * (
            copies * max(len(PROMPTS[index]) for index in batch) + NUM_SAMPLES * ONE_END.max_new_tokens
        )

    assert all(len(batch) == 1 or cost(batch) <= max_tokens for batch in batches)
    lengths = [[len(PROMPTS[index]) for index in batch] for batch in batches]
    assert all(max(one) <= min(two) for one, two in itertools.pairwise(lengths)), "of similar length"
    joined = [cost(one + two) for one, two in itertools.pairwise(batches)]
    assert all(tokens > max_tokens for tokens in joined), "no smaller than they need be"


def test_prompts_are_stored_once_per_group_and_stay_where_they_are(llama):
    assert runs_layouts(llama)
    decoder = shared_prompt.SharedPromptDecoder(llama, [[5, 6, 7], [8, 9]], num_samples=16)
    with torch.no_grad():
        decoder.prefill()
        layer = decoder.cache.layers[0]
        assert layer.prompt_keys.shape[:3] == (2, 2, 3)
        assert not layer.own_keys, "no room before there is a token"
        pointer = layer.prompt_keys.data_ptr()
        decoder.step(torch.full((32,), 4))
        own = layer.own_keys[0]
        decoder.keep(torch.arange(20))
        decoder.step(torch.full((20,), 4))
    assert layer.prompt_keys.data_ptr() == pointer
    assert layer.own_keys[0] is own, "rows that keep their place are not copied"


def test_rows_that_leave_free_their_room_in_later_blocks(llama, monkeypatch):
    monkeypatch.setitem(cache.BLOCK, "cpu", 4)
    engine_rows = []

    class Watched(shared_prompt.SharedPromptDecoder):
        def step(self, ids):
            logits = super().step(ids)
            engine_rows.append([len(block) for block in self.cache.layers[1].own_values])
            return logits

    monkeypatch.setattr(transformers, "SharedPromptDecoder", Watched)
    Scripted(compact_below=1.0).generate(llama, PROMPTS, NUM_SAMPLES, ONE_END, KEYS)
    first, last = engine_rows[0], engine_rows[-1]
    assert first == [sum(row % 7 >= 1 for row in range(15))]
    assert last == [first[0], sum(row % 7 >= 5 for row in range(15))]


def test_keys_of_other_rows_never_reach_a_row(llama):
    """A row whose neighbours are changed to NaN sees nothing of them."""
    decoder = shared_prompt.SharedPromptDecoder(llama, [[5, 6, 7], [8, 9]], num_samples=2)
    clean = shared_prompt.SharedPromptDecoder(llama, [[5, 6, 7], [8, 9]], num_samples=2)
    with torch.no_grad():
        for one in (decoder, clean):
            one.prefill()
            one.step(torch.tensor([11, 12, 13, 14]))
        for layer in decoder.cache.layers.values():
            layer.own_keys[0][1] = torch.nan
            layer.own_values[0][1] = torch.nan
        actual, expected = (one.step(torch.tensor([21, 22, 23, 24])) for one in (decoder, clean))
    others = [0, 2, 3]
    assert actual[1].isnan().all()
    torch.testing.assert_close(actual[others], expected[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_filling_gaps_moves_as_few_rows_as_possible(seed):
    alive = torch.from_numpy(np.random.default_rng(seed).random(17) < seed / 19)
    order = cache.fill_gaps(alive).tolist()
    living = alive.nonzero()[:, 0].tolist()
    assert sorted(order) == living
    moved = [place for place, row in enumerate(order) if place != row]
    assert len(moved) == sum(row >= len(living) for row in living)
