from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlhf import GRPOModule
from lit_rlhf.cli import main


@pytest.fixture
def train(make_trainer, make_data, policy_dir, tmp_path, rows) -> Callable[..., tuple[Path, L.LightningModule]]:
    """Trains a little in a folder of its own; gives the checkpoint and the module."""

    def run(kind: type = GRPOModule, policy: str = policy_dir, **options: Any) -> tuple[Path, Any]:
        folder = tmp_path / "run"
        keep = ModelCheckpoint(
            folder,
            "last",
            monitor="val/accuracy",
            mode="max",
            save_on_train_epoch_end=True,
            auto_insert_metric_name=False,
        )
        module = kind(policy, lr=1e-2, **options)
        trainer = make_trainer(max_epochs=2, callbacks=[keep], enable_checkpointing=True, default_root_dir=str(folder))
        trainer.fit(module, make_data(val=rows))
        trainer.save_checkpoint(folder / "end.ckpt")
        return folder / "end.ckpt", module

    return run


@pytest.fixture
def command(capsys) -> Callable[..., tuple[int, str]]:
    """Runs a command of ``lit-rlhf``; gives its exit code and what it wrote."""

    def run(*words: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def export(command) -> Callable[[Path, Path, Sequence[Any]], tuple[int, str]]:
    """Runs ``lit-rlhf export``."""

    def run(checkpoint: Path, out: Path, *options: Any) -> tuple[int, str]:
        return command("export", "--ckpt_path", checkpoint, "--out", out, *options)

    return run
