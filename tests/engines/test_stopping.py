"""Stop strings: when a row ends, what its ids keep and what its text is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lit_rlhf.engines import SamplingParams, TransformersEngine
from lit_rlhf.engines.stopping import StopStrings, completion_text
from lit_rlhf.errors import ConfigurationError

EOS = 2


@pytest.fixture
def ids(tokenizer):
    """Ids of several pieces of text, each encoded on its own."""
    return lambda *pieces: [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]


@pytest.fixture
def run(scripted_policy, tokenizer):
    """Greedy completions of the prompts by their scripts, and their texts."""

    def run(scripts, stop, limit=40, with_tokenizer=True):
        sampling = SamplingParams(limit, temperature=0.0, stop=stop, eos_token_ids=(EOS,), pad_token_id=EOS)
        policy = scripted_policy(scripts, len(tokenizer))
        keys = np.zeros(len(scripts), dtype=np.uint64)
        prompts = [list(prompt) for prompt in scripts]
        out = TransformersEngine().generate(policy, prompts, 1, sampling, keys, tokenizer if with_tokenizer else None)
        completions = [
            row[:length] for row, length in zip(out.completion_ids.tolist(), out.lengths.tolist(), strict=True)
        ]
        return out, completions, [completion_text(tokenizer, row, stop) for row in completions]

    return run


def test_the_tokenizer_merges_what_the_tests_rely_on(tokenizer, ids):
    assert tokenizer.convert_ids_to_tokens(ids("</answer>.")) == ["</", "a", "n", "s", "w", "e", "r", ">."]
    assert tokenizer.convert_ids_to_tokens(ids("aaaa")) == ["aa", "aa"]


def test_a_stopped_row_keeps_its_tokens_and_is_finished_beside_a_row_that_ends_by_eos(run, ids):
    stopped, ended, endless = ids("<answer>4</answer>"), [*ids("4"), EOS], ids("no end " * 9)
    scripts = {(10,): stopped + ids("Human: x"), (11, 12): ended, (13,): endless}
    out, completions, texts = run(scripts, ("</answer>",))
    assert completions == [stopped, ended, endless[:40]]
    assert texts == ["<answer>4</answer>", "4", ("no end " * 9)[:40]]
    assert out.finished.tolist() == [True, True, False]
    assert EOS not in completions[0]
    assert (out.completion_ids[0, len(stopped) :] == EOS).all()  # the padding
    assert (out.log_probs[0, : len(stopped)] < -0.1).all()
    assert (out.log_probs[0, len(stopped) :] == 0).all()


def test_a_stop_string_may_end_inside_a_token(run, ids):
    out, completions, texts = run({(10,): ids("<answer>4</answer>.", "more")}, ("</answer>",))
    assert completions == [ids("<answer>4</answer>.")]
    assert texts == ["<answer>4</answer>"]
    assert out.finished.tolist() == [True]


def test_a_stop_string_may_begin_inside_a_token(run, ids):
    _, completions, texts = run({(10,): ids("b", ">.", "x", "more")}, (".x",))
    assert completions == [ids("b", ">.", "x")]
    assert texts == ["b>.x"]


@pytest.mark.parametrize("stop", [("</answer>", "Human:"), ("Human:", "</answer>")], ids=str)
def test_the_earlier_of_two_stop_strings_in_the_text_wins(run, ids, stop):
    _, completions, texts = run({(10,): ids("4</answer>Human:")}, stop)
    assert (completions, texts) == ([ids("4</answer>")], ["4</answer>"])


@pytest.mark.parametrize("stop", [(".", ">"), (">", ".")], ids=str)
def test_the_earlier_of_two_stop_strings_inside_one_token_wins(run, ids, stop):
    _, completions, texts = run({(10,): ids("4>.", "more")}, stop)
    assert (completions, texts) == ([ids("4>.")], ["4>"])


def test_a_stop_string_completed_by_the_last_allowed_token_finishes_the_row(run, ids):
    out, completions, _ = run({(10,): ids("abEND more"), (11,): ids("abcEN more")}, ("END",), limit=5)
    assert completions == [ids("abEND"), ids("abcEN")]
    assert out.finished.tolist() == [True, False]


def test_the_prompt_does_not_count_as_part_of_a_stop_string(run, ids):
    _, completions, _ = run({tuple(ids("EN")): [*ids("D, not yet END"), *ids(" more")]}, ("END",))
    assert completions == [ids("D, not yet END")]


def test_a_stop_string_of_several_bytes_per_character(run, ids):
    _, completions, texts = run({(10,): ids("ab→ more")}, ("→",))
    assert completions == [ids("ab→")]
    assert len(completions[0]) == 5
    assert texts == ["ab→"]


def test_ends_at_the_first_token_after_which_the_whole_text_holds_a_stop_string(tokenizer, ids):
    choose = random.Random(0)
    stop = ("ab→", "→→→b", "a</b>")
    stops = StopStrings(tokenizer, stop)
    late = 0
    for _ in range(150):
        row = [choose.choice(ids("a", "b", "</", ">", ">.", "é→", "aa")) for _ in range(30)]
        place = choose.randrange(30)
        row[place:place] = ids(choose.choice(stop))
        whole = [any(s in tokenizer.decode(row[: n + 1]) for s in stop) for n in range(len(row))]
        first = whole.index(True)
        assert [stops.ends(row[: n + 1]) for n in range(first + 1)] == whole[: first + 1]
        late += first > stops.tail
    assert late > 50


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigurationError, match="must not be empty"):
        SamplingParams(4, stop=("</answer>", ""))


def test_a_single_string_is_not_taken_for_its_letters():
    with pytest.raises(ConfigurationError, match="tuple of strings, got the string '</answer>'"):
        SamplingParams(4, stop="</answer>")


def test_stop_strings_without_a_tokenizer_are_refused(run, ids):
    with pytest.raises(ConfigurationError, match="tokenizer"):
        run({(10,): ids("4")}, ("</answer>",), with_tokenizer=False)


def test_special_tokens_are_left_out_of_the_text(tokenizer, ids):
    assert completion_text(tokenizer, [*ids("4 "), *ids("apples"), EOS]) == "4 apples"
    assert completion_text(tokenizer, [EOS]) == ""


def test_sampled_tokens_stay_what_they_are_though_their_text_would_be_encoded_otherwise(run, tokenizer):
    single = tokenizer.convert_tokens_to_ids("a")
    out, completions, texts = run({(10,): [single] * 4 + [EOS]}, ())
    assert completions == [[single] * 4 + [EOS]]
    assert texts == ["aaaa"]
    assert tokenizer.encode(texts[0]) == [tokenizer.convert_tokens_to_ids("aa")] * 2
    assert (out.log_probs[0] < -0.1).tolist() == [True] * 5


def test_a_row_cut_inside_a_character_keeps_its_ids(run, ids):
    emoji = ids("🙂")
    assert len(emoji) == 4
    out, completions, texts = run({(10,): emoji}, (), limit=2)
    assert completions == [emoji[:2]]
    assert "\N{REPLACEMENT CHARACTER}" in texts[0]
    assert out.finished.tolist() == [False]
