"""Completions to look at, and all of them to search."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.checkpointing import atomic_file, write_json_lines
from lit_rlhf.errors import check_choice, check_number
from lit_rlhf.rollout.batch import RolloutBatch

FileFormat = Literal["jsonl", "parquet", "none"]


class SampleTable(RolloutCallback):
    """Show some completions with their rewards on the console and as text in TensorBoard; write all of them to a file.

    Acts in ``on_advantages_end`` and changes nothing. Console and TensorBoard show the first rank's rows: of the first
    prompts the first completions, as they were sampled, not the best. The file has every completion of the iteration,
    ``samples/iteration-00020.jsonl`` in the log folder; each rank writes one of its own. Without a logger there is no
    file.

    Args:
        every_n_iterations: How often.
        num_prompts: Prompts shown.
        per_prompt: Completions shown of each.
        max_characters: Longer texts are cut in the console.
        file_format: ``jsonl``, ``parquet``, or ``none`` for no file.
    """

    def __init__(
        self,
        every_n_iterations: int = 10,
        num_prompts: int = 4,
        per_prompt: int = 2,
        max_characters: int = 200,
        file_format: FileFormat = "jsonl",
    ) -> None:
        for name, value in (
            ("every_n_iterations", every_n_iterations),
            ("num_prompts", num_prompts),
            ("per_prompt", per_prompt),
            ("max_characters", max_characters),
        ):
            check_number(f"SampleTable: {name}", value, minimum=1)
        check_choice("SampleTable: file_format", file_format, get_args(FileFormat))
        self.every_n_iterations = every_n_iterations
        self.num_prompts = num_prompts
        self.per_prompt = per_prompt
        self.max_characters = max_characters
        self.file_format = file_format
        self._folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the folder while all ranks are together: the log folder is broadcast."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.file_format != "none":
            folder = trainer.log_dir if trainer.loggers and not trainer.fast_dev_run else None  # type: ignore[attr-defined]
            self._folder = None if folder is None else Path(folder) / "samples"

    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Show and write, now and then."""
        iteration = trainer.datamodule.iteration  # type: ignore[attr-defined]
        if iteration % self.every_n_iterations or not len(rollout):
            return
        if self._folder is not None:
            rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
            path = self._folder / f"iteration-{iteration:05}{rank}.{self.file_format}"
            write_records(sample_records(rollout, range(len(rollout))), path)
        if trainer.is_global_zero:
            self._show(trainer, sample_records(rollout, self._chosen(rollout)), iteration)

    def _chosen(self, rollout: RolloutBatch) -> list[int]:
        """Rows of the first completions of the first prompts."""
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(rollout.group_index.tolist()):
            if group in rows or len(rows) < self.num_prompts:
                rows.setdefault(group, []).append(row)
        return [row for group in rows.values() for row in group[: self.per_prompt]]

    def _show(self, trainer: L.Trainer, records: list[dict[str, Any]], iteration: int) -> None:
        columns = [name for name in records[0] if name not in ("prompt_index", "group")]
        table = Table(title=f"iteration {iteration}", title_justify="left")
        for name in columns:
            is_text = name in ("prompt", "completion")
            table.add_column(name, overflow="fold", justify="left" if is_text or name == "finish" else "right")
        for place, record in enumerate(records):
            # As text: a completion like [/INST] is no markup.
            cells = [Text(_cell(record[name]).replace("\n", "↵")[: self.max_characters]) for name in columns]
            cells[columns.index("advantage")].stylize("green" if record["advantage"] > 0 else "red")
            last_of_prompt = place + 1 == len(records) or records[place + 1]["group"] != record["group"]
            table.add_row(*cells, end_section=last_of_prompt)
        Console().print(table)
        lines = [columns, ["---"] * len(columns), *([_cell(record[name]) for name in columns] for record in records)]
        text = "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", text, global_step=trainer.global_step)


def sample_records(rollout: RolloutBatch, rows: Any) -> list[dict[str, Any]]:
    """Plain records of some completions: texts, each reward, advantage, length and why it ended.

    Args:
        rollout: With rewards and advantages.
        rows: Their numbers, in order.

    Returns:
        One per row. A reward is ``None`` where its function abstained; that of a single reward function stands there
        once, as ``reward``. The advantage is the mean over the tokens that count, 0 where there is none.
    """
    names = rollout.reward_names if len(rollout.reward_names) > 1 else ()
    advantages = [0.0] * len(rollout)
    if rollout.advantages is not None:
        mask = rollout.completion_mask
        totals = rollout.advantages.where(mask, rollout.advantages.new_zeros(()))
        advantages = (totals.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
    components = [[None if math.isnan(part) else part for part in row] for row in rollout.reward_components.tolist()]
    groups, prompt_index = rollout.group_index.tolist(), rollout.prompt_index.tolist()
    rewards, scored = rollout.task_rewards.tolist(), rollout.scored_mask.tolist()
    lengths, finished = rollout.completion_lengths.tolist(), rollout.finished.tolist()
    return [
        {
            "group": groups[row],
            "prompt_index": prompt_index[row],
            "prompt": _prompt_text(rollout.prompts[row]),
            "completion": rollout.completions[row],
            **{name: components[row][place] for place, name in enumerate(names)},
            "reward": rewards[row] if scored[row] else None,
            "advantage": advantages[row],
            "tokens": lengths[row],
            "finish": "stop" if finished[row] else "length",
        }
        for row in rows
    ]


def write_records(records: list[dict[str, Any]], path: Path) -> None:
    """Write records as JSON lines, or as a parquet table, by the ending of the file.

    Args:
        records: With the same keys.
        path: Its folder is created if missing.
    """
    if path.suffix != ".parquet":
        write_json_lines(records, path)
        return
    from datasets import Dataset

    with atomic_file(path) as temporary:
        Dataset.from_list(records).to_parquet(str(temporary))


def _prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _cell(value: Any) -> str:
    if value is None:
        return "abstained"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
