from __future__ import annotations

from pathlib import Path

from lit_rlhf.report import read_folder
from lit_rlhf.report.samples import LONGEST, SHOWN, sample_table
from tests.report.folders import comparison_entry, write_comparison, write_lines, write_metrics, write_run


def test_arms_stand_side_by_side_on_the_same_prompts_those_that_differ_first(comparison_dir: Path) -> None:
    table = sample_table(read_folder(comparison_dir))
    assert table is not None
    assert table.columns == ("GRPO", "PPO", "GRPO, G = 4")
    assert len(table.rows) == SHOWN
    assert "8 of 12 prompts" in table.source
    differing = [len({sample.is_right for sample in row.samples}) > 1 for row in table.rows]
    # Right with GRPO: not those that 3 divides; with PPO: those that 4 divides.
    assert differing == sorted(differing, reverse=True)
    assert [row.prompt for row in table.rows[:3]] == ["0+1=", "1+1=", "2+1="]
    assert (table.rows[0].expected, table.rows[0].samples[1].text, table.rows[0].samples[1].is_right) == (
        "1",
        "1",
        True,
    )


def test_a_run_is_shown_before_and_after(tmp_path: Path) -> None:
    table = sample_table(read_folder(write_run(tmp_path, right=lambda index: True)))
    assert table is not None
    assert table.columns == ("step 0", "step 20")
    assert [sample.is_right for sample in table.rows[0].samples] == [False, True]
    assert table.rows[0].prompt == "1+1="


def _rollouts(folder: Path, iteration: int, answers: dict[str, str]) -> None:
    records = [
        {"prompt": prompt, "completion": answer, "reward": 0.5, "tokens": 1, "finish": "length"}
        for prompt, answer in answers.items()
    ]
    write_lines(folder / "samples" / f"iteration-{iteration:05}.jsonl", records)


def test_without_evaluations_rollouts_are_shown(tmp_path: Path) -> None:
    arms = []
    for name in ("a", "b"):
        arms.append(comparison_entry(tmp_path, name, name, (1,)))
        folder = tmp_path / name / "seed-1" / "csv" / "version_0"
        for file in folder.glob("evaluation/*"):
            file.unlink()
        _rollouts(folder, 0, {"early": f"{name} said", f"only {name}": "x"})
        _rollouts(folder, 5, {"late": "later"})
    _rollouts(folder, 7, {"early": "b said better"})
    table = sample_table(read_folder(write_comparison(tmp_path, arms)))
    assert table is not None
    assert [row.prompt for row in table.rows] == ["late", "early"]
    assert [sample.text for sample in table.rows[1].samples] == ["a said", "b said better"]
    assert table.rows[1].samples[1].note == "reward 0.5, 1 token, cut, iteration 7"


def test_long_texts_are_cut_and_chats_show_their_last_message(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 1, "reward": 1.0, "tokens/generated": 1.0}])
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    record = {"prompt_index": 0, "prompt": messages, "greedy": {"completion": "x" * 5000}}
    write_lines(tmp_path / "evaluation" / "val-00000001.jsonl", [record, {"prompt": "no greedy"}])
    table = sample_table(read_folder(tmp_path))
    assert table is not None
    assert [row.prompt for row in table.rows] == ["hello"]
    assert len(table.rows[0].samples[0].text) < LONGEST + 10
    assert table.rows[0].samples[0].is_right is None


def test_nothing_to_show(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 1, "reward": 1.0, "tokens/generated": 1.0}])
    assert sample_table(read_folder(tmp_path)) is None
