"""Every callback that steers a run can be written into a recipe."""

from __future__ import annotations

import json

import pytest
import yaml

from lit_rlhf.cli import main

CALLBACKS = {
    "AdaptiveKL": {"target": 0.5, "horizon": 100, "final_target": 0.1},
    "AdvantageClip": {"advantage_range": 2.0},
    "DifficultySampler": {"always_solved_weight": 0.5, "reward": "exact_match"},
    "DynamicSampling": {"replace_with": "same_prompt", "token_budget": 64},
    "EarlyStopInnerEpochs": {"target_kl": 0.05},
    "ReferenceSync": {"every_n_iterations": 2, "weight": 0.5},
    "StdThresholdMask": {"zero_adv_threshold": 0.01},
    "WarmupCosine": {"warmup_steps": 1, "groups": ["policy"]},
}


def recipe(folder, policy, rows, callbacks):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "seed_everything": 3,
        "model": {"class_path": "GRPOModule", "init_args": {"policy": policy, "lr": 1e-3}},
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "train": str(folder / "train.jsonl"),
                "rewards": [{"class_path": "lit_rlhf.rewards.ExactMatch"}],
                "prompts_per_iteration": 3,
                "group_size": 2,
                "max_new_tokens": 4,
                "passes": 2,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "default_root_dir": str(folder / "run"),
            "logger": False,
            "callbacks": [
                {"class_path": f"lit_rlhf.callbacks.{name}", "init_args": options} for name, options in callbacks
            ],
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def test_all_in_one_recipe(tmp_path, policy_dir, rows, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    main(["fit", "-c", recipe(tmp_path, policy_dir, rows, CALLBACKS.items())])
    assert len((tmp_path / "run" / "prompt_difficulty.jsonl").read_text().splitlines()) == len(rows)


def test_a_clash_is_one_line(tmp_path, policy_dir, rows, monkeypatch, capsys):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    callbacks = [("AdaptiveKL", CALLBACKS["AdaptiveKL"]), ("KLSchedule", {"start": 0.1, "end": 0.2})]
    with pytest.raises(SystemExit):
        main(["fit", "-c", recipe(tmp_path, policy_dir, rows, callbacks)])
    assert "AdaptiveKL and KLSchedule both set the KL coefficient: keep one of them" in capsys.readouterr().err
