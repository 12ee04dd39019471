"""A signal ends a run between two iterations, and the rest of it can be had later."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule
from lit_rlhf.callbacks import GracefulStop, RolloutCallback
from lit_rlhf.engines import TransformersEngine
from lit_rlhf.errors import EngineLostError


class SignalAt(RolloutCallback):
    """Sends this process a signal, at a place of an iteration."""

    def __init__(self, place: str, iteration: int, number: int) -> None:
        self.at, self.number = (place, iteration), number

    def _maybe(self, place: str, trainer: Any) -> None:
        if self.at == (place, trainer.datamodule.iteration):
            self.at = ("", -1)
            os.kill(os.getpid(), self.number)

    def on_advantages_end(self, trainer: Any, module: Any, rollout: Any) -> None:
        self._maybe("rollout", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._maybe("training", trainer)

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        self._maybe("validation", trainer)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("place", "iteration", "steps"), [("rollout", 0, 2), ("training", 2, 4), ("validation", 0, 2)])
def test_stopped_and_resumed(
    make_trainer, make_data, policy_dir, rows, weights, tmp_path, capfd, caplog, place, iteration, steps, number
):
    def run(path: Any = None, **options: Any) -> Any:
        torch.manual_seed(1)
        module = GRPOModule(policy_dir, lr=1e-3)
        trainer = make_trainer(max_epochs=4, **options)
        trainer.fit(module, make_data(val=rows[:2], steps_per_pass=2), ckpt_path=path)
        return trainer, module

    _, whole = run()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    trainer, _ = run(callbacks=[SignalAt(place, iteration, number)])
    assert trainer.global_step == steps
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "the run ends after this iteration, with a checkpoint" in capfd.readouterr().err
    path = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert f"stopped at step {steps}; go on with --ckpt_path {path}" in caplog.text
    resumed, module = run(path)
    assert resumed.global_step == 8
    assert torch.equal(weights(whole), weights(module))


def test_no_second_checkpoint_where_one_was_written(make_trainer, make_data, policy_dir, tmp_path, caplog):
    saving = ModelCheckpoint(tmp_path / "kept", "last", every_n_epochs=1, save_on_train_epoch_end=True)
    callbacks = [SignalAt("rollout", 1, signal.SIGTERM), saving]
    trainer = make_trainer(max_epochs=4, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(GRPOModule(policy_dir), make_data())
    assert trainer.global_step == 2
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert "go on with --ckpt_path" in caplog.text
    assert "kept/last.ckpt" in caplog.text


def test_without_a_signal_nothing_happens(make_trainer, make_data, policy_dir, tmp_path):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(GRPOModule(policy_dir), make_data())
    (callback,) = [c for c in trainer.callbacks if isinstance(c, GracefulStop)]
    assert callback.received is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_outside_of_the_main_thread_signals_are_left_alone(make_trainer, make_data, policy_dir):
    before, trainer = signal.getsignal(signal.SIGTERM), make_trainer()
    thread = threading.Thread(target=trainer.fit, args=(GRPOModule(policy_dir), make_data()))
    thread.start()
    thread.join()
    assert trainer.global_step == 1
    assert signal.getsignal(signal.SIGTERM) == before


class LostEngine(TransformersEngine):
    """Is gone from a call on."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise EngineLostError("nobody answers")
        return super().generate(*arguments, **options)


def test_a_run_that_lost_its_engine_is_saved_and_resumed(
    make_trainer, make_data, policy_dir, weights, tmp_path, caplog
):
    def run(calls: int, path: Any = None) -> Any:
        torch.manual_seed(1)
        module = GRPOModule(policy_dir, lr=1e-3)
        data = make_data(steps_per_pass=2, engine=LostEngine(calls))
        make_trainer(max_epochs=4).fit(module, data, ckpt_path=path)
        return module

    whole = run(100)
    with pytest.raises(EngineLostError, match="nobody answers"):
        run(3)
    path = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert f"stopped at step 6; go on with --ckpt_path {path}" in caplog.text
    assert torch.equal(weights(run(100, path)), weights(whole))


def test_an_engine_that_is_lost_outside_of_training_is_told_and_nothing_is_saved(
    make_trainer, make_data, policy_dir, rows, tmp_path
):
    with pytest.raises(EngineLostError, match="nobody answers"):
        make_trainer().validate(GRPOModule(policy_dir), make_data(val=rows[:2], engine=LostEngine(0)))
    assert not list(tmp_path.rglob("*.ckpt"))
