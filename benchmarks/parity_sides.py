"""One step of TRL's trainer and one of ours, on the same model, tokens, rewards and engine log-probs."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rlhf import GRPOModule, RolloutBatch, RolloutDataModule
from lit_rlhf.callbacks import RolloutCallback
from lit_rlhf.engines.base import Generation

TOKENIZER = Path(__file__).parents[1] / "checkpoints" / "arithmetic"
MODEL = tempfile.mkdtemp()
GROUP, WIDTH, TEMPERATURE = 4, 9, 0.9
EOS, FIRST_DIGIT, LAST_DIGIT = 1, 3, 12


def make_model() -> None:
    """A small random model: one that was trained would amplify the rounding of float32 tenfold."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.save_pretrained(MODEL)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(MODEL)


@dataclass
class Rollout:
    """What both sides are given.

    Args:
        rewards: ``N`` numbers.
        seed: Of tokens, lengths, engine log-probs and of how the weights move.
        moved: Size of the move from the rollout's weights to those of the step.
    """

    rewards: list[float] | None = None
    seed: int = 0
    moved: float = 0.1
    group: int = GROUP
    prompts: list[str] = field(default_factory=lambda: ["1+2=", "30+4=", "12+45=", "7+70="])

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        n = len(self.prompts) * self.group
        lengths = torch.randint(2, WIDTH + 1, (n,), generator=random).tolist()
        lengths[0], lengths[5] = WIDTH, WIDTH
        self.completions = [
            torch.randint(FIRST_DIGIT, LAST_DIGIT + 1, (length,), generator=random).tolist() for length in lengths
        ]
        for row, ids in enumerate(self.completions):
            if row not in (0, 5):  # these two are cut off
                ids[-1] = EOS
        if self.rewards is None:
            self.rewards = (torch.randint(-4, 9, (n,), generator=random) / 4).tolist()
            self.rewards[8 : 8 + self.group] = [1.0] * self.group
        self.engine_noise = [0.4 * torch.randn(length, generator=random) for length in lengths]

    def move(self, model: torch.nn.Module, number: int, size: float) -> None:
        """Move the weights, the same on both sides."""
        random = torch.Generator().manual_seed(100 + number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=random) * parameter.std().nan_to_num(0.0))

    @functools.cached_property
    def engine_log_probs(self) -> list[Tensor]:
        """Of an engine that is somewhat wrong, in the order of the rows; computed once, by the first to ask."""
        return [log_probs + noise for log_probs, noise in zip(self._true(), self.engine_noise, strict=True)]

    def _true(self) -> list[Tensor]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
        self.move(model, 0, 0.03)
        result = []
        for row, ids in enumerate(self.completions):
            prompt = tokenizer(self.prompts[row // self.group])["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            result.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0])
        return result


@dataclass
class Found:
    """Advantages by row, loss and gradient of one step."""

    advantages: Tensor
    loss: float
    gradient: Tensor


def quiet(run: Callable[..., Found]) -> Callable[..., Found]:
    """Without the banner of each run."""

    @functools.wraps(run)
    def silent(*arguments: Any, **options: Any) -> Found:
        with contextlib.redirect_stdout(io.StringIO()):
            return run(*arguments, **options)

    return silent


@quiet
def run_trl(rollout: Rollout, options: dict[str, Any], micro_batches: int = 1, engine: bool = False) -> Found:
    """One step of TRL's trainer: its own scoring, advantages, loss and normaliser."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = len(rollout.completions)
    size = rows // micro_batches
    log_probs = rollout.engine_log_probs

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": rollout.completions,
            "logprobs": [values.tolist() for values in log_probs],
        }

    def given(completions: list[str], **columns: Any) -> list[float]:
        return rollout.rewards

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "beta": 0.0,
            "num_iterations": 2,  # so that old log-probs are computed
            "gradient_accumulation_steps": micro_batches,
            "per_device_train_batch_size": size,
            "num_generations": rollout.group,
            "max_completion_length": WIDTH,
            "temperature": TEMPERATURE,
        }
        config = GRPOConfig(
            output_dir=folder,
            bf16=False,
            use_cpu=True,
            report_to="none",
            gradient_checkpointing=False,
            **{**settings, **options},
        )
        data = Dataset.from_list([{"prompt": prompt} for prompt in rollout.prompts])
        trainer = GRPOTrainer(MODEL, given, config, data, processing_class=tokenizer, rollout_func=replay)
        if engine:  # the correction is written for vLLM; the replay stands in for it
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        trainer.model.train()
        rollout.move(trainer.model, 0, 0.03)
        prompts = [{"prompt": prompt} for prompt in rollout.prompts for _ in range(rollout.group)]
        inputs = trainer._generate_and_score_completions(prompts)
        rollout.move(trainer.model, 1, rollout.moved)
        trainer.current_gradient_accumulation_steps = micro_batches
        loss = 0.0
        for start in range(0, rows, size):
            part = {
                name: value[start : start + size] if value.dim() else value
                for name, value in inputs.items()
                if isinstance(value, Tensor)
            }
            step = trainer._compute_loss(trainer.model, part)
            step.backward()
            loss += step.item()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        return Found(inputs["advantages"].detach(), loss, gradient)


class Replay:
    """A rollout engine that gives back what it was given."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def generate(self, policy: Any, prompts: Any, num_samples: int, *arguments: Any, **options: Any) -> Generation:
        """The same completions, whatever the policy."""
        rows = self.rollout.completions
        lengths = torch.tensor([len(ids) for ids in rows])
        pad = torch.nn.utils.rnn.pad_sequence
        return Generation(
            completion_ids=pad([torch.tensor(ids) for ids in rows], batch_first=True),
            lengths=lengths,
            log_probs=pad(self.rollout.engine_log_probs, batch_first=True),
            finished=torch.tensor([ids[-1] == EOS for ids in rows]),
        )


class Record(RolloutCallback):
    """Moves the weights when the other side does, and keeps the first step."""

    runs_last = True

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.loss = rollout, 0.0
        self.advantages = self.gradient = torch.zeros(0)

    def on_rewards_end(self, trainer: L.Trainer, module: Any, rollout: RolloutBatch) -> None:
        """Away from the reference."""
        self.rollout.move(module.policy, 0, 0.03)

    def on_advantages_end(self, trainer: L.Trainer, module: Any, rollout: RolloutBatch) -> None:
        """Away from the rollout."""
        self.advantages = rollout.advantages[:, 0].clone()
        self.rollout.move(module.policy, 1, self.rollout.moved)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The loss of the first step."""
        if batch.step == 0:
            self.loss = float(outputs["loss"])

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        """The gradient of the first step, before clipping."""
        if not len(self.gradient):
            zeros = (torch.zeros_like(p) if p.grad is None else p.grad for p in module.policy.parameters())
            self.gradient = torch.cat([gradient.flatten() for gradient in zeros])


@quiet
def run_ours(rollout: Rollout, options: dict[str, Any]) -> Found:
    """One step of a real ``Trainer.fit``."""

    def given(completions: list[str], **columns: Any) -> list[float]:
        return list(rollout.rewards)

    record = Record(rollout)
    data = RolloutDataModule(
        [{"prompt": prompt} for prompt in rollout.prompts],
        rewards=given,
        prompts_per_iteration=len(rollout.prompts),
        group_size=rollout.group,
        max_new_tokens=WIDTH,
        temperature=TEMPERATURE,
        engine=Replay(rollout),
        passes=2,  # so that the ratio is not 1 by construction
        shuffle=False,
        seed=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(GRPOModule(MODEL, numerics="trl", lr=1e-9, **options), data)
    return Found(record.advantages, record.loss, record.gradient)
