"""The quickstart learns, through the command line, and leaves behind what the README says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart" / "grpo.yaml"


def into(folder, recipe=RECIPE, **trainer):
    """A second configuration file that sends the run's files to a folder."""
    loggers = yaml.safe_load(recipe.read_text(encoding="utf-8"))["trainer"]["logger"]
    for logger in loggers:
        logger["init_args"]["save_dir"] = str(folder)
    file = folder / "folder.yaml"
    options = {**trainer, "logger": loggers, "default_root_dir": str(folder), "enable_progress_bar": False}
    file.write_text(yaml.safe_dump({"trainer": options}), encoding="utf-8")
    return file


def held_out(folder):
    """Held-out metrics before training and after it."""
    table = pd.read_csv(folder / "csv" / "version_0" / "metrics.csv").dropna(subset=["val/accuracy"])
    return table.iloc[0], table.iloc[-1]


def warnings_of(folder):
    """What HealthMonitor warned of."""
    file = folder / "tensorboard" / "version_0" / "health.jsonl"
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line["finding"] for line in lines if line["event"] == "alarm" and line["level"] == "warning"]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, run_python):
    """Half of the quickstart; its folder and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    output = run_python(
        *("-m", "lit_rlhf", "fit", "-c", RECIPE, "-c", into(folder)),
        *("--trainer.max_epochs", 40),
    )
    return folder, output


def test_it_learns(short_run):
    before, after = held_out(short_run[0])
    assert after["val/accuracy"] >= before["val/accuracy"] + 0.25
    assert after["val/sampled_accuracy"] >= before["val/sampled_accuracy"] + 0.1


def test_the_output_says_so(short_run):
    folder, output = short_run
    before, after = held_out(folder)
    assert "64 prompts x 8 = 512 completions" in output
    assert f"{before['val/accuracy']:.4g} -> {after['val/accuracy']:.4g}" in output
    assert "iteration 20" in output
    for place in ("tensorboard/version_0", "csv/version_0", "tensorboard/version_0/policy", "checkpoints/best.ckpt"):
        assert place in "".join(output.split()).replace("│", ""), place


def test_the_logs_are_there(short_run):
    folder = short_run[0]
    assert list((folder / "tensorboard" / "version_0").glob("events.out.tfevents.*"))
    assert (folder / "tensorboard" / "version_0" / "config.yaml").exists()
    table = pd.read_csv(folder / "csv" / "version_0" / "metrics.csv").dropna(subset=["reward"])
    assert len(table) == 40
    assert table["step"].tolist() == list(range(1, 41))  # optimizer steps done
    assert not table[[name for name in table if not name.startswith("val/")]].isna().any(axis=None)


def test_it_is_healthy(short_run):
    folder, output = short_run
    assert warnings_of(folder) == []
    assert "health info near_zero_loss" in output
    assert "│ health" in output
    assert "no warning" in output


def test_every_logged_metric_is_in_the_glossary(short_run):
    table = pd.read_csv(short_run[0] / "csv" / "version_0" / "metrics.csv")
    glossary = (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8")
    names = {name for name in table if name not in ("epoch", "step")}
    names = {name.replace("reward/math_answer", "reward/<name>") for name in names}
    names = {name.replace("pass@8", "pass@k").replace("maj@8", "maj@n") for name in names}
    assert {name for name in names if f"`{name}`" not in glossary} == set()


def test_the_first_step(short_run):
    """The policy is its own reference, the ratio is 1 and the loss is the mean of advantages that nearly cancel."""
    table = pd.read_csv(short_run[0] / "csv" / "version_0" / "metrics.csv").dropna(subset=["reward"])
    first = table.iloc[0]
    assert abs(first["kl"]) < 1e-4
    assert first["policy/ratio"] == 1.0
    assert abs(first["loss"]) < 0.1
    assert (table["sampling/log_prob_gap"] < 1e-3).all()


def test_the_checkpoint_and_the_policy_are_there(short_run):
    log_dir = short_run[0] / "tensorboard" / "version_0"
    for name in ("best", "last"):
        checkpoint = torch.load(log_dir / "checkpoints" / f"{name}.ckpt", map_location="cpu", weights_only=False)
        assert checkpoint["global_step"] in ((40,) if name == "last" else (20, 40))
        assert not any(key.startswith("reference") for key in checkpoint["state_dict"])
    policy = AutoModelForCausalLM.from_pretrained(log_dir / "policy")
    tokenizer = AutoTokenizer.from_pretrained(log_dir / "policy")
    assert torch.equal(policy.lm_head.weight, checkpoint["state_dict"]["policy.lm_head.weight"])
    prompt = tokenizer("20+30=", return_tensors="pt")  # no carry: the base adds these right, and so must the policy
    ids = policy.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "20+30=50"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_quickstart_over_three_seeds(tmp_path, run_python):
    rows = []
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_python("-m", "lit_rlhf", "fit", "-c", RECIPE, "-c", into(folder), "--seed_everything", seed)
        assert warnings_of(folder) == []
        before, after = held_out(folder)
        rows.append([frame[name] for name in ("val/accuracy", "val/sampled_accuracy") for frame in (before, after)])
    greedy_before, greedy_after, sampled_before, sampled_after = (
        math.fsum(part) / 3 for part in zip(*rows, strict=True)
    )
    assert greedy_before <= 0.60, rows
    assert greedy_after >= 0.93, rows
    assert sampled_before <= 0.72, rows
    assert sampled_after >= 0.90, rows


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_ppo_quickstart(tmp_path, run_python):
    """The policy learns, and before it does the critic explains at least half of what can be explained (0.71)."""
    recipe = RECIPE.with_name("ppo.yaml")
    run_python("-m", "lit_rlhf", "fit", "-c", recipe, "-c", into(tmp_path, recipe))
    before, after = held_out(tmp_path)
    assert before["val/accuracy"] <= 0.60
    assert after["val/accuracy"] >= 0.85
    assert after["val/sampled_accuracy"] >= 0.85
    explained = pd.read_csv(tmp_path / "csv" / "version_0" / "metrics.csv")["value/explained_variance"]
    assert explained.max() >= 0.71 / 2
    assert warnings_of(tmp_path) == []
