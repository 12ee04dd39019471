from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_rlhf.cli import main

MATH_ANSWER = "lit_rlhf.rewards.MathAnswer"


@pytest.fixture
def recipe(tmp_path, policy_dir, rows, monkeypatch):
    """Writes a recipe for a GPU that this machine need not have; options of the data may be changed."""
    monkeypatch.setattr(sys, "argv", ["lit-rlhf"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.chdir(tmp_path)

    def write(train: Any = rows, **options: Any) -> Path:
        if isinstance(train, list):
            Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
            train = "train.jsonl"
        data = {"train": train, "rewards": [{"class_path": MATH_ANSWER}], "max_new_tokens": 4}
        content = {
            "seed_everything": 3,
            "model": {"class_path": "GRPOModule", "init_args": {"policy": policy_dir}},
            "data": {"class_path": "RolloutDataModule", "init_args": {**data, **options}},
            "trainer": {"accelerator": "gpu", "devices": 8, "strategy": "ddp", "precision": "bf16-mixed"},
        }
        Path("recipe.yaml").write_text(yaml.safe_dump(content))
        return Path("recipe.yaml")

    return write


@pytest.fixture
def check(command):
    """Runs ``lit-rlhf data check``; gives its exit code and what it wrote."""
    return functools.partial(command, "data", "check")


def test_a_sound_recipe_is_described_and_nothing_is_written(recipe, check, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("lit_rlhf.modules.causal_lm.load_causal_lm", refuse)
    monkeypatch.setattr("lit_rlhf.modules.scored_policy.load_causal_lm", refuse, raising=False)
    path = recipe()
    code, said = check("-c", path)
    assert code == 0
    assert "train: train.jsonl\n  rows        6, prompts from column 'prompt'\n  prompts     6\n" in said
    assert "tokens      4 to 7, median 5, 95 % up to 5, sum 30\n" in said
    assert "              4 to 4       2 ###########################\n" in said
    assert "columns     answer: str\n" in said
    assert "  | 1+2=\n" in said
    assert "val: none\ntest: none\n" in said
    assert "REFUSED" not in said
    assert sorted(entry.name for entry in Path().iterdir()) == ["recipe.yaml", "train.jsonl"]


def test_everything_that_is_wrong_is_listed_with_its_row(recipe, check):
    train = [
        {"prompt": "1+2=", "answer": "3"},
        {"prompt": "", "answer": "3"},
        {"prompt": "123456789+1=", "answer": "1"},
        {"prompt": "2+2=", "answer": None},
        {"prompt": 17, "answer": 3},
        {"prompt": "3+2=", "answer": "see the figure on the left"},
    ]
    path = recipe(train, max_prompt_length=10)
    code, said = check("-c", path)
    assert code == 1
    assert "no prompt   2 rows\n" in said
    assert "train.jsonl, line 2: column 'prompt': the prompt is an empty string" in said
    assert "train.jsonl, line 5: column 'prompt': the prompt is 17 (int)" in said
    assert "too long    1 longer than 10 tokens\n              train.jsonl, line 3: 12 tokens" in said
    assert "unreadable  2 rows that math_answer cannot judge" in said
    assert "train.jsonl, line 4: answer is missing" in said
    assert "train.jsonl, line 6: answer cannot be read as an answer: 'see the figure" in said
    assert "columns     answer: str; missing in 1 of 3" in said
    assert "REFUSED     train.jsonl, line 2, column 'prompt'" in said

    code, dropped = check("-c", path, "--data.bad_prompts", "drop", "--rows", "1")
    assert code == 0
    assert "... and 1 more (--rows)" in dropped
    assert "line 5" not in dropped
    code, strict = check("-c", path, "--data.bad_prompts", "drop", "--data.overlong_prompts", "error")
    assert code == 1
    assert "1 of 6 prompts longer than 10 tokens refused" in strict
    code, cut = check("-c", path, "--data.bad_prompts", "drop", "--data.overlong_prompts", "cut")
    assert code == 0
    assert "cut         1 longer than 10 tokens\n" in cut


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"prompt_column": "question"}, "there is no column 'question'"),
        ({"rewards": [{"class_path": MATH_ANSWER, "init_args": {"answer_column": "gold"}}]}, "column 'gold'"),
        ({"max_new_tokens": 60}, "more than the model's context of 64"),
        ({"system_prompt": "Be brief."}, "or `as_chat` make them"),
        ({"format": "gsm8k"}, "format='gsm8k' needs the columns 'question' and 'answer'"),
    ],
)
def test_what_fit_would_refuse_is_refused(recipe, check, options, message):
    code, said = check("-c", recipe(**options))
    assert code == 1
    assert "  REFUSED     " in said
    assert message in said
    assert "unreadable" not in said
    assert "Traceback" not in said


def test_splits_are_told_apart(recipe, check):
    path = recipe(val="train.jsonl")
    said = check("-c", path)[1]
    assert "val: train.jsonl\n" in said
    assert "test: the prompts of val\n" in said
    only = check("-c", path, "--split", "test")[1]
    assert only.startswith("test: train.jsonl\n") or "\ntest: train.jsonl\n" in only
    assert "train: " not in only


def test_sets_of_held_out_prompts_are_told_apart(recipe, check):
    Path("more.jsonl").write_text('{"prompt": "2+2=", "gold": 4}\n')
    code, said = check("-c", recipe(val={"sums": "train.jsonl", "more": "more.jsonl"}))
    assert code == 1
    assert "val/sums: train.jsonl\n  rows        6," in said
    assert "val/more: more.jsonl\n  rows        1," in said
    assert "REFUSED     Reward `math_answer` needs the column 'answer'" in said
    assert "test: the prompts of val" in said


def test_tokens_outside_the_vocabulary_are_counted(recipe, check):
    said = check("-c", recipe([{"prompt": "2+2=", "answer": 4}, {"prompt": "€+€=", "answer": 4}]))[1]
    assert "unknown     2 tokens in 1 prompts are not in the vocabulary, the first in train.jsonl, line 2" in said


def test_a_source_of_the_users_own_is_named_by_its_class(recipe, check, monkeypatch, tmp_path):
    source = (
        "from lit_rlhf.data import PromptSource\n"
        "class Sums(PromptSource):\n"
        "    def __init__(self, size: int = 3):\n"
        "        self.size = size\n"
        "    def __iter__(self):\n"
        "        return iter([{'prompt': f'{n}+{n}=', 'answer': 2 * n} for n in range(self.size)])\n"
    )
    (tmp_path / "my_source.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_source", raising=False)
    code, said = check("-c", recipe({"class_path": "my_source.Sums", "init_args": {"size": 4}}))
    assert code == 0
    assert "train: Sums\n  rows        4," in said
    assert "columns     answer: int\n" in said


def test_other_recipes_and_other_words_are_explained(recipe, check, capsys):
    code, said = check()
    assert (code, "name a recipe" in said) == (2, True)
    code, said = check("--help")
    assert (code, "No model is\nloaded" in said, "--split" in said) == (0, True, True)
    with pytest.raises(SystemExit) as stop:
        main(["data"])
    assert stop.value.code == 2
    assert "lit-rlhf data check" in capsys.readouterr().err
    path = recipe()
    content = yaml.safe_load(path.read_text())
    content["model"]["class_path"] = "SFTModule"
    content["data"] = {"class_path": "SupervisedDataModule", "init_args": {"train": "train.jsonl"}}
    path.write_text(yaml.safe_dump(content))
    code, said = check("-c", path)
    assert (code, "this command reads recipes with a policy module" in said) == (1, True)
