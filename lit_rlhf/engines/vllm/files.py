"""The files through which servers get the policy's weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from lit_rlhf.engines.vllm.adapter import adapter_weights, write_adapter
from lit_rlhf.engines.vllm.weights import base_weights, checkpoint_weights, same_base, write_checkpoint


class WeightFiles:
    """Holds the newest weights in a folder, for as long as it lives.

    Args:
        parent: Where the folder is made; where the system keeps temporary files by default.
    """

    def __init__(self, parent: str | None) -> None:
        self.parent = parent
        self.version: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
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
        before, self.version = self.version, None
        path, (base, _, adapter) = self._made() if keep else None, version.partition("+")
        if not same_base(before, version):
            if path is not None and path.exists():
                shutil.rmtree(path)
            write_checkpoint(base_weights(policy) if adapter else checkpoint_weights(policy), path and path / base)
        if adapter:
            weights = adapter_weights(policy)
            if path is not None:
                for older in path.glob("adapter-*"):
                    shutil.rmtree(older)
                write_adapter(policy, weights, path / f"adapter-{version}")
        self.version = version

    def share(self) -> None:
        """Tell all processes where the first of them has written."""
        path = [self._path]
        torch.distributed.broadcast_object_list(path, src=0)
        self._path = path[0]

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

    def _made(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lit_rlhf_weights_", dir=self.parent)
            self._path = Path(self._folder.name) / "weights"
        assert self._path is not None
        return self._path
