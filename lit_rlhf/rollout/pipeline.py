"""The way of the data, once per iteration: prompts, completions, rewards, log-probs, advantages, optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lit_rlhf.callbacks.rollout import RolloutCallback
from lit_rlhf.errors import DivergedError, EngineLostError, RewardError
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.evidence import write_evidence
from lit_rlhf.rollout.generation import (
    TRAIN_STREAM,
    evaluation_mode,
    sample_completions,
    score_completions,
    unscored_rollout,
)
from lit_rlhf.rollout.loader import MicroBatches, share_over_ranks
from lit_rlhf.rollout.plan import ForwardCost, StepPlan, plan_steps

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.modules.base import PolicyModule
    from lit_rlhf.rollout.datamodule import RolloutDataModule


def make_rollout(data: RolloutDataModule, trainer: L.Trainer, iteration: int) -> RolloutBatch:
    """This rank's share of the iteration's rollout, with advantages.

    Args:
        data: Prompts, engine, sampling and rewards.
        trainer: Its module scores the rollout, its callbacks may change it.
        iteration: From 0; with the seed it decides prompts and random numbers.
    """
    module: PolicyModule = trainer.lightning_module  # type: ignore[assignment]
    assert data.sampler is not None
    drawn = data.sampler.draw(iteration)
    data.drawn_prompts, data.sampled_tokens = len(drawn), 0
    data.scorer.extra_means.clear()  # what validation left
    # Group numbers are those of the iteration, the same on any number of ranks.
    mine = range(trainer.global_rank, len(drawn), trainer.world_size)
    # The precision of the training forward; Lightning sets it for the steps only.
    with evaluation_mode(module), trainer.precision_plugin.forward_context():
        prompts = [data.prompts["train"][drawn[number]] for number in mine]
        rollout = _taken(data, trainer, iteration, prompts, list(mine)) if data.staleness else None
        if rollout is None:
            rollout = _sampled(data, trainer, iteration, prompts, list(mine), TRAIN_STREAM)
        if data.staleness:
            with data.timer("generation"), all_ranks_or_none(trainer, "sampling"):
                data.ahead.begin(data, trainer, iteration + 1)
        rollout = _scored(data, trainer, iteration, prompts, rollout)
        rollout = _call_hooks("on_rewards_end", trainer, rollout, last=True)
        with data.timer("reference"):
            parts = [part for step in _plan(data, module, rollout, passes=1) for part in step]
            rollout = module.score_rollout(rollout, parts, data.optimizer_steps_per_iteration == 1)
        rollout = _call_hooks("on_rollout_end", trainer, rollout)
        rollout = module.compute_advantages(rollout)
        return _call_hooks("on_advantages_end", trainer, rollout)


def draw_groups(
    data: RolloutDataModule,
    trainer: L.Trainer,
    iteration: int,
    places: Sequence[int],
    group_index: Sequence[int],
    stream: int,
) -> RolloutBatch:
    """Sample and score completions of prompts; ``on_rewards_end`` of all callbacks but those that run last is done.

    Every rank has to take part, if only with no prompt. Inside the rollout hooks the policy is in evaluation mode.

    Args:
        data: Prompts, engine, sampling and rewards.
        trainer: Its module samples, its callbacks may change the rewards.
        iteration: From 0.
        places: Of this rank's ``B`` prompts in the training data.
        group_index: ``B`` numbers below the iteration's number of prompts, unique over ranks.
        stream: Of random numbers; a further draw of an iteration needs one of its own.

    Returns:
        ``B * G`` rows, or what the callbacks leave of them.
    """
    prompts = [data.prompts["train"][place] for place in places]
    rollout = _sampled(data, trainer, iteration, prompts, group_index, stream)
    return _scored(data, trainer, iteration, prompts, rollout)


def _sampled(
    data: RolloutDataModule,
    trainer: L.Trainer,
    iteration: int,
    prompts: Sequence[Prompt],
    group_index: Sequence[int],
    stream: int,
) -> RolloutBatch:
    """Completions of prompts, with the weights of this moment."""
    module: PolicyModule = trainer.lightning_module  # type: ignore[assignment]
    assert data.seed is not None
    assert module.policy is not None
    with data.timer("generation"), all_ranks_or_none(trainer, "sampling"):
        rollout = sample_completions(
            module.policy,
            data.engine,
            module.tokenizer,
            prompts,
            group_index,
            data.group_size,
            data.sampling,
            data.seed,
            iteration,
            stream,
        )
    return rollout.replace(staleness=torch.zeros_like(rollout.group_index)) if data.staleness else rollout


def _taken(
    data: RolloutDataModule, trainer: L.Trainer, iteration: int, prompts: Sequence[Prompt], group_index: Sequence[int]
) -> RolloutBatch | None:
    """Completions that were begun while the iteration before was learned from, if they were."""
    module: PolicyModule = trainer.lightning_module  # type: ignore[assignment]
    with data.timer("generation"), all_ranks_or_none(trainer, "sampling"):
        generation = data.ahead.take(data, iteration, prompts, module.device)
    # All ranks have the same of a run; of a checkpoint that is not this run's perhaps not.
    if not trainer.strategy.reduce_boolean_decision(generation is not None, all=True):
        return None
    assert generation is not None
    rollout = unscored_rollout(generation, module.tokenizer, prompts, group_index, data.group_size, data.sampling)
    return rollout.replace(staleness=torch.full_like(rollout.group_index, data.staleness))


def _scored(
    data: RolloutDataModule, trainer: L.Trainer, iteration: int, prompts: Sequence[Prompt], rollout: RolloutBatch
) -> RolloutBatch:
    """With rewards; ``on_rewards_end`` of all callbacks but those that run last is done."""
    _check_finite(rollout, trainer, iteration)
    data.sampled_tokens += int(rollout.completion_lengths.sum())
    with data.timer("rewards"), all_ranks_or_none(trainer):
        rollout = score_completions(rollout, prompts, data.scorer)
    return _call_hooks("on_rewards_end", trainer, rollout, last=False)


def cut_into_steps(
    data: RolloutDataModule, trainer: L.Trainer, rollout: RolloutBatch, on_draw: Callable[[int], None]
) -> MicroBatches:
    """Optimizer steps and micro-batches of a rollout; denominators and dead steps are agreed on by all ranks.

    Args:
        data: Says how to cut.
        trainer: Sums over ranks.
        rollout: After the last hook.
        on_draw: Called as each micro-batch is drawn.
    """
    module: PolicyModule = trainer.lightning_module  # type: ignore[assignment]
    live = module.live_rows(rollout)
    denominators, live_rows = [], []
    for (rows,) in _whole_steps(data, rollout):
        denominators.append(module.loss_denominator(rollout.select(rows), data.sampling.max_new_tokens))
        live_rows.append(int(live[rows].sum()) if rows else 0)
    # Rows with nothing to teach count in the denominators, but changing nothing they need no forward pass.
    plan = _plan(data, module, rollout, data.passes, live.tolist())
    shared = share_over_ranks(
        plan,
        torch.tensor(denominators, dtype=torch.float64, device=module.device),
        torch.tensor(live_rows, dtype=torch.float64, device=module.device),
        trainer.strategy,
    )
    cost = ForwardCost(rollout, module.shares_prompts)
    return MicroBatches(rollout, plan, *shared, ratio_is_one=len(plan) == 1, on_draw=on_draw, cost=cost)


def _plan(
    data: RolloutDataModule,
    module: PolicyModule,
    rollout: RolloutBatch,
    passes: int,
    keep: list[bool] | None = None,
) -> list[StepPlan]:
    return plan_steps(
        rollout,
        **_assignment(data),
        passes=passes,
        micro_batch_size=data.micro_batch_size,
        micro_batch_tokens=data.token_limit,
        micro_batches=data.micro_batches,
        shared_prompts=module.shares_prompts,
        keep=keep,
    )


def _whole_steps(data: RolloutDataModule, rollout: RolloutBatch) -> list[StepPlan]:
    """The same optimizer steps with all of their rows in one part."""
    steps = plan_steps(rollout, **_assignment(data), passes=data.passes)
    return [step or [[]] for step in steps]


def _assignment(data: RolloutDataModule) -> dict[str, Any]:
    """What decides which step a row falls into."""
    seed = (data.seed or 0, data.iteration)
    return {"num_groups": data.drawn_prompts, "steps_per_pass": data.steps_per_pass, "seed": seed}


def _call_hooks(hook: str, trainer: L.Trainer, rollout: RolloutBatch, last: bool | None = None) -> RolloutBatch:
    """Of all callbacks, or only of those that do (or do not) run last."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, RolloutCallback)]  # type: ignore[attr-defined]
    for callback in sorted(callbacks, key=lambda c: (c.runs_last, not c.runs_first)):
        if last is not None and callback.runs_last != last:
            continue
        changed = getattr(callback, hook)(trainer, trainer.lightning_module, rollout)
        rollout = rollout if changed is None else changed
    return rollout


@contextlib.contextmanager
def all_ranks_or_none(trainer: L.Trainer, what: str = "a reward function") -> Iterator[None]:
    """An error on one rank ends the block on all of them, instead of leaving the others in their next collective.

    Args:
        trainer: Lets the ranks agree.
        what: Happens in the block, for the message of the ranks on which nothing went wrong.

    Raises:
        RewardError: On those ranks.
        EngineLostError: On all of them, where it was that on one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if trainer.strategy.reduce_boolean_decision(error is None, all=True):
        return
    if trainer.strategy.reduce_boolean_decision(isinstance(error, EngineLostError), all=False):
        # All ranks save their state now, which takes all of them.
        raise EngineLostError(str(error or "the engine was lost on another rank")) from error
    if error is not None:
        raise error
    raise RewardError(f"{what} failed on another rank; its message says which, and where")


def _check_finite(rollout: RolloutBatch, trainer: L.Trainer, iteration: int) -> None:
    """A policy with NaN weights would go on sampling the last token of the vocabulary for ever."""
    finite = bool(rollout.sampling_log_probs.isfinite().all())
    if not finite:
        write_evidence(rollout, trainer, f"iteration-{iteration:05}-rollout")
    if not trainer.strategy.reduce_boolean_decision(finite, all=True):
        raise DivergedError(
            f"iteration {iteration}: the policy's log-probs are not finite, its weights have diverged. "
            "Their completions are in diverged/ in the log folder; go back to the last checkpoint with a lower lr"
        )
