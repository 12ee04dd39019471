from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_rlhf.commands.compare import comparison
from lit_rlhf.compare import ComparisonRuns
from lit_rlhf.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "compare").glob("*.yaml"))


@pytest.fixture
def compare(command):
    """Runs ``lit-rlhf compare``; gives its exit code and what it wrote."""
    return lambda *args: command("compare", *args)


@pytest.fixture
def started(monkeypatch):
    """The comparisons that would have been run."""
    found = []
    monkeypatch.setattr(ComparisonRuns, "run", lambda self, *args, **options: found.append(self))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_ready_to_run(path, compare, started, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    compare("-c", path, "--out", tmp_path / "out")
    (runs,) = started
    assert len(runs.arms) >= 2
    assert len(runs.runs) == len(runs.arms) * len(yaml.safe_load(path.read_text())["seeds"])
    assert (tmp_path / "out").is_dir()


def test_quick_is_shorter_and_elsewhere(compare, started, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    compare("-c", FILES[0], "--out", tmp_path / "out", "--quick", "--only", "grpo", "--jobs", "1")
    (runs,) = started
    assert runs.out == tmp_path / "out-quick"
    assert runs.token_budget < yaml.safe_load(FILES[0].read_text())["token_budget"] / 4
    assert [run.folder for run in runs.runs] == ["grpo/seed-1", "grpo/seed-2"]
    assert runs.jobs == 1


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ({"arms": {"a": {}}}, [], "recipe: and token_budget: and out: missing"),
        ({"recipee": {}}, [], "there is no option 'recipee'; did you mean 'recipe'?"),
        (
            {"recipe": {}, "arms": {"a": {}}, "token_budget": "many", "out": "o"},
            [],
            "token_budget must be a whole number",
        ),
        ({"recipe": {}, "arms": {"a": {}}, "token_budget": 0, "out": "o"}, [], "token_budget must be a number in [1"),
        ({"recipe": {}, "arms": {"a": {}}, "token_budget": 9, "out": "o", "seeds": [1, 1]}, [], "different numbers"),
        ({"recipe": {}, "arms": {"a": {}}, "token_budget": 9, "out": "o"}, ["--only", "b"], "there is no arm 'b'"),
    ],
)
def test_bad_files(compare, tmp_path, content, args, message):
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(content))
    code, said = compare("-c", path, *args)
    assert code in (1, 2)
    assert message in said
    assert "Traceback" not in said


def test_no_file(compare):
    code, said = compare("-c", "nowhere.yaml")
    assert code == 2
    assert "nowhere.yaml: No such file" in said


def test_from_a_script():
    with pytest.raises(ConfigurationError, match="at least one arm"):
        comparison(recipe={}, arms={}, token_budget=10, out="nowhere")
