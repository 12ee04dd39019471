"""The next iteration's completions, sampled on other devices while the policy learns from this one's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch.nn.utils.rnn import pad_sequence

from lit_rlhf.engines.base import AheadEngine, Generation, PendingGeneration
from lit_rlhf.engines.randomness import row_keys
from lit_rlhf.rollout.generation import TRAIN_STREAM, no_completions

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import Prompt
    from lit_rlhf.rollout.datamodule import RolloutDataModule

_log = logging.getLogger(__name__)

# Seconds without any server that works after which a checkpoint is written without these completions.
_SAVE_PATIENCE = 30.0


class Ahead:
    """One iteration's completions, begun with the weights from before the iteration that precedes it.

    They are part of a checkpoint: the weights that sampled them are gone by then. On resume they may be dealt to
    another number of ranks.
    """

    def __init__(self) -> None:
        self.iteration: int | None = None
        """Whose completions are being sampled or wait to be taken."""
        self._pending: PendingGeneration | None = None
        self._saved: list[dict[str, Any]] | None = None
        self._prompts: list[Prompt] = []
        self._taken: tuple[int, Generation, list[int]] | None = None

    def begin(self, data: RolloutDataModule, trainer: L.Trainer, iteration: int) -> None:
        """Have the engine begin, unless the run ends before.

        Args:
            data: Prompts, engine and sampling.
            trainer: Its module samples; all ranks have to ask.
            iteration: The next one.
        """
        self._forget_begun()
        if _is_over(data, trainer, iteration):
            return
        module: Any = trainer.lightning_module
        assert isinstance(data.engine, AheadEngine)
        assert data.sampler is not None
        assert data.seed is not None
        drawn = data.sampler.draw(iteration)[trainer.global_rank :: trainer.world_size]
        self._prompts = [data.prompts["train"][place] for place in drawn]
        keys = row_keys(data.seed, TRAIN_STREAM, iteration, [p.index for p in self._prompts], data.group_size)
        ids = [prompt.ids for prompt in self._prompts]
        self._pending = data.engine.start(module.policy, ids, data.group_size, data.sampling, keys, module.tokenizer)
        self.iteration = iteration

    def take(
        self, data: RolloutDataModule, iteration: int, prompts: Sequence[Prompt], device: torch.device
    ) -> Generation | None:
        """Wait for an iteration's completions; ``None`` where none were begun, and they have to be sampled now.

        Args:
            data: Says how many completions of each prompt there are.
            iteration: The one that is learned from now.
            prompts: Of this rank.
            device: Of the result.

        Raises:
            EngineLostError: The engine is gone for good.
        """
        if self.iteration != iteration:
            self.drop()
            return None
        (pending, self._pending), (saved, self._saved) = (self._pending, None), (self._saved, None)
        self.iteration, places = None, [prompt.index for prompt in prompts]
        generation: Generation | None
        if saved is not None:
            generation = _as_generation(saved, places, data, device)
        else:
            assert pending is not None
            generation = pending.result() if prompts else no_completions(device)
        self._taken = None if generation is None else (iteration, generation, places)
        return generation

    def begin_learning(self) -> None:
        """What was taken is being learned from: nobody will ask for it again."""
        self._taken = None

    def wait(self, trainer: L.Trainer) -> None:
        """Until all ranks have what they asked for: only then may the engine be given other weights.

        Args:
            trainer: Lets the ranks meet.
        """
        if self._pending is not None:
            self._result(None)
            trainer.strategy.barrier("completions sampled ahead")

    def drop(self) -> None:
        """Forget everything."""
        self._forget_begun()
        self._taken = None

    def _forget_begun(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self.iteration, self._pending, self._saved = None, None, None

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The completions of all ranks, once they are done; empty where there are none. All ranks have to ask.

        Args:
            iteration: The one that is learned from next. Where its completions were taken already, those of the one
                after it will be begun again, with the same weights.
        """
        if self._taken is not None and self._taken[0] == iteration:
            return {"iteration": iteration, "groups": _of_all_ranks(_as_groups(*self._taken[1:]))}
        if self.iteration != iteration:
            return {}
        if self._saved is not None:
            return {"iteration": iteration, "groups": self._saved}
        generation = self._result(_SAVE_PATIENCE)
        own = None if generation is None else _as_groups(generation, [prompt.index for prompt in self._prompts])
        return {"iteration": iteration, "groups": _of_all_ranks(own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have them taken by the iteration that they were sampled for.

        Args:
            state_dict: Of :meth:`state_dict`.
        """
        self.drop()
        if state_dict.get("groups"):
            self.iteration, self._saved = state_dict["iteration"], state_dict["groups"]

    def _result(self, patience: float | None) -> Generation | None:
        """``None`` where they are lost, for now or for good, which is said again where they are taken."""
        assert self._pending is not None
        try:
            return self._pending.result(patience)
        except Exception as error:
            _log.warning("no completions of iteration %s: %s", self.iteration, error)
            return None


def _of_all_ranks(own: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The groups of all ranks; ``None`` where one of them has lost its own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return own
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, own)
    return None if None in of_all else [group for groups in of_all for group in groups]


def _is_over(data: RolloutDataModule, trainer: L.Trainer, iteration: int) -> bool:
    """Whether the run is known to end before an iteration."""
    if trainer.max_epochs not in (None, -1) and iteration >= trainer.max_epochs:
        return True
    # This iteration's steps are still to come.
    return 0 <= trainer.max_steps <= trainer.global_step + data.optimizer_steps_per_iteration


def _as_groups(generation: Generation, prompts: Sequence[int]) -> list[dict[str, Any]]:
    """Rows without padding, in dictionaries that a checkpoint can hold.

    Args:
        generation: The rows of each prompt together.
        prompts: Their places in the data source.
    """
    lengths, finished = generation.lengths.tolist(), generation.finished.cpu()
    ids, log_probs = generation.completion_ids.cpu(), generation.log_probs.cpu()
    size = len(lengths) // max(1, len(prompts))
    groups = []
    for number, prompt in enumerate(prompts):
        rows = range(number * size, (number + 1) * size)
        groups.append(
            {
                "prompt_index": prompt,
                "ids": [ids[row, : lengths[row]].clone() for row in rows],
                "log_probs": [log_probs[row, : lengths[row]].clone() for row in rows],
                "finished": finished[rows.start : rows.stop].clone(),
            }
        )
    return groups


def _as_generation(
    groups: Sequence[dict[str, Any]], prompts: Sequence[int], data: RolloutDataModule, device: torch.device
) -> Generation | None:
    """The rows of this rank's prompts; ``None`` where they are of other prompts.

    Args:
        groups: Of all ranks.
        prompts: Places of this rank's in the data source.
        data: Says how many completions of each prompt there are.
        device: Of the result.
    """
    by_prompt = {group["prompt_index"]: group for group in groups if len(group["ids"]) == data.group_size}
    if not all(prompt in by_prompt for prompt in prompts):
        _log.warning("the checkpoint's completions are of other prompts: this iteration is sampled anew")
        return None
    own = [by_prompt[prompt] for prompt in prompts]
    if not own:
        return no_completions(device)
    ids, log_probs = ([row for group in own for row in group[name]] for name in ("ids", "log_probs"))
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.long)
    completion_ids = pad_sequence(ids, batch_first=True, padding_value=data.sampling.pad_token_id)
    sampling_log_probs = pad_sequence(log_probs, batch_first=True)
    finished = torch.cat([group["finished"] for group in own])
    return Generation(*(values.to(device) for values in (completion_ids, lengths, sampling_log_probs, finished)))
