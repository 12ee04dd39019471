from __future__ import annotations

import re
from pathlib import Path

from lit_rlhf.report import read_folder
from lit_rlhf.report.quantities import quantities
from lit_rlhf.report.summary import differences, numbers
from lit_rlhf.report.verdict import Statement, method_note, verdict
from tests.report.folders import alarm, comparison_entry, run_rows, write_comparison, write_run
from tests.report.test_overoptimization import hill


def _verdict(folder: Path, target: float | None = None) -> list[Statement]:
    comparison = read_folder(folder)
    found = numbers(comparison, quantities(comparison, target))
    return verdict(comparison, found, differences(found, comparison.arms), target)


def _about(statements: list[Statement], subject: str) -> list[Statement]:
    return [statement for statement in statements if statement.subject == subject]


def test_what_the_seeds_show_is_claimed_and_what_they_cannot_is_not(comparison_dir: Path) -> None:
    said = _about(_verdict(comparison_dir), "Greedy accuracy")
    shown, open_ = said[0], said[-1]
    assert shown.kind == "shown"
    assert shown.text.startswith("PPO is lower than GRPO (0.6")
    assert shown.text.endswith("– worse.")
    assert open_.kind == "open"
    assert open_.text.startswith("no difference between GRPO, G = 4 and GRPO that these 3 seeds can show (")


def test_amounts_are_said_in_percent_or_times(comparison_dir: Path) -> None:
    memory = _about(_verdict(comparison_dir), "Peak memory")[0]
    assert memory.is_timing
    assert re.match(r"PPO is (49|50|51)% higher than GRPO \(1\.5\d? against", memory.text)
    assert memory.text.endswith("– worse.")


def test_one_seed_claims_nothing(tmp_path: Path) -> None:
    arms = [comparison_entry(tmp_path, name, name, (1,), accuracy=lambda p: 0.9 * p) for name in "ab"]
    arms[1] = comparison_entry(tmp_path, "b", "b", (1,), accuracy=lambda p: 0.2 * p)
    said = _verdict(write_comparison(tmp_path, arms))
    assert {statement.kind for statement in said} <= {"open", "note"}
    assert "nothing can be claimed" in said[-1].text
    assert "too few seeds" in _about(said, "Greedy accuracy")[0].text


def test_an_arm_that_games_its_reward_is_called_so(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "good", "Good", (1, 2)),
        comparison_entry(tmp_path, "gamed", "Gamed", (1, 2), accuracy=hill, noise=0.0),
    ]
    warnings = [said.text for said in _verdict(write_comparison(tmp_path, arms)) if said.kind == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("Gamed over-optimises in 2 of 2 runs: the reward rises while the held-out metric")


def test_failed_and_unfinished_runs_are_told(tmp_path: Path) -> None:
    arms = [
        comparison_entry(tmp_path, "a", "A", (1, 2, 3), {2: "failed", 3: "pending"}),
        comparison_entry(tmp_path, "b", "B", (1,), {1: "running"}),
    ]
    said = [str(statement) for statement in _verdict(write_comparison(tmp_path, arms))]
    assert "A, seed 2, failed and is not counted: CUDA out of memory." in said
    assert "A, seed 3: not begun." in said
    assert "B, seed 1: still running." in said
    assert "B: no run is done; its numbers are those so far, and nothing is claimed." in said


def test_a_budget_that_was_not_kept_is_told(tmp_path: Path) -> None:
    arms = [comparison_entry(tmp_path, "a", "A", (1, 2)), comparison_entry(tmp_path, "b", "B", (1,), iterations=30)]
    said = [s.text for s in _verdict(write_comparison(tmp_path, arms)) if s.kind == "warning"]
    assert said == ["B, seed 1, generated +1,000 tokens beyond the budget: more than an iteration."]


def test_a_target_that_was_missed_is_told(comparison_dir: Path) -> None:
    assert "0 of 3 runs of PPO reached accuracy 0.85." in [s.text for s in _verdict(comparison_dir, 0.85)]


def test_a_run_is_told_by_its_beginning_and_end(tmp_path: Path) -> None:
    write_run(tmp_path, alarms=[alarm("dead_groups", 3), alarm("dead_groups", 9), alarm("coarse", 3, "info")])
    said = _verdict(tmp_path)
    assert said[0].text.startswith("Greedy accuracy on held-out prompts went from 0.5 to 0.9")
    assert said[0].text.endswith("One run says nothing of other seeds.")
    assert said[-1] == Statement("warning", "2 alarms rang: dead_groups.")


def test_a_run_with_intervals_over_prompts_says_what_they_show(tmp_path: Path) -> None:
    for half, kind in ((0.05, "shown"), (0.4, "open")):
        rows = [
            {**row, "val/accuracy_low": row["val/accuracy"] - half, "val/accuracy_high": row["val/accuracy"] + half}
            if "val/accuracy" in row
            else row
            for row in run_rows()
        ]
        write_run(tmp_path, rows=rows)
        assert _verdict(tmp_path)[0].kind == kind


def test_a_run_without_validation_says_so(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if not name.startswith("val/")} for row in run_rows()]
    write_run(tmp_path, rows=[row for row in rows if len(row) > 1])
    assert "no validation" in _verdict(tmp_path)[0].text


def test_the_method_is_stated(comparison_dir: Path) -> None:
    comparison = read_folder(comparison_dir)
    note = method_note(differences(numbers(comparison, quantities(comparison, None)), comparison.arms))
    assert "Student's t" in note
    assert "paired by seed" in note
    assert "98.3%" in note
    assert "Welch" not in note
