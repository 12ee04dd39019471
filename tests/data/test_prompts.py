from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data.prompts import encode_prompt, load_prompts
from lit_rlhf.errors import ConfigurationError, DataError

BOS, EOS, USER, SYSTEM, ASSISTANT, END = 1, 2, 4, 5, 6, 7
Make = Callable[..., Any]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_plain_text_follows_the_tokenizer_and_keeps_all_columns(make_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=True)
    path = write(tmp_path / "train.jsonl", [{"prompt": "2+2?", "answer": 4}, {"prompt": "1+1?", "level": "easy"}])
    data = load_prompts(path, tokenizer)
    assert len(data) == 2
    assert data.columns == ["answer", "level"]
    assert data[0].columns == {"answer": 4, "level": None}
    assert data[1].columns == {"answer": None, "level": "easy"}
    assert data[0].text == "2+2?"
    assert data[0].ids[0] == BOS
    assert data[0].ids.count(BOS) == 1
    assert tokenizer.decode(data[0].ids[1:]) == "2+2?"
    assert (data.name, data.dropped, data.longest, data.report()) == (str(path), 0, 5, None)
    assert data.where(1) == f"{path}, line 2"


def test_text_goes_through_unchanged(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    for text in ("Wie viel ist 3 € + 4 €? 🙂", "  三加四？\n", "ﬁ ½ <b>&amp;</b>"):
        (plain,) = load_prompts([text], tokenizer).prompts
        (chat,) = load_prompts([{"prompt": user(text)}], tokenizer).prompts
        assert plain.text == text
        assert tokenizer.decode(plain.ids) == text
        assert chat.text == user(text)
        assert tokenizer.decode(chat.ids) == f"<s><user>{text}<end><assistant>"


def test_end_of_sequence_that_the_tokenizer_appends_is_left_off(make_tokenizer: Make) -> None:
    for pad in ("<pad>", "</s>"):
        tokenizer = make_tokenizer(bos=True, eos=True, pad=pad)
        assert tokenizer("ab")["input_ids"][-1] == EOS
        ids = encode_prompt(tokenizer, "ab")
        assert ids == tuple(tokenizer("ab")["input_ids"][:-1])
        assert encode_prompt(tokenizer, "ab</s>") == (*ids, EOS)  # written by the user, so it stays


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_chat_has_one_bos_and_ends_with_the_assistant_header(
    make_tokenizer: Make, adds_bos: bool, adds_eos: bool
) -> None:
    tokenizer = make_tokenizer(bos=adds_bos, eos=adds_eos)
    ids = encode_prompt(tokenizer, user("2+2?"))
    assert ids.count(BOS) == 1
    assert ids[:2] == (BOS, USER)
    assert ids[-2:] == (END, ASSISTANT)
    if adds_bos:  # the defect this guards against: rendering to text first doubles it
        rendered = tokenizer.apply_chat_template(user("2+2?"), tokenize=False, add_generation_prompt=True)
        assert tokenizer(rendered)["input_ids"][:2] == [BOS, BOS]


def test_inner_end_of_turn_survives_when_pad_is_eos(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}{{ '<assistant>' }}"
    tokenizer = make_tokenizer(pad="</s>", template=template)
    (prompt,) = load_prompts([{"prompt": user("hi")}], tokenizer).prompts
    assert prompt.ids[-2:] == (EOS, ASSISTANT)


def test_tokenizer_is_left_as_it_was(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(pad=None)
    before = (len(tokenizer), tokenizer.pad_token, tokenizer.padding_side)
    load_prompts(["abc"], tokenizer, max_prompt_length=3)
    assert (len(tokenizer), tokenizer.pad_token, tokenizer.padding_side) == before


def test_system_prompt_is_put_in_front_and_the_rows_own_wins(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    own = [{"role": "system", "content": "own"}, *user("b")]
    rows = [{"prompt": user("a")}, {"prompt": own}]
    data = load_prompts(rows, tokenizer, system_prompt="general")
    assert data[0].text == [{"role": "system", "content": "general"}, *user("a")]
    assert data[1].text == own
    assert all(prompt.ids.count(SYSTEM) == 1 for prompt in data.prompts)
    assert data[0].ids == encode_prompt(tokenizer, user("a"), "general") == encode_prompt(tokenizer, data[0].text)
    assert rows[0]["prompt"] == user("a")  # the source is not edited

    with pytest.raises(ConfigurationError, match=r"iterable, row 1: `system_prompt`.*must hold messages"):
        load_prompts(["plain"], tokenizer, system_prompt="general")


def test_chat_prompts_from_parquet_written_by_pandas(make_tokenizer: Make, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    tokenizer = make_tokenizer()
    mixed = [{"role": "system", "content": "s", "name": "x"}, *user("2+2?")]  # parquet fills user's name with null
    path = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": [user("2+2?"), mixed], "tests": [["a"], ["b", "c"]], "level": [1, 2]}).to_parquet(path)
    for source in (path, pandas.read_parquet(path).to_dict("records")):
        data = load_prompts(source, tokenizer)
        assert data[0].text == user("2+2?")
        assert data[1].text == mixed
        assert data[0].ids == encode_prompt(tokenizer, user("2+2?"))
        assert data[1].columns == {"tests": ["b", "c"], "level": 2}
        assert type(data[1].columns["level"]) is int


def test_overlong_prompts_are_dropped_with_a_report(
    make_tokenizer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    overhead = len(encode_prompt(tokenizer, user("x"))) - 1
    rows = [{"prompt": user("x" * (length - overhead)), "n": length} for length in (9, 16, 20)]
    path = write(tmp_path / "train.jsonl", rows)
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = load_prompts(path, tokenizer, max_prompt_length=16)
    assert [len(prompt.ids) for prompt in data.prompts] == [9, 16]
    assert [prompt.ids[-1] for prompt in data.prompts] == [ASSISTANT, ASSISTANT]
    assert (data.dropped, data.longest) == (1, 16)
    expected = f"{path}: 1 of 3 prompts longer than 16 tokens dropped, longest 20 (line 3)"
    assert data.report() == expected
    assert caplog.messages == [expected]

    with pytest.raises(DataError, match=r"1 of 3 prompts longer than 16 tokens refused, longest 20 \(line 3\).*drop"):
        load_prompts(path, tokenizer, max_prompt_length=16, overlong="error")
    with pytest.raises(DataError, match=r"3 of 3 prompts longer than 8 tokens refused, .*raise `max_prompt_length`"):
        load_prompts(path, tokenizer, max_prompt_length=8)


def test_index_is_the_place_in_the_source_whatever_is_dropped(make_tokenizer: Make) -> None:
    data = load_prompts(["long long", "a", "long", "b"], make_tokenizer(), max_prompt_length=1)
    assert [prompt.index for prompt in data.prompts] == [1, 3]
    assert data.where(1) == "iterable, row 4"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "an empty string"),
        (None, r"missing \(null\)"),
        (17, r"is 17 \(int\); a string or a list of messages"),
        ({"role": "user", "content": "a"}, r"\(dict\); a string or a list"),
        ([], "an empty list of messages"),
        (["a"], "message 1 is 'a'"),
        ([{"content": "a"}], "message 1 is"),
        ([{"role": "user", "content": None}], r"message 1 \(role 'user'\) has the content None"),
        ([{"role": "user", "content": 3}], r"message 1 \(role 'user'\) has the content 3"),
        ([{"role": "user", "content": ""}], r"last message \(role 'user'\) is empty"),
        ([*user("a"), {"role": "assistant", "content": "b"}], "last message has the role 'assistant'"),
        ("\ud83d", "the tokenizer cannot read"),
    ],
)
def test_unusable_prompts_are_named_with_file_and_row(
    make_tokenizer: Make, tmp_path: Path, prompt: Any, message: str
) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": "good"}, {"prompt": prompt}])
    with pytest.raises(DataError, match=rf"train\.jsonl, line 2, column 'prompt': .*{message}"):
        load_prompts(path, make_tokenizer())


def test_unusable_prompts_are_dropped_if_asked_counted_and_listed(
    make_tokenizer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": p} for p in ("a", "", "b", 17, "\ud83d")])
    with pytest.raises(
        DataError, match=r"line 2, .*an empty string \(3 of 5 rows give no prompt; .*`bad_prompts: drop`"
    ):
        load_prompts(path, make_tokenizer())
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        data = load_prompts(path, make_tokenizer(), bad_prompts="drop")
    assert [prompt.text for prompt in data.prompts] == ["a", "b"]
    assert [data.where(position) for position in range(2)] == [f"{path}, line 1", f"{path}, line 3"]
    assert list(data.refused) == [1, 3, 4]
    assert "3 of 5 rows give no prompt and are dropped, the first: line 2: column 'prompt'" in caplog.messages[0]
    with pytest.raises(DataError, match=r"line 1, .*\(1 of 1 rows give no prompt\)$"):
        load_prompts(write(tmp_path / "none.jsonl", [{"prompt": ""}]), make_tokenizer(), bad_prompts="drop")


def test_a_bos_that_is_written_in_the_text_too_is_not_doubled(make_tokenizer: Make) -> None:
    adds, adds_not = make_tokenizer(bos=True, eos=True), make_tokenizer()
    for text in ("<s>ab", "ab"):
        ids = encode_prompt(adds, text)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
        assert load_prompts([text], adds)[0].ids == ids
    assert encode_prompt(adds, "<s><s>ab").count(BOS) == 2  # twice in the text is the user's own doing
    assert encode_prompt(adds_not, "<s><s>ab").count(BOS) == 2


def test_variables_of_the_chat_template(make_tokenizer: Make) -> None:
    template = "{{ messages[0]['content'] }}{% if thinking %}<think>{% endif %}"
    tokenizer = make_tokenizer(template=template)
    data = [
        load_prompts([{"prompt": user("a")}], tokenizer, chat_template_options=options)[0]
        for options in (None, {"thinking": True})
    ]
    assert [tokenizer.decode(prompt.ids) for prompt in data] == ["a", "a<think>"]
    assert data[0].text == data[1].text == user("a")


def test_many_texts_at_once_have_the_ids_of_each_alone(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    texts = [f"{'<s>' * (n % 3)}{n}{'</s>' * (n % 2)}" for n in range(1, 50)]
    data = load_prompts(texts, tokenizer)
    assert [prompt.ids for prompt in data.prompts] == [encode_prompt(tokenizer, text) for text in texts]


def test_prompt_without_tokens(make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match=r"no tokens at all"):
        load_prompts([{"prompt": user("a")}], make_tokenizer(template="{{ '' }}"))


def test_missing_column_lists_the_others_and_the_option(make_tokenizer: Make, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"question": "2+2?", "answer": 4}])
    with pytest.raises(DataError, match=r"train\.jsonl: .*'prompt'.*'question', 'answer'.*`prompt_column`"):
        load_prompts(path, make_tokenizer())
    assert load_prompts(path, make_tokenizer(), prompt_column="question")[0].columns == {"answer": 4}


def test_tokenizer_without_chat_template(make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match=r"row 1, column 'prompt': .*roles 'user'.*no chat template"):
        load_prompts([{"prompt": user("a")}], make_tokenizer(template=None))


def test_template_that_rejects_a_role_or_an_order(make_tokenizer: Make) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if messages|length > 1 %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    tokenizer = make_tokenizer(template=template)
    rows = [{"prompt": user("a")}, {"prompt": [{"role": "system", "content": "s"}, *user("a")]}]
    with pytest.raises(DataError, match=r"row 2, .*rejects the role 'system': System role not supported"):
        load_prompts(rows, tokenizer)
    with pytest.raises(DataError, match=r"row 1, .*rejects the role 'system'"):
        load_prompts(rows, tokenizer, system_prompt="general")
    with pytest.raises(DataError, match=r"rejects messages with the roles 'user': Roles must alternate"):
        load_prompts([{"prompt": user("a") + user("b")}], tokenizer)


def test_options_out_of_range(make_tokenizer: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"overlong='trim'.*'drop', 'cut' or 'error'"):
        load_prompts(["a"], make_tokenizer(), overlong="trim")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"bad_prompts='skip'"):
        load_prompts(["a"], make_tokenizer(), bad_prompts="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"max_prompt_length=0"):
        load_prompts(["a"], make_tokenizer(), max_prompt_length=0)
