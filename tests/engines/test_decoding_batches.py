"""Rows, batches and caches while decoding with shared prompts, seen with tokens that are laid down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lit_rlhf.engines import SamplingParams, TransformersEngine, cache, shared_prompt, transformers
from lit_rlhf.models.layouts import runs_layouts
from tests.engines.test_shared_prompt import KEYS, NUM_SAMPLES, PROMPTS, assert_same

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
