"""Write the trained policy as a Hugging Face folder at the end of fit."""

from __future__ import annotations

from pathlib import Path

import lightning as L


class ExportPolicy(L.Callback):
    """Save the policy and its tokenizer in ``on_train_end``, loadable by plain ``transformers``.

    Args:
        directory: Where to; ``policy`` in the run's log folder by default.
    """

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory
        self.exported_to: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the folder while all ranks are together: the log folder is broadcast."""
        if stage == "fit":
            self.exported_to = Path(self.directory or Path(trainer.log_dir or trainer.default_root_dir) / "policy")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save; the first rank writes, the others lend it their shards."""
        if self.exported_to is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            pl_module.save_pretrained(self.exported_to)  # type: ignore[operator]
