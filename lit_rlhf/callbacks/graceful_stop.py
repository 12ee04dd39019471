"""SIGTERM and Ctrl-C end a run at the end of its iteration, with a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.errors import EngineLostError

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulStop(L.Callback):
    """On the first SIGTERM or Ctrl-C finish the iteration, write a checkpoint and end; on the second end at once.

    The signal may come at any time, in the first rollout too, and to any of several processes: they agree at the end of
    the iteration. Where no ModelCheckpoint has saved that iteration, ``interrupted.ckpt`` is written into the
    ``checkpoints`` folder of the run, as it is where the rollout engine is lost. Lightning by itself stops between two
    micro-batches, without a checkpoint.

    Acts in ``on_fit_start``, ``on_train_epoch_end``, ``on_train_end`` and ``on_exception``. Modules of this library
    bring one.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the signal that ended the run, on any rank."""
        self._previous: dict[int, Any] = {}
        self._launcher: Any = None
        self._agreed = False
        self._path: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the folder while all ranks are together: the log folder is broadcast."""
        if stage == "fit":
            self.received, self._agreed = None, False
            self._path = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints" / "interrupted.ckpt"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals over, right after Lightning has taken them: its handler would fight this one."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._launcher = trainer.strategy.launcher
        connector = trainer._signal_connector
        lightnings: Callable[[], None] = connector.register_signal_handlers

        def register() -> None:
            lightnings()
            self._take_over()

        connector.register_signal_handlers = register  # type: ignore[method-assign]

    def _take_over(self) -> None:
        for number in SIGNALS:
            before = signal.signal(number, self._on_signal)
            # Lightning gives SIGTERM back itself; to this callback it is Lightning's.
            self._previous.setdefault(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received = number
            _say(f"{name}: the run ends after this iteration, with a checkpoint; a second signal ends it at once")
            return
        _say(f"{name} again: the run ends at once; the last checkpoint is whole")
        self._give_back()
        if self._launcher is not None and hasattr(self._launcher, "kill"):
            self._launcher.kill(signal.SIGKILL)  # the other processes of this machine would wait for this one
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all ranks agree."""
        self._agreed = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
        if self._agreed:
            self.received = self.received or signal.SIGTERM
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what no ModelCheckpoint has saved, and say how to go on."""
        if not self._agreed:
            return
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        saved = _saved_by_others(trainer)
        if saved is None:
            assert self._path is not None
            saved = str(self._path)
            trainer.save_checkpoint(saved)
        _tell(f"stopped at step {trainer.global_step}; go on with --ckpt_path {saved}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._give_back()
        vars(trainer._signal_connector).pop("register_signal_handlers", None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same where fit did not come to its end; a run that lost its engine is saved: it can go on from here."""
        self._give_back()
        if isinstance(exception, EngineLostError) and trainer.state.fn == "fit":
            self._save(trainer)

    def _give_back(self) -> None:
        if signal.SIGINT in self._previous:
            signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
        self._previous = {}


def _saved_by_others(trainer: L.Trainer) -> str | None:
    """A whole checkpoint of this very step, if there is one."""
    for callback in trainer.checkpoint_callbacks:
        if (
            isinstance(callback, ModelCheckpoint)
            and not callback.save_weights_only
            and callback._last_global_step_saved == trainer.global_step
        ):
            return callback._last_checkpoint_saved or None
    return None


def _say(message: str) -> None:
    """Past Python's buffers: a signal may come while one of them is being written."""
    os.write(2, f"\nlit-rlhf: {message}\n".encode())


@rank_zero_only
def _tell(message: str) -> None:
    _log.warning(message)
