"""PPO and GRPO swap by changing one line of a recipe."""

from __future__ import annotations

import pytest
import yaml


@pytest.mark.parametrize("group_size", [8, 1])
def test_the_grpo_quickstart_becomes_ppo_by_one_class_path(root, run_python, tmp_path, group_size):
    text = (root / "recipes" / "quickstart" / "grpo.yaml").read_text(encoding="utf-8")
    assert text.count("class_path: lit_rlhf.GRPOModule") == 1
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text(text.replace("lit_rlhf.GRPOModule", "lit_rlhf.PPOModule"), encoding="utf-8")
    fragment = tmp_path / "short.yaml"
    trainer = {"max_epochs": 2, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 9, "callbacks": None}
    trainer.update({"logger": False, "enable_checkpointing": False, "default_root_dir": str(tmp_path)})
    fragment.write_text(yaml.safe_dump({"trainer": trainer}), encoding="utf-8")
    output = run_python(
        *("-m", "lit_rlhf", "fit", "-c", recipe, "-c", fragment),
        *("--data.init_args.group_size", group_size, "--data.init_args.prompts_per_iteration", 16),
    )
    assert "PPOModule" in output
    assert f"16 prompts x {group_size} = {16 * group_size} completions" in output
    assert (tmp_path / "policy" / "model.safetensors").exists()
