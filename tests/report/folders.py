"""Run folders as ``fit`` leaves them, written line by line."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Rows = Sequence[Mapping[str, float]]


def write_metrics(folder: Path, rows: Rows) -> Path:
    """``metrics.csv`` as CSVLogger writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return folder / "metrics.csv"


def write_lines(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def alarm(rule: str, iteration: int, level: str = "warning") -> dict[str, Any]:
    said = {"finding": f"{rule} was seen", "advice": f"Do something about {rule}."}
    return {"event": "alarm", "rule": rule, "level": level, "iteration": iteration, "step": iteration + 1, **said}


def run_rows(
    iterations: int = 20,
    seed: int | str = 1,
    critic: bool = False,
    accuracy: Callable[[float], float] = lambda progress: 0.5 + 0.4 * progress,
    every: int = 5,
    noise: float = 0.01,
) -> list[dict[str, float]]:
    """Metrics of a run with one optimizer step per iteration, 100 tokens and about two seconds each."""
    draw = random.Random(seed)
    rows = [{"step": 0.0, "val/accuracy": accuracy(0.0), "val/pass@8": 0.9}]
    for iteration in range(iterations):
        step, progress = iteration + 1, (iteration + 1) / iterations
        row = {
            "step": step,
            "reward": 0.4 + 0.5 * progress + draw.gauss(0, noise),
            "kl": progress + draw.gauss(0, noise),
            "sampling/entropy": 1 - 0.5 * progress + draw.gauss(0, noise),
            "completion/length": 10 + draw.gauss(0, noise),
            "group/effective_ratio": 1 - 0.5 * progress,
            "group/reward_std": 0.3 + draw.gauss(0, noise),
            "tokens/generated": 100.0 * step,
            "tokens/trained": 250.0 * step,
            "memory/peak_gib": 1.0 + 0.5 * critic + draw.gauss(0, noise),
            "time/generation": 1.0,
            "time/training": 0.75 + draw.random(),
        }
        row["time/iteration"] = row["time/generation"] + row["time/training"]
        if critic:
            row |= {"value/error": 0.5 - 0.2 * progress, "value/explained_variance": math.sin(progress)}
        if step % every == 0:
            rows.append({"step": step, "val/accuracy": accuracy(progress) + draw.gauss(0, noise), "val/pass@8": 0.95})
        rows.append(row)
    return rows


def write_config(folder: Path, critic: bool = False, seed: int = 1, group_size: int = 8) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "seed_everything": seed,
        "trainer": {"default_root_dir": str(folder), "max_epochs": 20},
        "model": {"class_path": f"lit_rlhf.{'PPO' if critic else 'GRPO'}Module", "init_args": {"lr": 1e-3}},
        "data": {
            "class_path": "lit_rlhf.RolloutDataModule",
            "init_args": {"group_size": group_size, "prompts_per_iteration": 64 // group_size},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))


def evaluation_lines(right: Callable[[int], bool], prompts: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "prompt_index": index,
            "prompt": f"{index}+1=",
            "columns": {"answer": index + 1},
            "greedy": {
                **{"completion": str(index + (1 if right(index) else 2)), "correct": right(index)},
                **{"reward": float(right(index)), "verifier": float(right(index)), "tokens": 3, "finish": "stop"},
            },
            "samples": [],
        }
        for index in range(prompts)
    ]


def write_run(
    folder: Path,
    seed: int = 1,
    critic: bool = False,
    group_size: int = 8,
    rows: Rows | None = None,
    right: Callable[[int], bool] = lambda index: index % 3 > 0,
    alarms: Sequence[Mapping[str, Any]] = (),
    luck: str = "",
    **options: Any,
) -> Path:
    """A whole run folder."""
    version = folder / "csv" / "version_0"
    write_metrics(version, run_rows(seed=luck or seed, critic=critic, **options) if rows is None else rows)
    write_config(version, critic, seed, 1 if critic else group_size)
    write_lines(version / "health.jsonl", alarms)
    write_lines(version / "evaluation" / "val-00000000.jsonl", evaluation_lines(lambda index: index % 2 == 0))
    write_lines(version / "evaluation" / "val-00000020.jsonl", evaluation_lines(right))
    return folder


def comparison_entry(
    folder: Path, name: str, title: str, seeds: Sequence[int], statuses: Mapping[int, str] | None = None, **options: Any
) -> dict[str, Any]:
    """An arm with its runs, as it stands in ``comparison.json``."""
    runs = []
    for seed in seeds:
        status = (statuses or {}).get(seed, "done")
        if status != "pending":
            write_run(folder / name / f"seed-{seed}", seed=seed, luck=f"{name} {seed}", **options)
        error = "CUDA out of memory" if status == "failed" else None
        runs.append({"seed": seed, "folder": f"{name}/seed-{seed}", "status": status, "error": error})
    return {"name": name, "title": title, "runs": runs}


def write_comparison(folder: Path, arms: Sequence[Mapping[str, Any]], token_budget: int = 2000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps({"token_budget": token_budget, "arms": list(arms)}))
    return folder


def write_three_arms(folder: Path) -> Path:
    """GRPO that is plainly better than PPO, and GRPO with smaller groups that is neither."""
    rung = [alarm("dead_groups", 3), alarm("x", 4, "info")]
    arms = [
        comparison_entry(folder, "grpo", "GRPO", (1, 2, 3), accuracy=lambda p: 0.5 + 0.4 * p, alarms=rung),
        comparison_entry(
            *(folder, "ppo", "PPO", (1, 2, 3)),
            accuracy=lambda p: 0.5 + 0.2 * p,
            critic=True,
            right=lambda i: i % 4 == 0,
        ),
        comparison_entry(
            *(folder, "grpo-4", "GRPO, G = 4", (1, 2, 3)), accuracy=lambda p: 0.5 + 0.4 * p, group_size=4, noise=0.02
        ),
    ]
    return write_comparison(folder, arms)
