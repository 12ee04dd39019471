"""Held-out data sets by name, a verifier and ratings, as a recipe writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_rlhf.cli import main


@pytest.fixture
def recipe(tmp_path, write_recipe, monkeypatch):
    """Writes a recipe with other options of the data."""
    monkeypatch.setattr("sys.argv", ["lit-rlhf"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rows.py").write_text(
        "from lit_rlhf.data import PromptSource\n\n\n"
        "class Squares(PromptSource):\n"
        "    def __init__(self, count: int = 2) -> None:\n"
        "        self.count = count\n\n"
        "    def __iter__(self):\n"
        "        return iter([{'prompt': f'{n}*{n}=', 'answer': str(n * n)} for n in range(self.count)])\n"
    )

    def write(**options: Any) -> Path:
        path = write_recipe(tmp_path)
        content = yaml.safe_load(path.read_text())
        content["data"]["init_args"].update(options)
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def test_sets_verifier_and_ratings(recipe, tmp_path):
    ratings = tmp_path / "ratings.jsonl"
    ratings.write_text(json.dumps({"set": "sums", "prompt": "1+2=", "completion": "none", "rating": 4}) + "\n")
    path = recipe(
        val={
            "sums": str(tmp_path / "val.jsonl"),
            "squares": {"class_path": "own_rows.Squares", "init_args": {"count": 3}},
        },
        verifier={"class_path": "lit_rlhf.rewards.MathAnswer"},
        val_ratings=str(ratings),
        val_confidence=0.9,
        pass_k=[1, 2],
    )
    main(["validate", "-c", str(path)])
    (metrics,) = tmp_path.glob("run/**/metrics.csv")
    header = metrics.read_text().splitlines()[0].split(",")
    assert {"val/accuracy", "val/sums/pass@1_low", "val/squares/maj@2", "val/verifier", "val/human_unmatched"} <= set(
        header
    )
    files = sorted(metrics.parent.glob("evaluation/*"))
    assert [file.name for file in files] == ["val-00000000-squares.jsonl", "val-00000000-sums.jsonl"]
    assert [len(file.read_text().splitlines()) for file in files] == [3, 3]


def test_a_run_with_sets_and_a_test_of_its_checkpoint(recipe, tmp_path):
    path = recipe(val={"sums": str(tmp_path / "val.jsonl"), "more": str(tmp_path / "train.jsonl")})
    main(["fit", "-c", str(path), "--trainer.callbacks+=EvaluationWriter"])
    main(["test", "-c", str(path), "--ckpt_path", str(tmp_path / "kept" / "last.ckpt")])
    names = sorted(file.name for file in tmp_path.glob("run/**/evaluation/*"))
    steps = [f"val-{step:08}-{name}.jsonl" for step in range(3) for name in ("more", "sums")]
    assert names == ["test-00000002-more.jsonl", "test-00000002-sums.jsonl", *steps]


def test_rewards_are_tried_on_the_first_set(recipe, tmp_path, capsys):
    path = recipe(val={"squares": {"class_path": "own_rows.Squares"}, "sums": str(tmp_path / "val.jsonl")})
    main(["rewards", "try", "-c", str(path), "--split", "val", "--n", "2"])
    said = capsys.readouterr().out
    assert "1*1=" in said
    assert "1+2=" not in said


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ({"sums": "none.jsonl"}, "val/sums: none.jsonl: no such file"),
        ({"class_path": "own_rows.Cubes"}, "Cubes"),
        ({"a/b": "val.jsonl"}, "'a/b' of a data set"),
    ],
)
def test_a_mistake_is_one_line(recipe, capsys, val, message):
    with pytest.raises(SystemExit) as stop:
        main(["validate", "-c", str(recipe(val=val))])
    assert stop.value.code in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
