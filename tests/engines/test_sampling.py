"""Drawing by inverse CDF against exact probabilities: a uniform grid makes frequencies exact to one grid step."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_rlhf.engines import SamplingParams
from lit_rlhf.engines import sampling as sampling_module
from lit_rlhf.engines.sampling import sample_tokens

ALMOST_ONE = 1.0 - 2.0**-53
PROBS = [0.05, 0.5, 0.15, 0.3]


def draw(logits, uniform, **options):
    uniform = torch.tensor(uniform, dtype=torch.float64)
    logits = torch.as_tensor(logits).expand(len(uniform), -1)
    return sample_tokens(logits, uniform, SamplingParams(1, **options))


def frequencies(logits, steps=4000, **options):
    ids, _ = draw(logits, [(step + 0.5) / steps for step in range(steps)], **options)
    return torch.bincount(ids, minlength=len(logits)).double() / steps


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
def test_frequencies_are_the_probabilities(temperature):
    logits = torch.tensor([1.2, -0.4, 3.0, 0.0, 2.9, -5.0])
    expected = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(logits, temperature=temperature), expected, rtol=0, atol=1 / 4000)


def test_rows_are_independent_of_each_other():
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(20, 9, generator=generator), torch.rand(20, generator=generator).double()
    sampling = SamplingParams(1, temperature=0.8, top_p=0.9)
    ids, log_probs = sample_tokens(logits, uniform, sampling)
    for row in range(20):
        alone = sample_tokens(logits[row : row + 1], uniform[row : row + 1], sampling)
        assert ids[row] == alone[0][0]
        torch.testing.assert_close(log_probs[row], alone[1][0], rtol=0, atol=1e-6)


def test_impossible_tokens_are_never_drawn():
    inf = float("inf")
    ids, log_probs = draw([-inf, 0.0, -inf, 0.0, -inf], [0.0, 2.0**-53, 0.4999, 0.5, 0.9, ALMOST_ONE])
    assert ids.tolist() == [1, 1, 1, 3, 3, 3]
    torch.testing.assert_close(log_probs, torch.full((6,), 0.5).log())


@pytest.mark.parametrize("total", range(1, 60))
def test_the_largest_uniform_number_draws_the_last_possible_token(total):
    logits = torch.full((total + 2,), -300.0)
    logits[1 : total + 1] = torch.linspace(-2.0, 2.0, total)
    ids, _ = draw(logits, [0.0, ALMOST_ONE])
    assert ids.tolist() == [1, total]


def test_a_large_vocabulary_is_resolved_to_the_single_token():
    vocab = 151_936
    tokens = torch.arange(0, vocab, 6_007)
    ids, log_probs = draw(torch.zeros(vocab), ((tokens.double() + 0.5) / vocab).tolist())
    assert ids.tolist() == tokens.tolist()
    torch.testing.assert_close(log_probs, -torch.full((len(tokens),), float(vocab)).log())


def test_the_many_tokens_of_a_flat_tail_can_all_be_drawn():
    logits = torch.full((20_001,), -20.0)
    logits[0] = 0.0
    places = torch.arange(1_000, 1_400).double() + 0.5
    each = torch.tensor(-20.0, dtype=torch.float64).exp()
    ids, _ = draw(logits, ((1 + places * each) / (1 + 20_000 * each)).tolist())
    # In float32 the cumulative sum would stand still over thirty tokens at a time.
    assert (ids[1:] - ids[:-1] == 1).all()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.81}, {1, 2, 3}),
        ({"top_p": 0.96}, {0, 1, 2, 3}),
        ({"min_p": 0.2}, {1, 2, 3}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 0.99}, {1}),
        ({"top_k": 3, "top_p": 0.6}, {1, 3}),
        ({"top_k": 1, "top_p": 0.96}, {1}),
        ({"top_p": 0.96, "min_p": 0.2}, {1, 2, 3}),
    ],
    ids=str,
)
def test_restrictions_keep_exactly_the_right_tokens(options, kept):
    probs = torch.tensor(PROBS, dtype=torch.float64)
    expected = torch.tensor([p if token in kept else 0.0 for token, p in enumerate(PROBS)], dtype=torch.float64)
    actual = frequencies(probs.log().float(), **options)
    torch.testing.assert_close(actual, expected / expected.sum(), rtol=0, atol=1 / 4000)
    assert {token for token, frequency in enumerate(actual) if frequency > 0} == kept


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.49}, 2),
        ({"top_p": 0.51}, 3),
        ({"min_p": 0.99}, 4),
        ({"top_k": 3, "min_p": 0.9}, 3),
    ],
    ids=str,
)
def test_ties_are_broken_by_the_lower_id(options, kept):
    actual = frequencies(torch.zeros(4), **options)
    torch.testing.assert_close(actual[:kept], torch.full((kept,), 1 / kept, dtype=torch.float64), rtol=0, atol=1 / 4000)
    assert (actual[kept:] == 0).all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5], ids=str)
def test_restrictions_follow_the_tokens_whatever_their_order(order):
    plain = torch.tensor(PROBS).log()
    expected = frequencies(plain, top_k=3, min_p=0.4)[list(order)]
    torch.testing.assert_close(frequencies(plain[list(order)], top_k=3, min_p=0.4), expected, rtol=0, atol=1 / 4000)


def test_restrictions_are_judged_after_the_temperature():
    logits = torch.tensor(PROBS).log()
    # At temperature 0.5 the probabilities are squared: 0.25 and 0.09 of 0.365 in all.
    assert (frequencies(logits, temperature=0.5, top_p=0.68)[[0, 2, 3]] == 0).all()
    assert frequencies(logits, temperature=1.0, top_p=0.68)[3] > 0


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_log_probs_are_those_of_the_unrestricted_distribution(options):
    logits = torch.tensor([1.0, 3.0, 0.0, 2.5])
    ids, log_probs = draw(logits, [0.0, 0.3, 0.6, 0.999], temperature=0.7, **options)
    torch.testing.assert_close(log_probs, (logits / 0.7).log_softmax(-1)[ids], rtol=0, atol=1e-6)


def test_greedy_takes_the_likeliest_token_with_its_log_prob_at_temperature_one():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.5])
    ids, log_probs = draw(logits, [0.0, 0.5, ALMOST_ONE], temperature=0.0)
    assert ids.tolist() == [1, 1, 1]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_half_precision_logits_are_treated_in_float32(dtype, temperature):
    logits = (torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    ids, log_probs = draw(logits, [0.1, 0.5, 0.9], temperature=temperature)
    assert log_probs.dtype == torch.float32
    expected = (logits.double() / (temperature or 1.0)).log_softmax(-1)[ids]
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 256, 1000, 3333])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_is_drawn_from_its_own_interval(vocab, temperature):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    ends = (logits.double() / temperature).softmax(-1).cumsum(-1)
    starts = torch.cat([torch.zeros(1), ends[:-1]])
    wide = (ends - starts > 1e-6).nonzero()[:, 0]  # what rounding of the others' float32 weights cannot move
    assert len(wide) > 0.9 * vocab
    ids, _ = draw(logits, ((starts + ends) / 2)[wide].tolist(), temperature=temperature)
    assert ids.tolist() == wide.tolist()


def test_blocks_of_impossible_tokens_are_never_entered():
    logits = torch.full((1000,), -float("inf"))
    possible = torch.tensor([300, 301, 700])
    logits[possible] = torch.tensor([0.0, 1.0, 0.5])
    ids, _ = draw(logits, [0.0, 2.0**-53, 0.3, 0.5, 0.63, 0.64, 0.9, ALMOST_ONE])
    assert set(ids.tolist()) == set(possible.tolist())
    assert ids[0] == 300
    assert ids[-1] == 700


def test_rows_are_drawn_the_same_in_parts(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    logits, uniform = torch.randn(13, 500, generator=generator), torch.rand(13, generator=generator).double()
    for sampling in (
        SamplingParams(1, 0.8),
        SamplingParams(1, 0.0),
        SamplingParams(1, top_k=20, top_p=0.9, min_p=0.01),
    ):
        whole = sample_tokens(logits, uniform, sampling)
        for chunk in (1, 500, 1700, 6500):
            monkeypatch.setitem(sampling_module._CHUNK, "cpu", chunk)
            ids, log_probs = sample_tokens(logits, uniform, sampling)
            assert ids.tolist() == whole[0].tolist()
            torch.testing.assert_close(log_probs, whole[1], rtol=0, atol=1e-6)
            monkeypatch.undo()


def kept_by_sorting(probs, top_k, top_p, min_p):
    """Straight from the definitions, in float64."""
    ordered, order = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = (torch.arange(len(probs)) < (top_k or len(probs))) & (before < top_p)
    return set(order[kept].tolist()) & set((probs >= min_p * probs.max()).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"top_k": 7},
        {"top_k": 1500},
        {"top_k": 1500, "top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.2},
    ],
    ids=str,
)
def test_restrictions_of_a_large_vocabulary_are_those_of_sorting_it(options, scale):
    # Whole numbers, so that thousands of tokens tie where the restriction falls.
    logits = torch.randint(-2, 3, (3000,), generator=torch.Generator().manual_seed(3)) * scale
    probs = logits.double().softmax(-1)
    expected = kept_by_sorting(probs, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0))
    ends = torch.where(torch.isin(torch.arange(3000), torch.tensor(sorted(expected))), probs, 0.0).cumsum(0)
    middles = (ends - probs / 2)[sorted(expected)] / ends[-1]
    ids, _ = draw(logits, middles.tolist(), **options)
    if "top_p" in options and len(expected) > 1:
        # The sum before the last token may round to either side of top_p.
        assert len(set(ids.tolist()) ^ expected) <= 1
    else:
        assert ids.tolist() == sorted(expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_of_nan_shows_in_its_log_prob_alone(options):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    uniform, sampling = torch.full((3,), 0.5).double(), SamplingParams(1, **options)
    expected = sample_tokens(logits, uniform, sampling)
    logits[1, 7] = torch.nan
    ids, log_probs = sample_tokens(logits, uniform, sampling)
    assert ids[[0, 2]].tolist() == expected[0][[0, 2]].tolist()
    assert torch.isnan(log_probs).tolist() == [False, True, False]
    assert 0 <= ids[1] < 300
