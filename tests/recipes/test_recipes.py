"""Every recipe parses, says what it needs and what to expect, and is what it prints."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from lit_rlhf.cli import LitRLHFCLI

ROOT = Path(__file__).parents[2]
FRAGMENTS = sorted((ROOT / "recipes" / "trainer").glob("*.yaml"))
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path not in FRAGMENTS)
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
    assert {path.name for path in FRAGMENTS} >= {"cpu.yaml", "ddp.yaml"}


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
def test_a_fragment_changes_the_trainer_and_nothing_else(path, printed):
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(given) == ["trainer"]
    plain, layered = yaml.safe_load(printed(QUICKSTART)), yaml.safe_load(printed(QUICKSTART, path))
    for name, value in given["trainer"].items():
        assert layered["trainer"].pop(name) == value
        plain["trainer"].pop(name)
    assert layered == plain


@pytest.mark.parametrize("path", RECIPES, ids=short)
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
}


@pytest.mark.parametrize("path", RECIPES, ids=short)
def test_what_a_recipe_names_is_there_or_is_made(path):
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    named = [*(model.get(key) for key in ("policy", "model")), *(data.get(split) for split in ("train", "val", "test"))]
    for name in filter(None, named):
        if name in MADE:
            assert (ROOT / MADE[name]).exists()
            assert MADE[name] in "\n".join(header(path)), f"the header does not say that {MADE[name]} writes {name}"
        elif not name.startswith("checkpoints/runs/"):  # an earlier run's
            assert (ROOT / name).exists(), name
