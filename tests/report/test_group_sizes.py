from __future__ import annotations

from pathlib import Path

import yaml

from lit_rlhf.report import read_folder
from lit_rlhf.report.group_sizes import find_group_sizes
from tests.report.folders import comparison_entry, write_comparison


def _sizes(folder: Path) -> list[tuple[int, str]] | None:
    found = find_group_sizes(read_folder(folder))
    return None if found is None else [(size, arm.name) for size, arm in found.arms]


def test_arms_that_differ_in_their_groups_only_are_found(comparison_dir: Path) -> None:
    assert _sizes(comparison_dir) == [(4, "grpo-4"), (8, "grpo")]


def test_one_that_differs_in_more_is_none_of_them(comparison_dir: Path) -> None:
    for file in (comparison_dir / "grpo-4").rglob("config.yaml"):
        config = yaml.safe_load(file.read_text())
        config["model"]["init_args"]["lr"] = 0.5
        file.write_text(yaml.safe_dump(config))
    assert _sizes(comparison_dir) is None


def test_the_largest_set_is_taken(tmp_path: Path) -> None:
    arms = [comparison_entry(tmp_path, f"g{size}", f"G = {size}", (1,), group_size=size) for size in (16, 2, 8)]
    arms.append(comparison_entry(tmp_path, "ppo", "PPO", (1,), critic=True))
    assert _sizes(write_comparison(tmp_path, arms)) == [(2, "g2"), (8, "g8"), (16, "g16")]


def test_without_recipes_nothing_is_known(comparison_dir: Path) -> None:
    for file in comparison_dir.rglob("config.yaml"):
        file.unlink()
    assert _sizes(comparison_dir) is None
