"""``--ckpt_path`` on the command line: the newest checkpoint, and the recipe's word against it."""

from __future__ import annotations

import sys

import pytest
import torch

from lit_rlhf.cli import main


@pytest.fixture
def trained(write_recipe, tmp_path, monkeypatch):
    """A recipe whose run of two iterations is done."""
    monkeypatch.setattr(sys, "argv", ["lit-rlhf"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    recipe = write_recipe(tmp_path)
    main(["fit", "-c", str(recipe)])
    return recipe


def refusal(capsys, *words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_last_goes_on(trained, tmp_path):
    before = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)
    main(["fit", "-c", str(trained), "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    after = torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)
    assert (before["global_step"], after["global_step"]) == (2, 3)
    main(["validate", "-c", str(trained), "--ckpt_path", "last"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--data.group_size", "4"], "(group_size: 2 -> 4)"),
        (["--model.kl_coef", "0.2"], "kl_coef: "),
        # Lightning by itself would take the checkpoint's value, and not say so.
        (["--model.kl_placement", "loss"], "trained with kl_placement='reward', now it is 'loss'"),
        (["--model", "lit_rlhf.PPOModule"], "the checkpoint is of a GRPOModule, now the module is PPOModule"),
    ],
)
def test_another_run_is_refused_before_weights_are_loaded(
    trained, tmp_path, policy_dir, capsys, monkeypatch, option, message
):
    def loaded(*args, **options):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("lit_rlhf.modules.causal_lm.load_causal_lm", loaded)
    kept = (tmp_path / "kept" / "last.ckpt").read_bytes()
    model = ["--model.policy", policy_dir] if "--model" in option else []
    said = refusal(capsys, "fit", "-c", trained, "--ckpt_path", "last", *option, *model)
    assert message in said
    assert (tmp_path / "kept" / "last.ckpt").read_bytes() == kept
