"""One DataModule for PPO and GRPO: it samples a fresh rollout each epoch and cuts it into optimizer steps."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from lit_rlhf.data.prompt_datamodule import HeldOutSource, PromptDataModule
from lit_rlhf.data.prompts import PromptDataset
from lit_rlhf.data.source import PromptSource
from lit_rlhf.engines import RolloutEngine, SamplingParams, make_engine
from lit_rlhf.models.loading import eos_token_ids, ignored_generation_options
from lit_rlhf.rewards.combine import RewardScorer
from lit_rlhf.rollout.ahead import Ahead
from lit_rlhf.rollout.batch import MicroBatch, RolloutBatch
from lit_rlhf.rollout.checks import check_lengths, check_options, check_trainer
from lit_rlhf.rollout.generation import PhaseTimer
from lit_rlhf.rollout.held_out import held_out_loader
from lit_rlhf.rollout.identity import data_fingerprint
from lit_rlhf.rollout.loader import micro_batch_loader
from lit_rlhf.rollout.pipeline import cut_into_steps, make_rollout
from lit_rlhf.rollout.ratings import Ratings
from lit_rlhf.rollout.sampler import PromptSampler
from lit_rlhf.rollout.sources import load_part, load_val_ratings

_log = logging.getLogger(__name__)

DEFAULT_MICRO_BATCH_TOKENS = 16_384

# Options of the Trainer that fit overwrites, and gives back.
_SET_DURING_FIT = (
    "accumulate_grad_batches",
    "limit_val_batches",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
)

if TYPE_CHECKING:
    from lit_rlhf.modules.base import PolicyModule


class RolloutDataModule(PromptDataModule):
    """What to learn from: prompts, sampling, rewards, and how a rollout is cut into optimizer steps.

    One Lightning epoch is one **iteration**: a rollout of ``prompts_per_iteration * group_size`` completions, sampled
    in ``train_dataloader`` with the weights of that moment, then ``passes * steps_per_pass`` optimizer steps on it.

    Args:
        train: Prompts to train on: a jsonl, json, csv, parquet or arrow file, a folder of them or of a Hugging Face
            dataset, a :class:`~lit_rlhf.data.PromptSource`, or an iterable of dictionaries. Columns other than the
            prompt reach the reward functions by name.
        val: Held-out prompts for ``validate`` and during ``fit``; several data sets as a mapping of names to sources.
        test: Held-out prompts for ``test`` and ``predict``, the same way; ``val`` by default.
        rewards: Reward functions ``f(prompts, completions, completion_ids, **columns) -> list``.
        reward_weights: One weight per reward function; 1 each by default.
        on_reward_error: ``raise`` stops the run when a reward function raises; ``abstain`` leaves the row out.
        reward_timeout: Longest time that a call of one reward function may take, in seconds; no limit by default.
        prompts_per_iteration: Prompts of each rollout, over all ranks.
        group_size: Completions sampled for each prompt.
        max_new_tokens: Longest completion in tokens.
        temperature: Sampling temperature.
        top_p: Nucleus sampling; 1 is off.
        top_k: Sample from the k likeliest tokens; 0 is off.
        min_p: Leave out tokens below this share of the likeliest one's probability; 0 is off.
        stop: Strings that end a completion.
        passes: Times that each completion is learned from (inner epochs).
        steps_per_pass: Optimizer steps that share one pass over the rollout.
        micro_batch_tokens: Tokens per forward and backward at most; 16,384 by default. Memory grows with it, speed
            hardly once a few thousand tokens run together, and the gradient does not depend on it.
        micro_batch_size: Completions per forward and backward, instead of ``micro_batch_tokens``.
        engine: Samples the completions, an engine or its name; the policy itself by default.
        staleness: 1 samples the next iteration's completions while the policy learns from this one's: with weights of
            one iteration ago, on servers of their own (``docs/vllm.md``). 0 samples with those of the moment.
        shuffle: Draw the training prompts in a new random order in each pass over them.
        seed: Of prompts and sampling; that of ``seed_everything`` by default, else 0.
        val_samples: Sampled completions per held-out prompt, besides the greedy one.
        pass_k: The k of each ``pass@k``, at most ``val_samples``.
        val_temperature: Sampling temperature on held-out prompts; that of training by default.
        val_batch_size: Held-out prompts per batch; as many as keep the decoding batch full by default.
        verifier: Reward function that decides whether a held-out completion is right; the first of ``rewards`` by
            default.
        verifier_threshold: A completion counts as right from this score on.
        val_confidence: Confidence of the intervals of held-out metrics (bootstrap over prompts); ``None`` for none.
        val_ratings: People's ratings of completions of ``val``: rows with ``rating``, ``completion``, and ``prompt`` or
            ``prompt_index``.
        options: Of :class:`~lit_rlhf.data.PromptDataModule`: how rows become prompts.
    """

    def __init__(
        self,
        train: str | Path | PromptSource | Sequence[Any] | None = None,
        val: HeldOutSource = None,
        test: HeldOutSource = None,
        rewards: list[Callable[..., Any]] | Callable[..., Any] | None = None,
        reward_weights: list[float] | None = None,
        on_reward_error: Literal["raise", "abstain"] = "raise",
        reward_timeout: float | None = None,
        prompts_per_iteration: int = 64,
        group_size: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | list[str] | None = None,
        passes: int = 1,
        steps_per_pass: int = 1,
        micro_batch_tokens: int | None = None,
        micro_batch_size: int | None = None,
        engine: RolloutEngine | Literal["transformers", "vllm"] | None = None,
        staleness: Literal[0, 1] = 0,
        shuffle: bool = True,
        seed: int | None = None,
        val_samples: int = 8,
        pass_k: list[int] | None = None,
        val_temperature: float | None = None,
        val_batch_size: int | None = None,
        verifier: Callable[..., Any] | None = None,
        verifier_threshold: float = 1.0,
        val_confidence: float | None = 0.95,
        val_ratings: str | Path | Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(train, val, test, **options)
        functions = [] if rewards is None else [rewards] if callable(rewards) else list(rewards)
        self.scorer = RewardScorer(functions, reward_weights, on_reward_error, reward_timeout)
        self.verifier = RewardScorer([verifier], None, on_reward_error, reward_timeout) if verifier else None
        self.verifier_threshold = verifier_threshold
        self.prompts_per_iteration = prompts_per_iteration
        self.group_size = group_size
        self.sampling = SamplingParams(
            max_new_tokens, temperature, top_k, top_p, min_p, (stop,) if isinstance(stop, str) else tuple(stop or ())
        )
        self.passes = passes
        self.steps_per_pass = steps_per_pass
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.engine: RolloutEngine = make_engine(engine)
        self.staleness = staleness
        self.shuffle = shuffle
        self.seed = seed
        self.val_samples = val_samples
        self.pass_k = pass_k if pass_k is not None else [val_samples] if val_samples > 0 else []
        self.val_temperature = temperature if val_temperature is None else val_temperature
        self.val_batch_size = val_batch_size
        self.val_confidence = val_confidence
        self.val_ratings = val_ratings
        check_options(self)

        self.prompts: dict[str, PromptDataset] = {}  # by data set: train, val, test, val/<name>, test/<name>
        self.ratings: Ratings | None = None
        self._prompts_of: str | None = None
        self.sampler: PromptSampler | None = None
        self.iteration = 0
        self.rollout: RolloutBatch | None = None
        self.ahead = Ahead()
        self.timer = PhaseTimer()
        self.sampled_tokens = 0
        self.drawn_prompts = 0
        self._loader: DataLoader | None = None
        self._loader_step = -1
        self._drawn = 0
        self._to_draw = 0
        self.micro_batches: int | None = None
        self._trainer_options: dict[str, Any] = {}

    @property
    def token_limit(self) -> int | None:
        """Tokens per forward and backward; ``None`` where micro-batches are cut by rows or by number."""
        if self.micro_batch_size is not None or self.micro_batches is not None:
            return None
        return self.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS

    @property
    def optimizer_steps_per_iteration(self) -> int:
        """Optimizer steps on each rollout."""
        return self.passes * self.steps_per_pass

    @property
    def mid_iteration(self) -> bool:
        """Whether some but not all micro-batches of the rollout have been drawn."""
        return 0 < self._drawn < self._to_draw

    # Set-up: read prompts and check everything that can be checked before a model is loaded

    def setup(self, stage: str) -> None:
        """Read, tokenize and check the prompts this stage needs."""
        assert self.trainer is not None
        module: PolicyModule = self.trainer.lightning_module  # type: ignore[assignment]
        if self.seed is None:
            self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        if (check_installed := getattr(self.engine, "check_installed", None)) is not None:
            check_installed()
        if stage == "fit":
            self._trainer_options = {name: getattr(self.trainer, name) for name in _SET_DURING_FIT}
            # Of a run of its own: nothing of an earlier fit with this DataModule is left.
            self.iteration, self.rollout, self._loader = self.trainer.current_epoch, None, None
            self._drawn = self._to_draw = 0
            self.ahead.drop()
            self.micro_batches = check_trainer(self, self.trainer)
            if self.sampling.restricted:
                _log.warning(
                    "top_k, top_p or min_p restrict sampling, but log-probs are of the unrestricted distribution: "
                    "the samples are not quite the policy's own"
                )
            if ignored := ignored_generation_options(module.model_name):
                _log.warning(
                    "generation_config of the model: %s is not followed, sampling is this DataModule's", ignored
                )
            if self.sources["val"] is None:
                self.trainer.limit_val_batches = 0
        if self._prompts_of != module.model_name:
            self.prompts, self._prompts_of = {}, module.model_name  # ids of another tokenizer
        needed = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}[stage]
        parts = [part for split in needed for part in self.parts(split)]
        for part in parts:
            if part not in self.prompts:
                self.prompts[part] = load_part(self, part, module)
        if not parts:
            check_lengths(None, needed[0], 0, None)
        self.ratings = load_val_ratings(self, needed[-1])
        if stage == "fit":
            size = len(self.prompts["train"])
            self.sampler = PromptSampler(size, self.prompts_per_iteration, self.seed, self.shuffle)
        self.sampling = SamplingParams(
            **{
                **vars(self.sampling),
                "eos_token_ids": eos_token_ids(module.model_name, module.model_config, module.tokenizer),
                "pad_token_id": module.tokenizer.pad_token_id or 0,
            }
        )

    def teardown(self, stage: str) -> None:
        """Give the Trainer back as it came, so that it can be used again."""
        self.ahead.drop()
        for name, value in self._trainer_options.items():
            setattr(self.trainer, name, value)
        self._trainer_options = {}

    def on_exception(self, exception: BaseException) -> None:
        """The same where fit did not come to its end."""
        self.teardown("fit")

    # Training: one rollout per epoch

    def train_dataloader(self) -> DataLoader:
        """Make the iteration's rollout and return its micro-batches.

        Lightning asks twice when it resumes: the rollout is kept for as long as no optimizer step was taken and
        nothing was drawn from it.
        """
        assert self.trainer is not None
        if self._loader is None or self._loader_step != self.trainer.global_step:
            self.rollout = None  # the previous one is released before the next is made
            self.timer = PhaseTimer()
            self.rollout = make_rollout(self, self.trainer, self.iteration)
            data = cut_into_steps(self, self.trainer, self.rollout, self._on_draw)
            self.trainer.accumulate_grad_batches = data.micro_batches
            self._drawn, self._to_draw = 0, len(data)
            self._loader = micro_batch_loader(data)
            self._loader_step = self.trainer.global_step
        return self._loader

    def _on_draw(self, number: int) -> None:
        if number == 0:
            # The iteration counts from here, not from the rollout: a rollout may be made in vain on resume.
            self.iteration += 1
            self.ahead.begin_learning()
            self._loader = None
        self._drawn += 1

    # Held-out prompts

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches of held-out prompts; empty where there are none."""
        return self._held_out_loader("val")

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches of test prompts."""
        return self._held_out_loader("test")

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches of test prompts."""
        return self._held_out_loader("test")

    def _held_out_loader(self, split: str) -> DataLoader | list[DataLoader]:
        assert self.trainer is not None
        return held_out_loader(self, split, self.trainer.global_rank, self.trainer.world_size)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Micro-batches go to the device; prompts stay where they are, the engine moves their ids."""
        return batch.to(device) if isinstance(batch, MicroBatch) else batch

    # State: everything else follows from the iteration's number

    def state_dict(self) -> dict[str, Any]:
        """The number of iterations drawn, and completions that were sampled ahead."""
        ahead = self.ahead.state_dict(self.iteration)
        return {"iteration": self.iteration, **({"ahead": ahead} if ahead else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the next iteration."""
        self.iteration = int(state_dict["iteration"])
        self.ahead.load_state_dict(state_dict.get("ahead", {}))

    def fingerprint(self) -> dict[str, Any]:
        """What :class:`~lit_rlhf.callbacks.ResumeGuard` compares."""
        return data_fingerprint(self)


warnings.filterwarnings("ignore", message=".*does not have many workers.*", module="lightning")
warnings.filterwarnings("ignore", message="Couldn't infer the batch indices.*", module="lightning")
