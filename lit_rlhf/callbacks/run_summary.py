"""What a run is going to do, and what it has done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.callbacks.export_policy import ExportPolicy
from lit_rlhf.callbacks.health_monitor import HealthMonitor
from lit_rlhf.callbacks.overoptimization_monitor import OveroptimizationMonitor
from lit_rlhf.callbacks.throughput import Throughput
from lit_rlhf.callbacks.token_budget import TokenBudget
from lit_rlhf.callbacks.warmup_cosine import is_endless, run_length
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.models.memory import memory_of
from lit_rlhf.rollout.memory import memory_line, workload
from lit_rlhf.strategies import shards_weights

if TYPE_CHECKING:
    from lit_rlhf.modules.base import PolicyModule
    from lit_rlhf.rollout.datamodule import RolloutDataModule


class RunSummary(L.Callback):
    """Print a banner in ``on_train_start`` and a table of results in ``on_fit_end``. Changes nothing."""

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Print the banner."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        _print("lit_rlhf", banner_rows(trainer, pl_module, data))
        for prompts in data.prompts.values():
            if report := prompts.report():
                Console().print(report, highlight=False, markup=False)

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """Print the results."""
        _print("results", result_rows(trainer, pl_module))


def banner_rows(trainer: L.Trainer, module: PolicyModule, data: RolloutDataModule) -> list[tuple[str, str]]:
    """Name and value of each line of the banner.

    Args:
        trainer: At the start of training.
        module: With its policy.
        data: With its prompts.
    """
    samples = data.prompts_per_iteration * data.group_size
    steps = data.optimizer_steps_per_iteration
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = sum(p.numel() for p in module.policy.parameters()) if module.policy is not None else 0
    sampling = data.sampling
    reference = "a frozen copy of the policy at the start"
    if module.kl_coef == 0:
        reference = "none (kl_coef is 0)"
    elif module.adapter:
        reference = "a frozen copy of the adapter at the start"
    elif module.lora_rank:
        reference = "the policy with its adapter switched off"
    knobs = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k or 'off'}"
    rows = [
        ("algorithm", type(module).__name__),
        ("policy", f"{module.model_name} ({_count(total)} parameters, {_count(trainable)} trainable)"),
        ("reference", reference),
        ("prompts", f"{len(data.prompts['train']):,} in {data.prompts['train'].name}"),
        ("rewards", ", ".join(data.scorer.names)),
        (
            "iteration",
            f"{data.prompts_per_iteration} prompts x {data.group_size} = {samples:,} completions, at most "
            f"{samples * sampling.max_new_tokens:,} new tokens; {steps} optimizer step{'s' * (steps != 1)}, "
            f"{trainer.accumulate_grad_batches} micro-batch{'es' * (trainer.accumulate_grad_batches != 1)} each",
        ),
        ("run", _length(trainer)),
        ("sampling", f"{knobs}, at most {sampling.max_new_tokens} new tokens, ends at ids {sampling.eos_token_ids}"),
        ("numerics", module.numerics_summary()),
        ("memory", memory_estimate(trainer, module, data)),
    ]
    return rows


def memory_estimate(trainer: L.Trainer, module: PolicyModule, data: RolloutDataModule) -> str:
    """Gigabytes on each device, by the calculation of ``lit-rlhf plan``.

    Args:
        trainer: Knows devices, strategy and precision.
        module: The policy and its critic.
        data: With its prompts.
    """
    try:
        work = workload(
            module,
            data,
            data.prompts["train"].longest,
            placement="fsdp2" if shards_weights(trainer) else "ddp",
            devices=trainer.world_size,
            precision=str(trainer.precision),
            cpu=trainer.strategy.root_device.type == "cpu",
        )
    except ConfigurationError as error:
        return f"not known: {error}"
    if trainer.strategy.root_device.type == "cuda":
        properties = torch.cuda.get_device_properties(trainer.strategy.root_device)
        work = replace(work, device_bytes=properties.total_memory)
    return memory_line(memory_of(work))


def result_rows(trainer: L.Trainer, module: PolicyModule) -> list[tuple[str, str]]:
    """Name and value of each line of the results.

    Args:
        trainer: At the end of training.
        module: Knows the evaluation from before training.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = []
    # Without the ends of intervals: the table is to be read at a glance.
    held_out = [n for n in metrics if n.startswith("val/") and not n.endswith(("_low", "_high"))]
    for name in sorted(held_out, key=lambda name: ("accuracy" not in name and "pass@" not in name, name)):
        before = module.initial_metrics.get(name)
        rows.append((name, f"{_shown(before)} -> {_shown(metrics[name])}"))
    for name in ("reward", "kl", "group/effective_ratio"):
        if name in metrics:
            rows.append((f"{name} (last iteration)", _shown(metrics[name])))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, HealthMonitor | OveroptimizationMonitor):
            warnings = [f"{a.rule} (iteration {a.iteration})" for a in callback.alarms if a.level == "warning"]
            rows.append(("health", ", ".join(warnings) or "no warning"))
        if isinstance(callback, Throughput):
            rows.extend(_throughput_rows(callback))
    rows.append(("memory/peak_gib", _shown(metrics.get("memory/peak_gib"))))
    rows.extend(_places(trainer))
    return rows


def _length(trainer: L.Trainer) -> str:
    limits = [f"{run_length(trainer):,} optimizer steps"] if not is_endless(trainer) else []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TokenBudget):
            limits.append(f"{callback.tokens:,} generated tokens")
    return " or ".join(limits) or "until stopped"


def _throughput_rows(throughput: Throughput) -> list[tuple[str, str]]:
    total = max(sum(throughput.seconds.values()), 1e-9)
    rows = [
        (f"time/{phase}", f"{seconds:.1f} s ({seconds / total:.0%})") for phase, seconds in throughput.seconds.items()
    ]
    tokens = throughput.tokens
    return [*rows, ("tokens", f"{tokens['generated']:,.0f} generated, {tokens['trained']:,.0f} trained")]


def _places(trainer: L.Trainer) -> list[tuple[str, str]]:
    rows = [(type(logger).__name__, str(logger.log_dir)) for logger in trainer.loggers if hasattr(logger, "log_dir")]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            best = callback.best_model_path or callback.last_model_path
            rows.append(("checkpoint", str(best or "none was written")))
        if isinstance(callback, ExportPolicy) and callback.exported_to is not None:
            rows.append(("exported policy", str(callback.exported_to)))
    return [(name, str(Path(place))) for name, place in rows]


def _print(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as text: brackets are no markup
    Console().print(table)


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
