"""Keep count of how often each prompt is solved, and draw those less often that teach nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.checkpointing import write_json_lines
from lit_rlhf.errors import ConfigurationError, check_number
from lit_rlhf.rollout.sampler import PromptTurns

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import PromptDataset
    from lit_rlhf.rollout.batch import RolloutBatch

_COUNTS = ("draws", "completions", "solved", "last_completions", "last_solved")


class DifficultySampler(RolloutCallback):
    """Draw prompts less often whose completions were all right, or all wrong, when they were last drawn.

    Acts in ``on_rewards_end``, where it looks at completions (those that are drawn again or thrown away, too), and
    after the last micro-batch of an iteration, where it counts them and puts the prompts back into the queue
    (:class:`~lit_rlhf.rollout.sampler.PromptTurns`). A prompt of weight ``w`` is drawn ``w`` times per pass over the
    data on average. It is judged anew each time, so one that starts being solved is back at full weight. The counts of
    all ranks are one; with the queue they are part of the checkpoint.

    A completion is right where one reward function, by itself, gives at least the DataModule's ``verifier_threshold``.
    Logged are ``group/always_solved`` and ``group/never_solved``, shares of the prompts drawn so far. When fit ends, or
    fails, the first rank writes a JSON line per prompt to ``prompt_difficulty.jsonl`` in the log folder: ``index`` (row
    of the source), ``prompt``, ``draws``, ``completions``, ``solved``, ``solve_rate`` over the run and
    ``last_solve_rate``.

    Args:
        always_solved_weight: Of prompts whose completions were all right; 1 draws them like the others.
        never_solved_weight: Of prompts whose completions were all wrong.
        reward: Name of the reward function that decides; the first of the DataModule's ``rewards`` by default.
        path: Of the file.
    """

    # Also completions that another callback drops.
    runs_first = True
    sets = ("order of the prompts",)

    def __init__(
        self,
        always_solved_weight: float = 0.25,
        never_solved_weight: float = 0.25,
        reward: str | None = None,
        path: str | None = None,
    ) -> None:
        check_number("DifficultySampler: always_solved_weight", always_solved_weight, above=0, maximum=1)
        check_number("DifficultySampler: never_solved_weight", never_solved_weight, above=0, maximum=1)
        self.always_solved_weight = always_solved_weight
        self.never_solved_weight = never_solved_weight
        self.reward = reward
        self.path = path
        self.written_to: Path | None = None
        self.counts: dict[str, Tensor] = {}
        self._sampler: PromptTurns | None = None
        self._places: dict[int, int] = {}
        self._column = 0
        self._drawn = torch.zeros(0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take over the DataModule's sampler, and start counting."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data.staleness:
            raise ConfigurationError(
                "DifficultySampler draws prompts by what the iteration before has shown, staleness: 1 draws them "
                "before it is over: leave out one of the two"
            )
        names = data.scorer.names
        if self.reward is not None and self.reward not in names:
            raise ConfigurationError(
                f"DifficultySampler: there is no reward function {self.reward!r}, the names are {', '.join(names)}"
            )
        self._column = 0 if self.reward is None else names.index(self.reward)
        prompts: PromptDataset = data.prompts["train"]
        self._places = {prompt.index: place for place, prompt in enumerate(prompts.prompts)}
        self.counts = {name: torch.zeros(len(prompts), dtype=torch.long) for name in _COUNTS}
        self._drawn = torch.zeros(3, len(prompts), dtype=torch.float64)
        data.sampler = self._sampler = PromptTurns(len(prompts), data.prompts_per_iteration, data.seed, data.shuffle)
        self.written_to = Path(
            self.path or Path(trainer.log_dir or trainer.default_root_dir) / "prompt_difficulty.jsonl"
        )

    def on_rewards_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: RolloutBatch) -> None:
        """Look at the completions of this rank: drawn, judged and right, by prompt."""
        if not len(rollout):
            return
        scores = rollout.reward_components[:, self._column].cpu()
        places = torch.tensor([self._places[index] for index in rollout.prompt_index.tolist()])
        judged = ~scores.isnan()
        right = scores >= trainer.datamodule.verifier_threshold  # type: ignore[attr-defined]
        for row, values in enumerate((torch.ones_like(judged), judged, right)):
            self._drawn[row].index_add_(0, places, values.double())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the iteration, once it is done."""
        if trainer.datamodule.mid_iteration:  # type: ignore[attr-defined]
            return
        sums = trainer.strategy.reduce(self._drawn.to(trainer.strategy.root_device), reduce_op="sum")
        rows, judged, right = sums.long().cpu()
        self._drawn = torch.zeros_like(self._drawn)
        drawn = rows > 0
        self.counts["draws"][drawn] += 1
        self.counts["completions"] += judged
        self.counts["solved"] += right
        self.counts["last_completions"][drawn] = judged[drawn]
        self.counts["last_solved"][drawn] = right[drawn]
        assert self._sampler is not None
        self._sampler.put_back(drawn.nonzero()[:, 0].tolist(), self.weights()[drawn].tolist())

    def weights(self) -> Tensor:
        """``(num_prompts,)`` weight of each prompt, by its last draw; 1 where nothing was judged."""
        always, never = self._always_and_never()
        weights = torch.ones(len(always), dtype=torch.float64)
        weights[always] = self.always_solved_weight
        weights[never] = self.never_solved_weight
        return weights

    def _always_and_never(self) -> tuple[Tensor, Tensor]:
        judged, right = self.counts["last_completions"], self.counts["last_solved"]
        return (judged > 0) & (right == judged), (judged > 0) & (right == 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log how many prompts are too easy or too hard."""
        judged = int((self.counts["last_completions"] > 0).sum())
        for name, prompts in zip(("always", "never"), self._always_and_never(), strict=True):
            if judged:
                pl_module.iteration_values[f"group/{name}_solved"] = float(prompts.sum()) / judged  # type: ignore[operator, index]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file."""
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write what is known."""
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero or self.written_to is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        prompts = trainer.datamodule.prompts["train"].prompts  # type: ignore[attr-defined]
        columns = {name: values.tolist() for name, values in self.counts.items()}
        lines = []
        for place, prompt in enumerate(prompts):
            row = {name: values[place] for name, values in columns.items()}
            lines.append(
                {
                    "index": prompt.index,
                    "prompt": prompt.text,
                    **{name: row[name] for name in ("draws", "completions", "solved")},
                    "solve_rate": _rate(row["solved"], row["completions"]),
                    "last_solve_rate": _rate(row["last_solved"], row["last_completions"]),
                }
            )
        write_json_lines(lines, self.written_to)

    def state_dict(self) -> dict[str, Any]:
        """Counts and the queue, the same on all ranks."""
        turns = None if self._sampler is None else torch.from_numpy(self._sampler.turns.copy())
        return {"turns": turns, **{name: values.clone() for name, values in self.counts.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue; the number of prompts is checked by the DataModule."""
        if self._sampler is None:
            return  # validation and test draw no training prompts
        self._sampler.turns = state_dict["turns"].numpy().copy()
        self.counts = {name: state_dict[name].clone() for name in _COUNTS}


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
