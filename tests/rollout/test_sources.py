"""What is wrong with the prompts or their references is said with file and row, before a model is loaded."""

from __future__ import annotations

import json
import logging

import pytest

from lit_rlhf.errors import ConfigurationError, DataError, RewardError
from lit_rlhf.rewards import MathAnswer


@pytest.fixture
def no_model(monkeypatch):
    """Loading weights fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_references_that_cannot_be_judged_are_named_by_file_and_line(fit, make_data, tmp_path, caplog):
    rows = [{"prompt": "1+1=", "answer": answer} for answer in (2, "2", None, "see the figure on the left")]
    file = write(tmp_path / "train.jsonl", rows)
    with caplog.at_level(logging.WARNING, logger="lit_rlhf"):
        fit(make_data(file, rewards=MathAnswer()), max_epochs=1)
    (said,) = [message for message in caplog.messages if "cannot be judged" in message]
    assert said.startswith(
        f"{file}: 2 rows cannot be judged, the first: {file}, line 3: answer is missing; {file}, line 4"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train": [{"prompt": "1+1="}, {"prompt": ""}]}, DataError, "iterable, row 2, column 'prompt'"),
        ({"train": [{"question": "?", "answer": "#### 1"}]}, DataError, "perhaps gsm8k"),
        ({"rewards": MathAnswer(answer_column="gold")}, RewardError, "column 'gold'"),
        ({"max_new_tokens": 60}, ConfigurationError, "more than the model's context of 64"),
        ({"max_prompt_length": 3}, DataError, r"6 of 6 prompts longer than 3 tokens refused"),
    ],
)
def test_it_is_said_before_a_model_is_loaded(fit, make_data, no_model, options, error, message):
    with pytest.raises(error, match=message):
        fit(make_data(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gsm9k"}, "format='gsm9k' is not known"),
        ({"prompt_column": "a", "prompt_template": "b"}, "prompt_column or prompt_template, not both"),
        ({"prompt_template": "{{"}, "not Jinja"),
        ({"max_prompt_length": 0}, "max_prompt_length must be at least 1, got 0"),
    ],
)
def test_options_are_refused_at_once(make_data, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_data(**options)


def test_splits_of_a_folder_are_named_per_split(fit, make_data, rows, tmp_path):
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:2])
    data = make_data(tmp_path, train_split="train", val=tmp_path, val_split="test")
    fit(data, max_epochs=1)
    assert (len(data.prompts["train"]), len(data.prompts["val"])) == (6, 2)
    assert data.splits["test"] == "test"  # test prompts are those of val, and so is their split
