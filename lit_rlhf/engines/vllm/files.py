"""The files through which servers get the policy's weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_rlhf.engines.vllm.adapter import adapter_weights, write_adapter
from lit_rlhf.engines.vllm.weights import base_weights, checkpoint_weights, same_base, write_checkpoint
from lit_rlhf.errors import EngineError, reason_of


class WeightFiles:
    """Holds the newest weights in a folder, for as long as it lives.

    Args:
        parent: Where the folder is made; where the system keeps temporary files by default.
    """

    def __init__(self, parent: str | None) -> None:
        self.parent = parent
        self.version: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._written: str | None = None  # what is in the folder, which is not the one that another process shares
        self._path: Path | None = None

    @torch.no_grad()
    def write(self, policy: nn.Module, version: str, keep: bool = True) -> None:
        """Replace what has changed.

        Args:
            policy: Of sharded weights all processes have to ask.
            version: The label of its weights.
            keep: Write; otherwise only take part in gathering.
        """
        if version == self.version:
            return
        (base, _, adapter), same = version.partition("+"), same_base(self._written if keep else self.version, version)
        self.version, self._written = None, None if keep else self._written
        path, failed = self._emptied(same) if keep else (None, None)
        if not same:
            try:
                write_checkpoint(base_weights(policy) if adapter else checkpoint_weights(policy), path and path / base)
            except Exception as error:  # the other processes still gather what follows
                failed = error
        if adapter:
            weights = adapter_weights(policy)
            if path is not None and failed is None:
                write_adapter(policy, weights, path / f"adapter-{version}")
        if failed is not None:
            raise failed
        if path is not None:
            self._written, self._path = version, path
        self.version = version

    def share(self, error: Exception | None = None) -> None:
        """Tell all processes where the first of them has written, or why it has not.

        Args:
            error: Of this process.

        Raises:
            EngineError: On all of them.
        """
        found: list[Any] = [self._path, None if error is None else reason_of(error)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(found, src=0)
        self._path, reason = found
        if reason is not None or error is not None:
            self.version = None
            raise EngineError(f"the policy's weights could not be written for the servers: {reason}") from error

    def weights(self, version: str) -> str:
        """Folder of the weights, without a separate adapter.

        Args:
            version: That was written last.
        """
        assert self._path is not None
        return str(self._path / version.partition("+")[0])

    def adapter(self, version: str) -> str:
        """Folder of the adapter.

        Args:
            version: That was written last.
        """
        assert self._path is not None
        return str(self._path / f"adapter-{version}")

    def _emptied(self, same_base: bool) -> tuple[Path | None, Exception | None]:
        """The folder of this process's own, without what is to be replaced, or why there is none."""
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="lit_rlhf_weights_", dir=self.parent)
            path = Path(self._folder.name) / "weights"
            for older in path.glob("adapter-*") if same_base else [path] if path.exists() else []:
                shutil.rmtree(older)
        except OSError as error:
            return None, error
        return path, None
