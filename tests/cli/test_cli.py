from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from lit_rlhf.cli import main


@pytest.fixture
def recipe(tmp_path, write_recipe, monkeypatch):
    """A small recipe, in a folder of its own, with a reward function of the user's beside it."""
    (tmp_path / "my_rewards.py").write_text("def even(completions):\n    return [len(c) % 2 for c in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    file = write_recipe(tmp_path)
    content = yaml.safe_load(file.read_text())
    content["data"]["init_args"]["rewards"].insert(0, "my_rewards.even")
    content["trainer"].update(max_epochs=1, log_every_n_steps=1)
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(autouse=True)
def _no_other_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit-rlhf"])


def run(*args):
    main([str(arg) for arg in args])


def printed(capsys, *args):
    """The configuration that these arguments resolve to."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run("fit", *args, "--print_config")
    assert stop.value.code == 0
    return capsys.readouterr().out


def failure(capsys, *args):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(*args)
    return stop.value.code, capsys.readouterr().err


def test_fit_then_validate_test_and_predict(recipe, tmp_path, capsys):
    run("fit", "-c", recipe)
    checkpoint = tmp_path / "kept" / "last.ckpt"
    assert checkpoint.exists()
    log_dir = tmp_path / "run" / "lightning_logs" / "version_0"
    assert (log_dir / "policy" / "config.json").exists()
    saved = yaml.safe_load((log_dir / "config.yaml").read_text())
    assert saved["data"]["init_args"]["rewards"][0] == "my_rewards.even"
    trained = (log_dir / "metrics.csv").read_text()
    assert "reward/even" in trained
    assert "reward/exact_match" in trained

    capsys.readouterr()
    run("validate", "-c", recipe, "--ckpt_path", checkpoint)
    assert "val/accuracy" in capsys.readouterr().out
    run("test", "-c", recipe, "--ckpt_path", checkpoint)
    assert "test/accuracy" in capsys.readouterr().out
    run("predict", "-c", recipe, "--ckpt_path", checkpoint)
    (file,) = (tmp_path / "run").rglob("completions.jsonl")
    assert len(file.read_text().splitlines()) == 3 * (1 + 2)


def test_what_comes_later_wins(recipe, tmp_path, capsys):
    fragment = tmp_path / "fragment.yaml"
    fragment.write_text("model:\n  init_args:\n    lr: 5.0e-6\n    kl_coef: 0.5\ntrainer:\n  max_epochs: 7\n")
    plain = yaml.safe_load(printed(capsys, "-c", recipe))
    assert plain["model"]["init_args"]["lr"] == 1e-3
    layered = yaml.safe_load(printed(capsys, "-c", recipe, "-c", fragment))
    assert (layered["model"]["init_args"]["lr"], layered["trainer"]["max_epochs"]) == (5e-6, 7)
    assert layered["data"] == plain["data"]
    line = printed(capsys, "-c", recipe, "-c", fragment, "--model.init_args.lr", "1e-5", "--data.group_size", "4")
    overridden = yaml.safe_load(line)
    assert overridden["model"]["init_args"]["lr"] == 1e-5
    assert overridden["model"]["init_args"]["kl_coef"] == 0.5
    assert overridden["data"]["init_args"]["group_size"] == 4


def test_an_override_is_what_runs(recipe, tmp_path):
    run("fit", "-c", recipe, "--trainer.max_epochs", "3", "--data.init_args.prompts_per_iteration", "2")
    rows = (tmp_path / "run" / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("reward")
    assert sum(bool(row.split(",")[place]) for row in rows[1:]) == 3


def test_the_printed_configuration_is_complete(recipe, tmp_path, capsys):
    first = printed(capsys, "-c", recipe)
    config = yaml.safe_load(first)
    assert config["model"]["class_path"].endswith("GRPOModule")
    assert config["model"]["init_args"]["entropy_coef"] == 0.0
    assert config["data"]["init_args"]["temperature"] == 1.0
    again = tmp_path / "again.yaml"
    again.write_text(first)
    assert printed(capsys, "-c", again) == first


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["--help"], ["fit", "predict", "lit-rlhf fit -c recipes/quickstart/grpo.yaml", "what comes later wins"]),
        (["fit", "--model.help", "GRPOModule"], ["kl_placement", "subtracts the penalty from the reward,"]),
        (["fit", "--data.help", "RolloutDataModule"], ["group_size", "Completions sampled for each prompt"]),
        (["fit", "--data.help", "RolloutDataModule"], ["on_reward_error", "leaves the row out"]),
    ],
)
def test_help_explains(capsys, args, texts):
    with pytest.raises(SystemExit) as stop:
        run(*args)
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in texts:
        assert text in shown


def test_an_unknown_option_is_named(recipe, capsys):
    code, error = failure(capsys, "fit", "-c", recipe, "--model.init_args.klcoef", "0.1")
    assert code == 2
    assert "klcoef" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.init_args.kl_coef", "-1"], "kl_coef must be a number in [0, inf), got -1.0"),
        (["--data.init_args.steps_per_pass", "9"], "steps_per_pass=9 optimizer steps cannot share"),
        (
            ['--trainer.callbacks+={"class_path": "WarmupCosine", "init_args": {"floor": 2.0}}'],
            "WarmupCosine: floor must lie in [0, 1], got 2.0",
        ),
        (
            ['--data.rewards=[{"class_path": "lit_rlhf.rewards.FormatMatch", "init_args": {"pattern": "("}}]'],
            "FormatMatch: '(' is not a regular expression",
        ),
        (["--data.init_args.group_size", "1"], "group_size must be at least 2, got 1"),
        (["--trainer.reload_dataloaders_every_n_epochs", "5"], "reload_dataloaders_every_n_epochs=5"),
        (["--data.init_args.train", "nowhere/at/all.jsonl"], "nowhere/at/all.jsonl"),
        (["--data.init_args.max_new_tokens", "99"], "more than the model's context of 64"),
        (["--model.init_args.policy", "no/such-folder/here"], "no/such-folder/here"),
    ],
)
def test_an_error_of_the_users_making_is_one_line(recipe, capsys, options, message):
    code, error = failure(capsys, "fit", "-c", recipe, *options)
    assert code == 1
    lines = [line for line in error.splitlines() if "lit-rlhf: error:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("lit-rlhf: error: ")
    assert message in lines[0]
    assert error.rstrip().endswith(lines[0])
    assert "Traceback" not in error


def test_a_failing_reward_function_is_one_line(recipe, capsys, tmp_path):
    file = Path(tmp_path / "my_rewards.py")
    file.write_text("def even(completions):\n    raise KeyError('gold')\n")
    code, error = failure(capsys, "fit", "-c", recipe)
    assert code == 1
    assert error.rstrip().splitlines()[-1].startswith("lit-rlhf: error: Reward `even` raised KeyError at row 0")


def test_an_error_of_another_kind_keeps_its_traceback(recipe, monkeypatch):
    def broken(self, *args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("lit_rlhf.rollout.datamodule.RolloutDataModule.train_dataloader", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("fit", "-c", recipe)


def test_a_reward_that_does_not_exist(recipe, capsys):
    code, error = failure(capsys, "fit", "-c", recipe, "--data.init_args.rewards", "[my_rewards.odd]")
    assert code == 2
    assert "my_rewards.odd" in error


def test_full_class_names_too(recipe, capsys):
    recipe.write_text(recipe.read_text().replace("GRPOModule", "lit_rlhf.GRPOModule"))
    config = yaml.safe_load(printed(capsys, "-c", recipe))
    assert config["model"]["init_args"]["entropy_coef"] == 0.0
