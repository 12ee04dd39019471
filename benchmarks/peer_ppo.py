"""The other side of a PPO race: ``PPOTrainer`` of TRL 1.12, the last that has it, by a real ``trainer.train()``."""

from __future__ import annotations

import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
from gate import Gate
from peer_grpo import TO_ITSELF, common_settings, force_lengths
from workload import PAD, Work, model_folder


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
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    settings = {
        **common_settings(work, micro_batch),
        "local_rollout_forward_batch_size": work.rows,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "response_length": work.new_tokens,
        "stop_token": "eos",
        "temperature": 1.0,
        "kl_coef": work.kl_coef,
        "vf_coef": 0.1,
        "cliprange": 0.2,
    }
    gate = Gate(connection, settings)
    output = tempfile.TemporaryDirectory()

    class Step(TrainerCallback):
        """One step ends where the next begins."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.open()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.open()

    folder, reward_folder = model_folder(work.shape), model_folder(work.shape, "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32) for _ in range(2)
    )
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=output.name,
            total_episodes=1_000_000 * work.rows,
            num_sample_generations=0,
            **TO_ITSELF,
            **settings,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in work.prompt_ids()]),
        callbacks=[Step()],
    )
    _time_phases(trainer, work, gate)
    trainer.train()


def _time_phases(trainer: Any, work: Work, gate: Gate) -> None:
    from trl.experimental.ppo import ppo_trainer

    prompts = sum(len(ids) for ids in work.prompt_ids())

    def phase() -> str:
        return "forward" if torch.is_grad_enabled() else "reference"

    trainer.policy_model.generate = force_lengths(trainer.policy_model.generate, work, gate)
    ppo_trainer.forward = gate.timed(phase, ppo_trainer.forward)
    ppo_trainer.get_reward = gate.timed(phase, ppo_trainer.get_reward)
    trainer.accelerator.backward = gate.timed("backward", trainer.accelerator.backward)
    truncate = ppo_trainer.truncate_response

    def counted(*args: Any) -> torch.Tensor:
        responses = truncate(*args)
        generated = int((responses != PAD).sum())
        gate.count(generated=generated, trained=generated + prompts)
        return responses

    ppo_trainer.truncate_response = counted
