from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lit_rlhf.cli import main


@pytest.fixture
def recipe(tmp_path: Path, policy_dir: str, rows: list, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    rows[5]["answer"] = "see the figure on the next page"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "model": {"class_path": "GRPOModule", "init_args": {"policy": policy_dir}},
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "train": str(tmp_path / "train.jsonl"),
                "rewards": [
                    {"class_path": "lit_rlhf.rewards.MathAnswer"},
                    {"class_path": "lit_rlhf.rewards.FormatMatch", "init_args": {"pattern": r".*\d"}},
                ],
                "reward_weights": [1.0, 0.25],
                "max_new_tokens": 4,
            },
        },
        "trainer": {"max_epochs": 1, "accelerator": "gpu", "devices": 8},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def lines(text: str) -> list[list[str]]:
    """Cells of the table's rows, without the lines between them."""
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_completions_of_a_file(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "completions.jsonl"
    written = [
        {"completion": "It is [bold]3.", "prompt_index": 0},
        {"completion": "\\boxed{35}", "prompt": "30+4="},
        {"completion": "no idea", "prompt": "12+345="},
        {"completion": "12", "prompt_index": 3, "answer": "12"},
        {"completion": "13", "prompt_index": 3},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in written))
    main(["rewards", "try", "-c", str(recipe), "--completions", str(file), "--n", "4"])
    shown = capsys.readouterr().out
    assert lines(shown) == [
        ["1", "1+2=", "It is [bold]3.", "3", "3", "1", "0", "1"],
        ["2", "30+4=", "\\boxed{35}", "35", "34", "0", "0", "0"],
        ["3", "12+345=", "no idea", "-", "357", "0", "0", "0"],
        ["4", "7+7=", "12", "12", "12", "1", "1", "1.25"],
    ]
    assert "1 more completions in the file" in shown
    assert "math_answer (weight 1): mean 0.5, 0 to 1" in shown
    assert "1 rows cannot be judged, the first:" in shown
    assert "train.jsonl, line 6" in shown


def test_sampled_completions(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    main(["rewards", "try", "-c", str(recipe), "--n", "3", "--per_prompt", "2"])
    shown = capsys.readouterr().out
    assert [row[:2] for row in lines(shown) if row[0]] == [["1", "1+2="], ["2", "1+2="], ["3", "30+4="]]
    assert "format_match (weight 0.25)" in shown


def test_a_constant_reward_is_said(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text('{"completion": "3"}\n{"completion": "34"}\n')
    main(["rewards", "try", "-c", str(recipe), "--completions", str(file)])
    assert "the same for all 2: nothing to learn from here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "3"}, "line 1: no column 'completion'; columns: text"),
        ({"completion": "3", "prompt": "2+2="}, "has no prompt for this completion"),
        ({"completion": "3", "prompt_index": 99}, "has no prompt for this completion"),
    ],
)
def test_a_file_that_does_not_fit(
    recipe: Path, tmp_path: Path, row: dict, message: str, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit) as stopped:
        main(["rewards", "try", "-c", str(recipe), "--completions", str(file)])
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


def test_usage(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    for arguments, message in (
        ([], "name a recipe"),
        (["-c", str(recipe), "--n", "0"], "--n must be at least 1"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["rewards", "try", *arguments])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["rewards", "try", "-c", str(recipe), "--split", "val"])
    assert stopped.value.code == 1
    assert "no prompts for val" in capsys.readouterr().err
