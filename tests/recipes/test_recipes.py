"""Every recipe parses, says what it needs and what to expect, and is what it prints."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from lit_rlhf import PPOModule, RolloutDataModule
from lit_rlhf.cli import LitRLHFCLI
from lit_rlhf.data.rows import read_rows
from lit_rlhf.rewards import MathAnswer

ROOT = Path(__file__).parents[2]
FRAGMENTS = sorted((ROOT / "recipes" / "trainer").glob("*.yaml"))
COMPARISONS = sorted((ROOT / "recipes" / "compare").glob("*.yaml"))
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path not in (*FRAGMENTS, *COMPARISONS))
QUICKSTART = ROOT / "recipes" / "quickstart" / "grpo.yaml"


def short(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def printed(capsys, monkeypatch):
    """What ``--print_config`` prints for a list of configuration files."""

    monkeypatch.setattr("sys.argv", ["lit-rlhf"])  # Lightning warns of arguments given twice

    def run(*files):
        args = ["fit", *(part for file in files for part in ("-c", str(file))), "--print_config"]
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            LitRLHFCLI(args)
        output = capsys.readouterr()
        assert stop.value.code == 0, output.err
        return output.out

    return run


def header(path):
    """The comment lines that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(takewhile(lambda line: line.startswith("#"), lines))


def test_there_are_recipes():
    assert QUICKSTART in RECIPES
    names = {"cpu", "one_gpu", "ddp", "fsdp2", "multinode", "lora", "qlora", "vllm"}
    assert {path.stem for path in FRAGMENTS} >= names


@pytest.mark.parametrize("path", RECIPES, ids=short)
def test_a_recipe_parses_and_is_what_it_prints(path, printed, tmp_path):
    text = printed(path)
    config = yaml.safe_load(text)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    for part in ("model", "data"):
        assert config[part]["class_path"].rpartition(".")[2] == given[part]["class_path"].rpartition(".")[2]
        for name, value in given[part]["init_args"].items():
            if not isinstance(value, (list, dict)):
                assert config[part]["init_args"][name] == value, name
    again = tmp_path / "again.yaml"
    again.write_text(text, encoding="utf-8")
    assert printed(again) == text


@pytest.mark.parametrize("path", FRAGMENTS, ids=short)
def test_a_fragment_changes_one_part_and_nothing_else(path, printed):
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    (part,) = given
    assert part in ("trainer", "model", "data")
    plain, layered = yaml.safe_load(printed(QUICKSTART)), yaml.safe_load(printed(QUICKSTART, path))
    options = given["trainer"] if part == "trainer" else given[part]["init_args"]
    before, after = (c["trainer"] if part == "trainer" else c[part]["init_args"] for c in (plain, layered))
    for name, value in options.items():
        given_there = after.pop(name)
        if isinstance(value, dict):  # a class: the options that the fragment leaves out have defaults
            assert given_there["class_path"].rpartition(".")[2] == value["class_path"].rpartition(".")[2]
            assert value["init_args"].items() <= given_there["init_args"].items()
        else:
            assert given_there == value
        before.pop(name)
    assert layered == plain


@pytest.mark.parametrize("path", [*RECIPES, *COMPARISONS], ids=short)
def test_a_recipe_says_what_it_needs(path):
    text = "\n".join(header(path))
    for word in ("Hardware", "Time", "Command", "Expected"):
        assert f"# {word}  " in text, f"{short(path)} has no line '# {word}'"
    assert f"-c {short(path)}" in text


@pytest.mark.parametrize("path", FRAGMENTS, ids=short)
def test_a_fragment_says_what_it_does(path):
    lines = header(path)
    assert lines
    assert f"-c {short(path)}" in "\n".join(lines)


# What git does not keep, and the command that writes it.
MADE = {
    "recipes/quickstart/data/corpus.jsonl": "recipes/quickstart/make_data.py",
    "recipes/quickstart/data/corpus_val.jsonl": "recipes/quickstart/make_data.py",
    "recipes/quickstart/rlhf/data/preferences.jsonl": "recipes/quickstart/rlhf/make_preferences.py",
    **{f"recipes/grpo/data/gsm8k_{split}.jsonl": "recipes/grpo/make_gsm8k.py" for split in ("train", "val", "test")},
}
# Names on the Hugging Face hub, for the recipes of real size.
ON_THE_HUB = {"Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"}


@pytest.mark.parametrize("path", RECIPES, ids=short)
def test_what_a_recipe_names_is_there_or_is_made(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    named = [*(model.get(key) for key in ("policy", "model")), *(data.get(split) for split in ("train", "val", "test"))]
    for name in filter(None, named):
        if name in MADE:
            assert (ROOT / MADE[name]).exists()
            assert MADE[name] in "\n".join(header(path)), f"the header does not say that {MADE[name]} writes {name}"
        elif name not in ON_THE_HUB and not name.startswith("checkpoints/runs/"):  # an earlier run's
            assert (ROOT / name).exists(), name


def test_gsm8k_becomes_prompts_that_math_answer_can_judge(tmp_path, run_python):
    """The columns that the recipes name are there, and the solution's #### is what counts."""
    for split, count in (("train", 6), ("test", 2)):
        rows = [
            {"question": f"{n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
            for n in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_python("recipes/grpo/make_gsm8k.py", "--source", tmp_path, "--folder", tmp_path / "data", "--val", 2)
    found = {split: read_rows(tmp_path / "data" / f"gsm8k_{split}.jsonl").rows for split in ("train", "val", "test")}
    assert {split: len(rows) for split, rows in found.items()} == {"train": 4, "val": 2, "test": 2}
    (message,) = found["val"][0]["question"]
    assert message["role"] == "user"
    assert message["content"].startswith("4 and 4? ")
    completions = [[{"role": "assistant", "content": text}] for text in ("So\n#### 8", "So\n#### 9")]
    answers = [found["val"][0]["answer"]] * 2
    assert MathAnswer()(completions=completions, answer=answers) == [1.0, 0.0]


def test_every_metric_of_ppo_is_in_a_glossary(make_trainer):
    model, prompts = ROOT / "checkpoints" / "arithmetic", QUICKSTART.parent / "data" / "train.jsonl"
    trainer = make_trainer()
    data = RolloutDataModule(prompts, rewards=[MathAnswer()], prompts_per_iteration=32, group_size=1, max_new_tokens=8)
    trainer.fit(PPOModule(str(model)), data)
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("grpo", "ppo")}
    names = {name for name in trainer.callback_metrics if name != "step"} - {"reward/math_answer"}
    critic = {name for name in names if name.startswith("value/") or name == "lr/value"}
    assert len(critic) == 8
    assert {name for name in critic if f"`{name}`" not in pages["ppo"]} == set()
    assert {name for name in names - critic if f"`{name}`" not in pages["grpo"]} == set()
