"""The other side of a race: ``GRPOTrainer`` of TRL, by a real ``trainer.train()``."""

from __future__ import annotations

import functools
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
from gate import Gate
from workload import EOS, PAD, Work, model_folder, share_of_even


class ForcedLengths:
    """Logits processor that lets each row end exactly at its length; the rest of sampling is left alone.

    Args:
        lengths: ``N`` tokens; a row of ``limit`` tokens is cut off there without an end-of-sequence token.
        limit: Longest completion.
        prompt_width: Tokens before the completion, padding included.
    """

    def __init__(self, lengths: list[int], limit: int, prompt_width: int) -> None:
        self.last = torch.tensor([length - 1 if length < limit else limit for length in lengths])
        self.prompt_width = prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the end-of-sequence token from rows that go on, and everything else from rows that end."""
        due = self.last == input_ids.shape[1] - self.prompt_width
        scores[due] = -torch.inf
        scores[:, PAD] = -torch.inf  # PPOTrainer takes a padding id for the end of a completion
        scores[:, EOS] = torch.where(due, 0.0, -torch.inf)
        return scores


# Of any of TRL's trainers: until it is stopped, on a CPU, with nothing written or shown.
TO_ITSELF: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 0,
}


def common_settings(work: Work, micro_batch: int | None) -> dict[str, Any]:
    """Settings that all of TRL's trainers share, for the report.

    Everything that touches speed is set to what is fastest on a CPU; the numerics are those of the other sides.

    Args:
        work: What a step is.
        micro_batch: Completions per forward and backward; the fastest one found by default.
    """
    size = micro_batch or min(work.peer_micro_batch, work.rows)
    return {
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": work.rows // size,
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-6,
        "adam_beta2": 0.95,
    }


def force_lengths(generate: Any, work: Work, gate: Gate) -> Any:
    """``model.generate`` with forced lengths, timed, its tokens counted."""
    lengths = work.completion_lengths()

    @functools.wraps(generate)
    def forced(**inputs: Any) -> Any:
        from transformers import LogitsProcessorList

        prompt_width = inputs["input_ids"].shape[1]
        processor = ForcedLengths(lengths, work.new_tokens, prompt_width)
        with gate.phase("generation"):
            return generate(**inputs, logits_processor=LogitsProcessorList([processor]))

    return forced


def run(connection: Connection, work: Work, threads: int, micro_batch: int | None = None) -> None:
    """Train until no further step is wanted.

    Args:
        connection: To the race.
        work: What a step is.
        threads: Of torch.
        micro_batch: Completions per forward and backward; the fastest one found by default.
    """
    torch.set_num_threads(threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings = {
        **common_settings(work, micro_batch),
        "use_vllm": False,
        "num_generations": work.group,
        "max_completion_length": work.new_tokens,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "beta": work.kl_coef,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "max_grad_norm": 1.0,
    }
    folder = model_folder(work.shape)
    gate = Gate(connection, settings)
    output = tempfile.TemporaryDirectory()

    class Step(TrainerCallback):
        """One step ends where the next begins."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.open()

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=share_of_even,
        args=GRPOConfig(
            output_dir=output.name,
            max_steps=1_000_000,
            shuffle_dataset=False,
            **TO_ITSELF,
            **settings,
        ),
        train_dataset=Dataset.from_list(work.data()),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Step()],
    )
    _time_phases(trainer, work, gate)
    trainer.train()


def _time_phases(trainer: Any, work: Work, gate: Gate) -> None:
    trainer.model.generate = force_lengths(trainer.model.generate, work, gate)
    log_probs = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = gate.timed(
        lambda: "forward" if torch.is_grad_enabled() else "reference", log_probs
    )
    trainer.accelerator.backward = gate.timed("backward", trainer.accelerator.backward)
    rollout = trainer._generate_and_score_completions

    def counted(*args: Any, **kwargs: Any) -> Any:
        batch = rollout(*args, **kwargs)
        generated, prompts = int(batch["completion_mask"].sum()), int(batch["prompt_mask"].sum())
        gate.count(generated=generated, trained=generated + prompts)
        return batch

    trainer._generate_and_score_completions = counted
