from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf.data.cutting import cut_prompt
from lit_rlhf.data.prompts import encode_prompt, load_prompts

BOS, ASSISTANT, END = 1, 6, 7
Make = Callable[..., Any]


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ["system", "user", "assistant", "user"]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_headers_and_other_turns_stay(make_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    long = chat("be kind", "beginning " + "x" * 50 + " end", "yes", "go on")
    overhead = len(encode_prompt(tokenizer, chat("be kind", "", "yes", "go on")))
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = load_prompts([{"prompt": long}], tokenizer, max_prompt_length=overhead + 14, overlong="cut")
    (prompt,) = data.prompts
    assert prompt.text == chat("be kind", "beginnixxx end", "yes", "go on")
    assert prompt.ids == encode_prompt(tokenizer, prompt.text)
    assert len(prompt.ids) == overhead + 14
    assert prompt.ids[0] == BOS
    assert prompt.ids[-2:] == (END, ASSISTANT)
    assert data.cut == {0: overhead + 64}
    assert data.dropped == 0
    assert caplog.messages == [
        f"iterable: 1 of 1 prompts longer than {overhead + 14} tokens cut, longest {overhead + 64} (row 1)"
    ]
    assert long == chat("be kind", "beginning " + "x" * 50 + " end", "yes", "go on")  # the source is not edited


def test_a_plain_string_keeps_its_one_bos(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    (prompt,) = load_prompts(["0123456789"], tokenizer, max_prompt_length=5, overlong="cut").prompts
    assert prompt.text == "0189"
    assert prompt.ids == (BOS, *tokenizer("0189", add_special_tokens=False)["input_ids"])


def test_a_prompt_at_the_limit_is_left_alone(make_tokenizer: Make) -> None:
    data = load_prompts(["12345", "123456"], make_tokenizer(), max_prompt_length=5, overlong="cut")
    assert [prompt.text for prompt in data.prompts] == ["12345", "12356"]
    assert data.cut == {1: 6}


def test_what_cannot_be_cut_is_dropped_and_counted(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    parts = [{"role": "user", "content": [{"type": "text", "text": "x" * 50}]}]
    long_system = chat("s" * 50, "hi")
    shorter = cut_prompt(long_system, lambda text: encode_prompt(tokenizer, text), 20)
    assert shorter is None
    assert cut_prompt(parts, lambda text: encode_prompt(tokenizer, text), 20) is None
    data = load_prompts(
        [{"prompt": chat("s", "hi")}, {"prompt": long_system}], tokenizer, max_prompt_length=20, overlong="cut"
    )
    assert [prompt.index for prompt in data.prompts] == [0]
    assert list(data.overlong) == [1]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), limit=st.integers(1, 70))
def test_the_cut_prompt_fits_and_is_a_beginning_and_an_end(make_tokenizer: Make, text: str, limit: int) -> None:
    tokenizer = make_tokenizer()

    def encode(prompt: Any) -> tuple[int, ...]:
        return encode_prompt(tokenizer, prompt)

    cut = cut_prompt(text, encode, limit)
    if cut is None:
        assert len(encode(text[0])) > limit or len(text) == 1
        return
    kept, ids = cut
    assert ids == encode(kept)
    assert len(ids) <= limit
    head = -(-len(kept) // 2)
    assert text.startswith(kept[:head])
    assert text.endswith(kept[head:])
    assert len(kept) < len(text)
