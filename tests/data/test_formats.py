"""Rows as they are published: what becomes the prompt, what the reference, and that all else stays as it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from lit_rlhf.data.formats import FORMATS, Format, guess_formats
from lit_rlhf.data.prompts import PromptDataset, load_prompts, read_prompts
from lit_rlhf.data.rows import read_rows
from lit_rlhf.errors import ConfigurationError, DataError
from lit_rlhf.rewards import CodeTests, Countdown, MathAnswer, call_reward

Make = Callable[..., Any]
LAYOUTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "layouts.json").read_text(encoding="utf-8"))
BOXED = "\n\nThink step by step, and put the final answer in \\boxed{}."
GOLDS = {
    "gsm8k": ["72", "4500"],
    "gsm8k as verl writes it": ["72", "4500"],
    "math": ["15", "3"],
    "math-500": ["2", "\\frac12"],
    "openr1": ["55", "(-1,3)"],
    "dapo": ["9", "2"],
    "dapo, processed": ["9", "2"],
}
MESSAGES = {
    "dapo",
    "gsm8k as verl writes it",
    "trl, chat",
    "trl, messages",
    "trl, preference chat",
    "trl, preference without prompt",
}


def load(name: str, tokenizer: Any, **options: Any) -> PromptDataset:
    return load_prompts(copy.deepcopy(LAYOUTS[name]["rows"]), tokenizer, format=LAYOUTS[name]["format"], **options)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_every_format_has_rows_here_and_is_offered_by_the_command_line() -> None:
    assert {layout["format"] for layout in LAYOUTS.values()} == set(FORMATS) == set(get_args(Format))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_columns_stay_as_they_are_in_the_file(make_tokenizer: Make, tmp_path: Path, name: str, ending: str) -> None:
    rows, path = LAYOUTS[name]["rows"], tmp_path / f"two.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = load_prompts(path, make_tokenizer(), format=LAYOUTS[name]["format"])
    expected = read_rows(path).rows
    assert [prompt.text for prompt in data.prompts] == [prompt.text for prompt in load(name, make_tokenizer()).prompts]
    for prompt, row in zip(data.prompts, expected, strict=True):
        for column, value in prompt.columns.items():
            if column in row:
                assert value == row[column]
                assert type(value) is type(row[column])
        # Only a column that is itself the prompt is not passed on a second time.
        assert {row[column] == prompt.text for column in set(row) - set(prompt.columns)} <= {True}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reference_alone_is_added_as_gold(make_tokenizer: Make, name: str) -> None:
    data = load(name, make_tokenizer())
    if name not in GOLDS:
        assert "gold" not in data.columns
        return
    assert [prompt.columns["gold"] for prompt in data.prompts] == GOLDS[name]
    own = [row.get("answer") for row in LAYOUTS[name]["rows"]]
    assert [prompt.columns["answer"] for prompt in data.prompts] == (own if own[0] is not None else GOLDS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_as_chat_gives_messages_that_end_with_the_user(make_tokenizer: Make, name: str) -> None:
    plain, chat = load(name, make_tokenizer()), load(name, make_tokenizer(), as_chat=True, system_prompt="Be brief.")
    for before, after in zip(plain.prompts, chat.prompts, strict=True):
        assert isinstance(before.text, list) == (name in MESSAGES)
        assert isinstance(after.text, list)
        assert [message["role"] for message in after.text].count("system") == 1
        assert after.text[-1]["role"] == "user"
        assert after.columns == before.columns


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("trl, text", "The capital of France is"),
        ("trl, chat", user("What colour is grass?")),
        ("trl, preference text", "The sky at night is"),
        ("trl, preference chat", user("Name a prime.")),
        ("trl, preference without prompt", user("Name a prime.")),
        ("trl, prompt and completion", "The sky at night is"),
        ("trl, messages", user("Hi")),
        ("trl, text alone", "Once upon a time"),
        ("hh-rlhf", "\n\nHuman: How do I boil an egg?\n\nAssistant:"),
        ("hh-rlhf, with prompts", "\n\nHuman: Hi\n\nAssistant:"),
        ("ultrafeedback", "Name two fruits."),
        ("math", "What is $\\frac{3}{4}$ of $20$?" + BOXED),
        ("openr1", "Compute $1+2+\\dots+10$." + BOXED),
        ("dapo, processed", "How many divisors has 36?" + BOXED),
        ("dapo", LAYOUTS["dapo"]["rows"][0]["prompt"]),
        ("humaneval", 'def inc(n: int) -> int:\n    """Return n plus one."""\n'),
    ],
)
def test_the_prompt(make_tokenizer: Make, name: str, first: Any) -> None:
    assert load(name, make_tokenizer())[0].text == first


def test_made_prompts_hold_what_a_solver_needs(make_tokenizer: Make) -> None:
    countdown = load("countdown", make_tokenizer())
    assert "Make 24 from the numbers 3, 8, 1 " in countdown[0].text
    assert countdown.columns == ["target", "nums"]
    for name in ("mbpp", "mbpp, sanitized"):
        mbpp = load(name, make_tokenizer())[0]
        assert "assert double(2) == 4" in mbpp.text  # the function's name stands nowhere else
        assert "assert double(0)" not in mbpp.text
        assert mbpp.columns["code"] == "def double(n):\r\n  return 2*n"
    gsm8k = load("gsm8k", make_tokenizer())[0]
    assert str(gsm8k.text).startswith("A crate holds 12 jars")
    assert "####" in gsm8k.text
    assert "72" not in gsm8k.text


def test_turns_of_a_dialogue_become_messages(make_tokenizer: Make) -> None:
    second = load("hh-rlhf", make_tokenizer(), as_chat=True)[1]
    assert second.text == [
        *user("Hi"),
        {"role": "assistant", "content": "Hello! What can I do?"},
        *user("Tell me a joke"),
    ]
    rows = [{"chosen": "\n\nHuman: a\n\nAssistant: b"}, {"chosen": "no dialogue"}]
    with pytest.raises(DataError, match=r"row 2, format 'hh_rlhf': column 'chosen' is no dialogue"):
        load_prompts(rows, make_tokenizer(), format="hh_rlhf")


def test_preference_texts_without_a_prompt_share_their_beginning(make_tokenizer: Make) -> None:
    rows = [{"chosen": "The sky is blue.", "rejected": "The sky is low."}]
    assert load_prompts(rows, make_tokenizer(), format="trl")[0].text == "The sky is"
    dialogue = load_prompts(LAYOUTS["hh-rlhf"]["rows"], make_tokenizer(), format="trl")
    assert dialogue[0].text == "\n\nHuman: How do I boil an egg?\n\nAssistant:"
    with pytest.raises(DataError, match="the prompt is an empty string"):
        load_prompts([{"chosen": "a", "rejected": "b"}], make_tokenizer(), format="trl")


def right_answers() -> list[Any]:
    """For each layout with a rule to judge it: the reward that the documentation names, and two right completions."""
    boxes = {name: [f"So \\boxed{{{gold}}}." for gold in golds] for name, golds in GOLDS.items()}
    cases = [(name, MathAnswer(answer_column=column), boxes[name]) for name in GOLDS for column in ("gold", "answer")]
    code = [f"```python\n{row['code']}\n```" for row in LAYOUTS["mbpp"]["rows"]]
    bodies = [row["canonical_solution"] for row in LAYOUTS["humaneval"]["rows"]]
    cases += [
        ("countdown", Countdown(), ["<answer>(8 / 1) * 3</answer>", "<answer>81 * 1 * 1 * 1</answer>"]),
        ("mbpp", CodeTests(tests_column="test_list"), code),
        ("mbpp, sanitized", CodeTests(tests_column="test_list", setup_column="test_imports"), code),
        ("humaneval", CodeTests(tests_column="test", prefix_column="prompt"), bodies),
    ]
    return [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "reward", "completions"), right_answers())
def test_the_rewards_find_what_they_need(make_tokenizer: Make, name: str, reward: Any, completions: list[str]) -> None:
    data = load(name, make_tokenizer())
    columns = {column: [prompt.columns[column] for prompt in data.prompts] for column in data.columns}
    given = {"prompts": [p.text for p in data.prompts], "completion_ids": [[1], [1]], "columns": columns}
    assert call_reward(reward, completions=completions, **given).tolist() == [1.0, 1.0]
    assert call_reward(reward, completions=["no", "no"], **given).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("gold", [9, 9.5, "09", True, ["9", "10"], "2024-01-02", None])
def test_a_nested_reference_keeps_its_type(make_tokenizer: Make, gold: Any) -> None:
    row = {"prompt": user("?"), "reward_model": {"ground_truth": gold}}
    for format in ("verl", "dapo_math"):
        (prompt,) = load_prompts([row], make_tokenizer(), format=format).prompts
        assert prompt.columns["gold"] == prompt.columns["answer"] == gold
        assert type(prompt.columns["gold"]) is type(gold)


def test_a_reference_that_is_not_there_is_none_and_never_the_whole_solution(make_tokenizer: Make) -> None:
    for answer in ("no mark", "#### ", None, 72):
        (prompt,) = load_prompts([{"question": "?", "answer": answer}], make_tokenizer(), format="gsm8k").prompts
        assert prompt.columns == {"question": "?", "answer": answer, "gold": None}
    (prompt,) = load_prompts([{"problem": "?", "solution": "no box"}], make_tokenizer(), format="math").prompts
    assert prompt.columns["gold"] is None


def test_a_gold_column_of_the_users_is_not_replaced(make_tokenizer: Make) -> None:
    row = {"question": "?", "answer": "#### 3", "gold": 3.0}
    (prompt,) = load_prompts([row], make_tokenizer(), format="gsm8k").prompts
    assert prompt.columns == row


def test_own_template_or_column_wins_over_the_formats(make_tokenizer: Make) -> None:
    own = load("gsm8k", make_tokenizer(), prompt_template="Q: {{ question }}\nA:")
    assert own[0].text == f"Q: {LAYOUTS['gsm8k']['rows'][0]['question']}\nA:"
    assert own[0].columns["gold"] == "72"
    column = load("gsm8k", make_tokenizer(), prompt_column="question")
    assert column[0].text == LAYOUTS["gsm8k"]["rows"][0]["question"]
    assert column[0].columns["gold"] == "72"


def test_dapo_repeats_are_dropped_and_contradictions_counted(make_tokenizer: Make) -> None:
    row = LAYOUTS["dapo"]["rows"][0]
    other = {**row, "reward_model": {"ground_truth": "10"}}
    rows = [row, LAYOUTS["dapo"]["rows"][1], row, other]
    data = load_prompts(rows, make_tokenizer(), format="dapo_math")
    assert [prompt.index for prompt in data.prompts] == [0, 1]
    assert (data.repeats, data.contradictions, data.dropped) == (2, 1, 2)
    assert data.report() == (
        "iterable: 2 of 4 rows repeat an earlier prompt and are dropped, 1 of them with another gold"
    )
    assert len(load_prompts(rows, make_tokenizer(), format="dapo_math", drop_duplicates=False)) == 4
    assert len(load_prompts(["a", "b", "a"], make_tokenizer())) == 3
    assert len(load_prompts(["a", "b", "a"], make_tokenizer(), drop_duplicates=True)) == 2


def test_a_wrong_format_says_what_is_there_and_none_says_what_it_could_be(make_tokenizer: Make) -> None:
    rows = LAYOUTS["gsm8k"]["rows"]
    with pytest.raises(DataError, match=r"format='mbpp' needs the columns 'text' and 'test_list' or 'prompt' and"):
        load_prompts(rows, make_tokenizer(), format="mbpp")
    with pytest.raises(DataError, match=r"no column 'prompt'.*`prompt_column`, or say .* `format`, perhaps gsm8k$"):
        load_prompts(rows, make_tokenizer())
    with pytest.raises(ConfigurationError, match=r"format='gsm9k' is not known; there are countdown, "):
        read_prompts(rows, make_tokenizer(), format="gsm9k")  # type: ignore[arg-type]
    assert guess_formats(["target", "nums"]) == ["countdown"]
    assert guess_formats(["nothing"]) == []


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith("trl")])
def test_every_published_layout_is_recognised(name: str) -> None:
    columns = list(LAYOUTS[name]["rows"][0])
    assert LAYOUTS[name]["format"] in guess_formats(columns)[:4]
