from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="session")
def write_recipe(policy_dir: str) -> Callable[[Path], Path]:
    """Writes a small recipe and its data into a folder."""

    def write(folder: Path) -> Path:
        sums = [(1, 2), (30, 4), (12, 345), (7, 7), (99, 1), (5, 60)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in sums]
        for name, part in (("train", lines), ("val", lines[:3])):
            (folder / f"{name}.jsonl").write_text("".join(part))
        data = {"train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl")}
        rewards = [{"class_path": "lit_rlhf.rewards.ExactMatch"}]
        sizes = {"prompts_per_iteration": 3, "group_size": 2, "max_new_tokens": 4, "val_samples": 2}
        checkpoint = {"dirpath": str(folder / "kept"), "filename": "last", "enable_version_counter": False}
        content: dict[str, Any] = {
            "seed_everything": 3,
            "model": {"class_path": "GRPOModule", "init_args": {"policy": policy_dir, "lr": 1e-3}},
            "data": {"class_path": "RolloutDataModule", "init_args": {**data, "rewards": rewards, **sizes}},
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 2,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": str(folder / "run"),
                "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder / "run")}},
                "callbacks": [
                    {
                        "class_path": "ModelCheckpoint",
                        "init_args": {**checkpoint, "every_n_epochs": 1, "save_on_train_epoch_end": True},
                    }
                ],
            },
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write
