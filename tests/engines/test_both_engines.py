"""What every engine has to do, asked of each of them in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, VLLMEngine, VLLMServers
from lit_rlhf.engines.randomness import row_keys
from tests.engines.vllm.server import Server

PROMPTS = [[5, 60, 61], [70, 71, 72, 73, 74, 75, 76, 77, 78, 90, 91, 92], [200]]
NUM_SAMPLES = 6
ROW_PROMPTS = [prompt for prompt in PROMPTS for _ in range(NUM_SAMPLES)]
KEYS = row_keys(3, 0, 1, range(len(PROMPTS)), NUM_SAMPLES)
LENGTH = 12


@pytest.fixture(scope="module")
def policy(tokenizer: Any) -> Any:
    """Its every token is a byte or a piece of a word, and a few are likely at each place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


VLLM = [pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm", "servers")]


@pytest.fixture(scope="module", params=["transformers", *VLLM])
def engine(request: pytest.FixtureRequest, policy: Any, tokenizer: Any, tmp_path_factory: Any) -> Iterator[Any]:
    if request.param != "servers":
        yield TransformersEngine() if request.param == "transformers" else VLLMEngine(max_rows=64)
        return
    folder = tmp_path_factory.mktemp("served")
    policy.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    server = Server(folder / "model", folder / "log")
    server.start()
    try:
        server.wait()
        yield VLLMServers(server.url, max_rows=32)
    finally:
        server.kill()


@pytest.fixture
def sample(engine: Any, policy: Any, tokenizer: Any) -> Any:
    def run(prompts=PROMPTS, num_samples=NUM_SAMPLES, keys=KEYS, max_new_tokens=LENGTH, **how):
        sampling = SamplingParams(max_new_tokens, **how)
        return engine.generate(policy, prompts, num_samples, sampling, keys, tokenizer)

    return run


@pytest.fixture
def endless(sample: Any) -> list[list[int]]:
    """Rows that nothing ends: what the same keys give as long as a row goes on."""
    return rows(sample())


def rows(generation: Any) -> list[list[int]]:
    pairs = zip(generation.completion_ids.tolist(), generation.lengths.tolist(), strict=True)
    return [row[:length] for row, length in pairs]


def distributions(policy: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """``(T, V)`` log-probs from one plain forward pass."""
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def cut(row: list[int], ends: Any) -> tuple[list[int], bool]:
    """The row up to the first place where ``ends`` holds, and whether there is one."""
    for length in range(1, len(row) + 1):
        if ends(row[:length]):
            return row[:length], True
    return row, False


@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}], ids=str)
def test_log_probs_are_of_the_scaled_and_unrestricted_distribution(sample, policy, how):
    generation = sample(**how)
    for place, (prompt, row) in enumerate(zip(ROW_PROMPTS, rows(generation), strict=True)):
        expected = distributions(policy, prompt, row, how.get("temperature", 1.0))[range(len(row)), row]
        torch.testing.assert_close(generation.log_probs[place].double(), expected, rtol=0, atol=1e-4)
    assert generation.log_probs.std() > 0.5, "distributions that a mistake would show in"
    assert generation.log_probs.dtype == torch.float32


def test_rows_that_nothing_ends_are_cut_off_and_not_finished(sample, endless):
    assert {len(row) for row in endless} == {LENGTH}
    assert len({tuple(row) for row in endless}) > len(ROW_PROMPTS) / 2
    shorter = sample(max_new_tokens=5)
    assert rows(shorter) == [row[:5] for row in endless]
    assert not shorter.finished.any()


def test_each_of_several_eos_ids_ends_a_row_and_stays_in_it(sample, endless):
    eos = (endless[0][2], endless[7][4], endless[13][LENGTH - 1])
    generation = sample(eos_token_ids=eos, pad_token_id=9)
    expected = [cut(row, lambda part: part[-1] in eos) for row in endless]
    assert rows(generation) == [row for row, _ in expected]
    assert generation.finished.tolist() == [ended for _, ended in expected]
    assert 0 < generation.finished.sum() < len(endless), "some rows must end, some must not"
    width = generation.completion_ids.shape[1]
    padding = torch.arange(width) >= generation.lengths[:, None]
    assert bool((generation.completion_ids[padding] == 9).all())
    assert bool((generation.log_probs[padding] == 0).all())


def test_an_eos_id_in_the_last_place_is_an_end(sample, endless):
    eos = (endless[0][-1],)
    row, ended = cut(endless[0], lambda part: part[-1] in eos)
    generation = sample(eos_token_ids=eos, max_new_tokens=len(row))
    assert ended
    assert rows(generation)[0] == row
    assert bool(generation.finished[0])


def test_the_eos_id_of_the_checkpoint_ends_nothing_by_itself(sample, policy):
    generation = sample([PROMPTS[0]], 100, row_keys(0, 0, 0, [0], 100))
    assert bool((generation.completion_ids[:, :-1] == policy.config.eos_token_id).any())
    assert generation.lengths.tolist() == [LENGTH] * 100
    assert not generation.finished.any()


@pytest.mark.parametrize("characters", [1, 2])
def test_stop_strings_end_a_row_with_the_token_that_completes_them(sample, endless, tokenizer, characters):
    readable = [tokenizer.decode(row).replace("\ufffd", "") for row in endless]
    stops = tuple({text[4 : 4 + characters] for text in readable[:3]} | {readable[8][1 : 1 + characters]})
    generation = sample(stop=stops)
    expected = [cut(row, lambda part: any(stop in tokenizer.decode(part) for stop in stops)) for row in endless]
    assert rows(generation) == [row for row, _ in expected]
    assert generation.finished.tolist() == [ended for _, ended in expected]
    assert 0 < generation.finished.sum() < len(endless)


def test_a_special_token_can_be_a_stop_string(sample, tokenizer):
    many = {"prompts": [PROMPTS[0]], "num_samples": 100, "keys": row_keys(0, 0, 0, [0], 100)}
    generation = sample(**many, stop=("<s>",))
    assert rows(generation) == [cut(row, lambda part: part[-1] == 1)[0] for row in rows(sample(**many))]
    assert bool(generation.finished.any())


def test_whichever_of_eos_and_stop_string_comes_first_ends_the_row(sample, endless, tokenizer):
    eos, stop = (endless[0][6],), tokenizer.decode(endless[1]).replace("\ufffd", "")[3]
    generation = sample(eos_token_ids=eos, stop=(stop,))
    expected = [cut(row, lambda part: part[-1] in eos or stop in tokenizer.decode(part)) for row in endless]
    assert rows(generation) == [row for row, _ in expected]
    assert generation.finished.tolist() == [ended for _, ended in expected]


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_top_k_and_top_p_and_min_p_are_judged_on_the_scaled_distribution(sample, policy, temperature):
    seen = {}
    for how in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}):
        drawn = sample([PROMPTS[0]], 300, row_keys(0, 0, 0, [0], 300), 1, temperature=temperature, **how)
        seen[next(iter(how))] = set(drawn.completion_ids[:, 0].tolist())
    probs = distributions(policy, PROMPTS[0], [0], temperature)[0].exp()
    ordered = probs.sort(descending=True)
    nucleus = int((ordered.values.cumsum(0) - ordered.values < 0.6).sum())
    likely = probs > 0.02  # what 300 draws cannot miss
    for name, allowed in {
        "top_k": set(ordered.indices[:3].tolist()),
        "top_p": set(ordered.indices[:nucleus].tolist()),
        "min_p": set((probs >= 0.3 * probs.max()).nonzero()[:, 0].tolist()),
    }.items():
        assert seen[name] <= allowed
        assert seen[name] >= {token for token in allowed if likely[token]}


def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one(sample, policy):
    generation = sample(num_samples=1, keys=KEYS[:3], temperature=0.0)
    for place, (prompt, row) in enumerate(zip(PROMPTS, rows(generation), strict=True)):
        expected = distributions(policy, prompt, row, 1.0)
        assert row == expected.argmax(-1).tolist()
        torch.testing.assert_close(generation.log_probs[place].double(), expected.amax(-1), rtol=0, atol=1e-4)


def test_rows_alone_are_rows_together_and_other_keys_give_others(sample, endless):
    for place in (0, 9, 17):
        assert rows(sample([ROW_PROMPTS[place]], 1, KEYS[place : place + 1])) == [endless[place]]
    assert rows(sample(keys=row_keys(4, 0, 1, range(len(PROMPTS)), NUM_SAMPLES))) != endless


def test_the_newest_weights_are_sampled(sample, policy, endless):
    saved = {name: value.clone() for name, value in policy.state_dict().items()}
    try:
        with torch.no_grad():
            policy.model.layers[1].mlp.down_proj.weight.mul_(-1.0)  # as a checkpoint does it
        flipped = sample()
        policy.model.layers[0].self_attn.q_proj.weight.data.mul_(0.5)  # past autograd's bookkeeping
        again = sample()
        assert rows(flipped) != endless
        for place, (prompt, row) in enumerate(zip(ROW_PROMPTS, rows(again), strict=True)):
            expected = distributions(policy, prompt, row, 1.0)[range(len(row)), row]
            torch.testing.assert_close(again.log_probs[place].double(), expected, rtol=0, atol=1e-4)
    finally:
        policy.load_state_dict(saved)
    assert rows(sample()) == endless


def test_the_random_state_of_the_process_is_neither_read_nor_changed(sample, endless):
    torch.manual_seed(7)
    np.random.seed(7)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert rows(sample()) == endless
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_what_cannot_be_sampled_is_refused_and_nothing_gives_nothing(sample):
    with pytest.raises(ValueError, match="18, got 17"):
        sample(keys=KEYS[:-1])
    with pytest.raises(ValueError, match=r"at least one token, these have none: \[1\]"):
        sample([[5], []], 1, KEYS[:2])
    nothing = sample([], 4, KEYS[:0])
    assert len(nothing.completion_ids) == len(nothing.lengths) == len(nothing.finished) == 0
