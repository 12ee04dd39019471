"""One side of a race: lit_rlhf, by a real ``Trainer.fit`` of ``GRPOModule`` or ``PPOModule``."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from gate import Alone, Gate, clocks
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from workload import EOS, FIRST_WORD, MICRO_BATCH_TOKENS, Work, model_folder, share_of_even

import lit_rlhf.callbacks
from lit_rlhf import GRPOModule, PPOModule, RolloutDataModule
from lit_rlhf.engines.base import SamplingParams
from lit_rlhf.engines.transformers import TransformersEngine
from lit_rlhf.rewards import RewardModel


class ForcedLengths(TransformersEngine):
    """The engine as it is, but each row ends exactly at its length.

    Args:
        lengths: ``N`` tokens; a row of ``limit`` tokens is cut off there without an end-of-sequence token.
        limit: Longest completion.
    """

    def __init__(self, lengths: list[int], limit: int) -> None:
        super().__init__()
        self.last = torch.tensor([length - 1 if length < limit else limit for length in lengths])

    def sample(
        self, logits: Tensor, uniform: Tensor, sampling: SamplingParams, rows: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Draw as always; then put the end-of-sequence token where it is due, and another where it is not."""
        ids, log_probs = super().sample(logits, uniform, sampling, rows, step)
        due = self.last[rows] == step
        wrong = due != (ids == EOS)
        if wrong.any():
            ids = torch.where(due, EOS, torch.where(wrong, FIRST_WORD, ids))
            scores = logits[wrong].float()
            log_probs[wrong] = scores.gather(-1, ids[wrong, None])[:, 0] - scores.logsumexp(dim=-1)
        return ids, log_probs


class GatedData(RolloutDataModule):
    """A rollout DataModule that waits before each iteration for the word to start.

    Args:
        gate: Gives it.
        options: Of ``RolloutDataModule``.
    """

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self.gate = gate

    def train_dataloader(self) -> Any:
        """One iteration ends here, the next begins."""
        self.gate.open()
        return super().train_dataloader()


class Phases(L.Callback):
    """Splits an iteration's seconds into phases, and counts its tokens.

    Args:
        gate: Keeps them.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.mark = clocks()

    def _lap(self, phase: str | None) -> None:
        if phase is not None:
            self.gate.add(phase, self.mark)
        self.mark = clocks()

    def on_train_batch_start(self, *args: Any) -> None:
        """The forward pass begins."""
        self._lap(None)

    def on_before_backward(self, *args: Any) -> None:
        """The loss is there."""
        self._lap("forward")

    def on_after_backward(self, *args: Any) -> None:
        """The gradients are there."""
        self._lap("backward")

    def on_train_batch_end(self, *args: Any) -> None:
        """After the last micro-batch of a step: clipping and optimizer."""
        self._lap("optimizer")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the tokens."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        rollout = data.rollout
        generated, prompts = int(rollout.completion_lengths.sum()), int(rollout.prompt_lengths.sum())
        self.gate.count(generated=generated, trained=generated + prompts)


class TimedRewardModel(RewardModel):
    """A reward model whose seconds count as scoring.

    Args:
        gate: Keeps them.
        model: Folder of the classifier.
    """

    def __init__(self, gate: Gate, model: str) -> None:
        super().__init__(model)
        self.gate = gate

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Scores of the completions."""
        with self.gate.phase("reference"):
            return super().__call__(prompts, completions)


def run(
    connection: Connection | Alone,
    work: Work,
    threads: int,
    module: dict[str, Any] | None = None,
    callbacks: Sequence[str] = (),
    logger: bool = False,
    ranks: int = 1,
) -> None:
    """Train until no further step is wanted.

    Args:
        connection: To the race.
        work: What a step is.
        threads: Of torch.
        module: Other options of the module.
        callbacks: Names of callbacks to run with, each as it comes.
        logger: Log to TensorBoard.
        ranks: Processes that do this work side by side and learn together, this being one of them: DDP over gloo, with
            the variables of the environment that Lightning reads.
    """
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    module_options = {
        "policy": model_folder(work.shape),
        "lr": 1e-6,
        "kl_coef": work.kl_coef,
        **({"kl_placement": "loss", "std_ddof": 1} if work.algorithm == "grpo" else {"value_coef": 0.1}),
        **(module or {}),
    }
    data_options = {
        "prompts_per_iteration": work.prompts * ranks,
        "group_size": work.group,
        "max_new_tokens": work.new_tokens,
        "temperature": 1.0,
        "shuffle": False,
        "seed": 0,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
    }
    if module_options.get("lora_rank"):
        import peft  # noqa: F401  so that it counts as a library, not as memory of the step
    gate = Gate(connection, {**module_options, **data_options, "policy": work.model, "dtype": "float32"})
    engine = ForcedLengths(work.completion_lengths(), work.new_tokens)
    reward = TimedRewardModel(gate, model_folder(work.shape, "reward")) if work.reward_model else share_of_even
    # Ranks draw in turn: each gets a copy of every prompt.
    rows = [row for row in work.data() for _ in range(ranks)]
    rollouts = GatedData(gate, train=rows, rewards=[reward], engine=engine, **data_options)
    engine.generate = gate.timed("generation", engine.generate)
    learner = (GRPOModule if work.algorithm == "grpo" else PPOModule)(**module_options)
    learner.score_rollout = gate.timed("reference", learner.score_rollout)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy="auto" if ranks == 1 else DDPStrategy(process_group_backend="gloo"),
            max_epochs=1_000_000,
            logger=TensorBoardLogger(folder) if logger else False,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Phases(gate), *(getattr(lit_rlhf.callbacks, name)() for name in callbacks)],
        )
        trainer.fit(learner, rollouts)
