from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lit_rlhf.data.prompts import load_prompts
from lit_rlhf.data.template import PromptTemplate
from lit_rlhf.errors import ConfigurationError, DataError

Make = Callable[..., Any]


def test_text_goes_through_unchanged() -> None:
    text = "  <b>3 € & {{ x }}</b>\n 🙂 \n"
    assert PromptTemplate("{{ a }}\n").render({"a": text}) == text + "\n"


def test_all_columns_reach_the_rewards_and_a_template_may_look_inside_them(make_tokenizer: Make) -> None:
    row = {"target": 24, "nums": [3, 8], "prompt": [{"role": "user", "content": "hi"}], "more": {"a": 1}}
    template = "{{ prompt[0].content }} {{ nums | join('+') }}{% if more.a %} = {{ target }}{% endif %}"
    (prompt,) = load_prompts([row], make_tokenizer(), prompt_template=template).prompts
    assert prompt.text == "hi 3+8 = 24"
    assert prompt.columns == row
    (chat,) = load_prompts([row], make_tokenizer(), prompt_template=template, as_chat=True, system_prompt="s").prompts
    assert chat.text == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi 3+8 = 24"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nmus }}", r"'nmus' is undefined. The row has 'nums', 'none'"),
        ("{{ none }}", "asks for a value that is null"),
        ("{{ nums[5] }}", "has no element 5"),
        ("{{ nums | join(', ') / 2 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nums.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ nums.append(1) }}", "SecurityError|not safely callable|unsafe"),
    ],
)
def test_what_a_row_cannot_give_is_named_with_the_row(make_tokenizer: Make, template: str, message: str) -> None:
    rows = [{"nums": [1], "none": None}]
    with pytest.raises(DataError, match=rf"iterable, row 1, `prompt_template`: .*({message})"):
        load_prompts(rows, make_tokenizer(), prompt_template=template)
    assert rows == [{"nums": [1], "none": None}]


def test_only_rows_that_lack_the_column_are_refused(make_tokenizer: Make) -> None:
    rows = [{"a": "1"}, {"b": "2"}, {"a": "3"}]
    with pytest.raises(DataError, match=r"row 2, .*'a' is undefined.*\(1 of 3 rows give no prompt"):
        load_prompts(rows, make_tokenizer(), prompt_template="{{ a }}")
    data = load_prompts(rows, make_tokenizer(), prompt_template="{{ a }}", bad_prompts="drop")
    assert [prompt.text for prompt in data.prompts] == ["1", "3"]


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(ConfigurationError, match=r"not Jinja \(line 2"):
        PromptTemplate("a\n{{ b")


def test_column_and_template_contradict_each_other(make_tokenizer: Make) -> None:
    with pytest.raises(ConfigurationError, match="prompt_column or prompt_template, not both"):
        load_prompts(["a"], make_tokenizer(), prompt_column="prompt", prompt_template="{{ prompt }}")
