"""A few completions, to look at."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rollout.batch import RolloutBatch

_COLUMNS = ("prompt", "completion", "reward", "advantage", "tokens", "finished")


class SampleTable(RolloutCallback):
    """Show sampled completions with their rewards on the console, and as text in TensorBoard.

    Acts in ``on_advantages_end`` and changes nothing. The rows are those of the first rank.

    Args:
        every_n_iterations: How often.
        num_rows: Completions shown: the first of as many different prompts.
        max_characters: Longer texts are cut in the console.
    """

    def __init__(self, every_n_iterations: int = 10, num_rows: int = 4, max_characters: int = 200) -> None:
        for name, value in (("every_n_iterations", every_n_iterations), ("num_rows", num_rows)):
            if value < 1:
                raise ConfigurationError(f"SampleTable: {name} must be at least 1, got {value}")
        self.every_n_iterations = every_n_iterations
        self.num_rows = num_rows
        self.max_characters = max_characters

    @rank_zero_only
    def on_advantages_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Show the table, now and then."""
        iteration = trainer.datamodule.iteration  # type: ignore[attr-defined]
        if iteration % self.every_n_iterations or not len(rollout):
            return
        rows = sample_rows(rollout, self.num_rows)
        table = Table(*_COLUMNS, title=f"iteration {iteration}")
        for row in rows:
            # As text: a completion like [/INST] is no markup.
            table.add_row(*(Text(cell[: self.max_characters]) for cell in row))
        Console().print(table)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
                text = "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)
                logger.experiment.add_text("samples", text, global_step=trainer.global_step)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def sample_rows(rollout: RolloutBatch, num_rows: int) -> list[tuple[str, ...]]:
    """Text cells of the first completion of each of the first prompts.

    Args:
        rollout: With rewards and advantages.
        num_rows: Prompts at most.
    """
    rows: list[tuple[str, ...]] = []
    seen: set[int] = set()
    for row, group in enumerate(rollout.group_index.tolist()):
        if group in seen or len(seen) == num_rows:
            continue
        seen.add(group)
        advantage = (
            0.0
            if rollout.advantages is None
            else rollout.advantages[row].sum() / max(1, int((rollout.advantages[row] != 0).sum()))
        )
        prompt = rollout.prompts[row]
        rows.append(
            (
                prompt if isinstance(prompt, str) else str(prompt[-1]["content"]),
                rollout.completions[row],
                f"{rollout.rewards[row]:.3g}" if rollout.scored_mask[row] else "abstained",
                f"{float(advantage):+.2f}",
                str(int(rollout.completion_lengths[row])),
                "yes" if rollout.finished[row] else "no",
            )
        )
    return rows
