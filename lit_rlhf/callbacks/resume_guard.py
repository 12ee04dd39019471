"""A run is resumed as itself: what it depends on stands in its checkpoints, and another value is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.callbacks.warmup_cosine import is_endless, run_length
from lit_rlhf.checkpointing import (
    FORMAT,
    STATE_KEY,
    AtomicCheckpointIO,
    check_folders,
    check_room,
    fingerprint,
    output_folders,
    read_summary,
)
from lit_rlhf.errors import CheckpointError, ConfigurationError

_log = logging.getLogger(__name__)

# Another placement of the penalty, or another algorithm, is another objective.
_NEVER = ("kl_placement", "module")


class ResumeGuard(L.Callback):
    """Compare a run with the checkpoint that it continues, before any weights are loaded; write whole checkpoints only.

    Acts in ``setup``: damaged and foreign checkpoints are refused, and so is a difference in what decides what is
    learned: base model, tokenizer, training prompts, rewards, sampling, seed, and the options of the module. Folders
    that cannot be written to are refused there too, a disk without room for one checkpoint in ``on_fit_start``.
    Modules of this library bring one.

    Args:
        allow: Names from the refusal that may differ, such as ``[training prompts]``. What differs is then said, and
            the run goes on as another one than it would have been.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        for name in allow:
            if name in _NEVER:
                raise ConfigurationError(
                    f"ResumeGuard: {name} cannot be allowed to change, it makes another objective; start a new run "
                    "from the exported policy"
                )
        self.allow = tuple(allow)
        self._state: dict[str, Any] = {}
        self._checked: str | None = None

    @property
    def state_key(self) -> str:
        """Under this name the checkpoint has it."""
        return STATE_KEY

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the folders, and the checkpoint where the Trainer knows it already."""
        self._state, self._checked = {}, None
        kind = type(pl_module).__name__
        if stage == "fit":
            check_folders(output_folders(trainer))
            data = trainer.datamodule  # type: ignore[attr-defined]
            self._state = {
                "format": FORMAT,
                "module": kind,
                "run": fingerprint(pl_module, data, str(trainer.precision)),
                "processes": trainer.world_size,
                "steps": None if is_endless(trainer) or not hasattr(data, "group_size") else run_length(trainer),
            }

        def check(path: str) -> None:
            self._check(path, kind)

        if isinstance(trainer.strategy.checkpoint_io, TorchCheckpointIO):  # a plugin of the user's stays
            trainer.strategy.checkpoint_io = AtomicCheckpointIO(check)
        connector = trainer._checkpoint_connector
        if connector._user_managed and connector._ckpt_path is not None:  # as the command line sets it
            check(str(connector._ckpt_path))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Now the size of a checkpoint is known: all weights, and the gradients' two moments of those in training."""
        if not trainer.checkpoint_callbacks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in pl_module.parameters()]
        trained = sum(size for size, needs_gradient in sizes if needs_gradient)
        check_room([folder for folder in output_folders(trainer) if folder.exists()], 3 * trained)

    def state_dict(self) -> dict[str, Any]:
        """What the run depends on."""
        return self._state

    def _check(self, path: str, kind: str) -> None:
        """Refuse a checkpoint that is damaged, foreign or another run's; once."""
        if "://" in path or path == self._checked:
            return
        saved = read_summary(path)
        if saved.get("module", kind) != kind:
            raise CheckpointError(
                f"{path}: the checkpoint is of a {saved['module']}, now the module is {kind}: name {saved['module']} "
                "in `class_path`, or start a new run from the exported policy"
            )
        if self._state:
            self._compare(path, saved)
        self._checked = path

    def _compare(self, path: str, saved: dict[str, Any]) -> None:
        if not saved["resumable"]:
            raise CheckpointError(f"{path}: holds weights alone (save_weights_only), fit cannot be continued from it")
        if "run" not in saved:
            _warn(f"{path}: written without ResumeGuard: whether this is the same run cannot be known")
            return
        now, before = self._state["run"], saved["run"]
        changed = {name: (before[name], now.get(name)) for name in before if before[name] != now.get(name)}
        refused = {name: pair for name, pair in changed.items() if name not in self.allow}
        if refused:
            raise CheckpointError(_refusal(path, refused))
        for name, (old, new) in changed.items():
            _warn(f"{name}: {old} -> {new}, as allowed: from here on this is another run than {path} was part of")
        if saved["processes"] != self._state["processes"]:
            _warn(
                f"processes: {saved['processes']} -> {self._state['processes']}. Prompts and random numbers are the "
                "same, sums are in another order: results agree up to rounding, not bit by bit"
            )
        if saved["steps"] != self._state["steps"]:
            _warn(
                f"length of the run: {saved['steps']} -> {self._state['steps']} optimizer steps; schedules over the "
                "whole run, such as the learning rate's, jump here"
            )


def _refusal(path: str, refused: dict[str, tuple[Any, Any]]) -> str:
    listed = ", ".join(f"{name}: {_shown(old)} -> {_shown(new)}" for name, (old, new) in refused.items())
    if "kl_placement" in refused:
        old, new = refused["kl_placement"]
        return (
            f"{path}: the checkpoint was trained with kl_placement={old!r}, now it is {new!r}: another objective. "
            "Resume with the same one, or start a new run from the exported policy"
        )
    return (
        f"{path}: the checkpoint is of another run ({listed}). Resume with the same values, start a new run from the "
        f"exported policy, or let them differ: ResumeGuard(allow={list(refused)})"
    )


def _shown(value: Any) -> Any:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@rank_zero_only
def _warn(message: str) -> None:
    _log.warning(message)
