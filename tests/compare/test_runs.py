from __future__ import annotations

import csv
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from lit_rlhf.compare import ComparisonRuns, arm_recipes
from lit_rlhf.errors import ConfigurationError

BUDGET = 150


@pytest.fixture
def arms(tmp_path, policy_dir, rows):
    """GRPO and PPO on the same prompts; one that cannot end well, on request."""
    for name, part in (("train", rows), ("val", rows[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def make(**more):
        shared = {
            "model": {"init_args": {"policy": policy_dir, "lr": 1e-3}},
            "data": {
                "class_path": "lit_rlhf.RolloutDataModule",
                "init_args": {
                    "train": str(tmp_path / "train.jsonl"),
                    "val": str(tmp_path / "val.jsonl"),
                    "rewards": [{"class_path": "lit_rlhf.rewards.ExactMatch"}],
                    "max_new_tokens": 6,
                    "val_samples": 2,
                },
            },
            "trainer": {"accelerator": "cpu", "devices": 1, "check_val_every_n_epoch": 1},
        }
        grpo = {
            "model": {"class_path": "lit_rlhf.GRPOModule"},
            "data": {"init_args": {"group_size": 4, "prompts_per_iteration": 3}},
        }
        return arm_recipes(shared, {"grpo": grpo, **more})

    return make


PPO = {
    "title": "PPO",
    "model": {"class_path": "lit_rlhf.PPOModule"},
    "data": {"init_args": {"group_size": 1, "prompts_per_iteration": 6}},
}
FAILS = {
    "model": {"class_path": "lit_rlhf.GRPOModule"},
    "trainer": {
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "nothing"}}]
    },
}


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """What was logged, times and memory aside; in float32, which the values of a sanity check are not yet."""
    found: dict[int, dict[str, float]] = {}
    for file in sorted(folder.rglob("metrics.csv")):
        for row in csv.DictReader(file.open()):
            kept = {
                name: float(np.float32(value))
                for name, value in row.items()
                if value and not name.startswith(("time/", "memory/")) and "per_second" not in name
            }
            found.setdefault(int(row["step"]), {}).update(kept)
    return found


def written(out: Path) -> dict[str, dict]:
    content = json.loads((out / "comparison.json").read_text())
    return {run["folder"]: run for arm in content["arms"] for run in arm["runs"]}


@pytest.mark.timeout(300)
def test_arms_end_at_the_same_budget_and_one_that_fails_stops_no_other(arms, tmp_path):
    runs = ComparisonRuns(arms(ppo=PPO, fails=FAILS), [1], BUDGET, tmp_path / "out", jobs=2)
    runs.check()
    seen = []
    runs.run(lambda run: seen.append((run.arm, run.status)))
    assert ("grpo", "running") in seen
    state = written(tmp_path / "out")
    assert {folder: run["status"] for folder, run in state.items()} == {
        "grpo/seed-1": "done",
        "ppo/seed-1": "done",
        "fails/seed-1": "failed",
    }
    assert "nothing" in state["fails/seed-1"]["error"], "the monitor that does not exist"
    for folder, rollout in (("grpo/seed-1", 12), ("ppo/seed-1", 6)):
        assert BUDGET <= state[folder]["generated_tokens"] < BUDGET + rollout * 6
        last = max(metrics(tmp_path / "out" / folder).items())[1]
        assert {"tokens/generated", "val/accuracy"} <= set(last), "evaluated where it ended"

    # What is done is not run again, what failed is.
    before = (tmp_path / "out" / "grpo/seed-1/outcome.json").stat().st_mtime_ns
    again = ComparisonRuns(arms(ppo=PPO, fails=FAILS), [1], BUDGET, tmp_path / "out", jobs=1)
    assert [run.status for run in again.runs] == ["done", "done", "pending"]
    seen.clear()
    again.run(lambda run: seen.append((run.arm, run.status)))
    assert seen == [("fails", "running"), ("fails", "failed")]
    assert (tmp_path / "out" / "grpo/seed-1/outcome.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigurationError, match="another recipe or token budget"):
        ComparisonRuns(arms(), [1], BUDGET + 1, tmp_path / "out")


@pytest.mark.timeout(300)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(arms, tmp_path):
    budget = 1500

    def comparison(name):
        return ComparisonRuns(arms(), [3], budget, tmp_path / name)

    comparison("whole").run()
    stopped, ended = comparison("stopped"), threading.Event()
    log = tmp_path / "stopped" / "grpo" / "seed-3" / "csv" / "version_0" / "metrics.csv"

    def stop_soon():
        while not log.exists() and not ended.wait(0.02):
            pass
        stopped.stop()

    thread = threading.Thread(target=stop_soon)
    thread.start()
    stopped.run()
    ended.set()
    thread.join()
    assert [run.status for run in stopped.runs] == ["pending"]
    assert 0 < stopped.runs[0].generated_tokens < budget
    again = comparison("stopped")
    again.run()
    assert [run.status for run in again.runs] == ["done"]
    expected, found = (metrics(tmp_path / name / "grpo" / "seed-3") for name in ("whole", "stopped"))
    assert found == expected


def test_a_recipe_that_fit_would_refuse_is_refused_with_its_arm(arms, tmp_path):
    bad = {"model": {"class_path": "lit_rlhf.GRPOModule", "init_args": {"kl_placement": "nowhere"}}}
    runs = ComparisonRuns(arms(bad=bad), [1], BUDGET, tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"arms\.bad: model\.kl_placement must be one of 'reward', "):
        runs.check()


def test_an_outcome_that_cannot_be_read(arms, tmp_path):
    path = tmp_path / "out" / "grpo" / "seed-1" / "outcome.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match=r"outcome\.json: no outcome of a run"):
        ComparisonRuns(arms(), [1], BUDGET, tmp_path / "out")
