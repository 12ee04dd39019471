"""Completions that servers are at work on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from lit_rlhf.engines.base import Generation, SamplingParams
from lit_rlhf.engines.vllm.requests import as_generation
from lit_rlhf.engines.vllm.rows import Rows


class Draw:
    """Rows that threads have servers complete, from now until all are done.

    Args:
        rows: To be completed.
        version: Label of the weights that sample.
        sampling: How.
        device: Of the result.
        keep_busy: What each thread does, until no row is left or the rows are closed.
        patience: Seconds without any server that works; ``None`` waits for ever.
    """

    def __init__(
        self,
        rows: Rows,
        version: str,
        sampling: SamplingParams,
        device: torch.device,
        keep_busy: Sequence[Callable[[], None]],
        patience: float | None,
    ) -> None:
        self.rows = rows
        self.version = version
        self.sampling = sampling
        self.device = device
        self.patience = patience
        self._keepers = [threading.Thread(target=target, daemon=True) for target in keep_busy]
        for keeper in self._keepers:
            keeper.start()

    def wait(self) -> None:
        """Until all rows are done and no thread is at work on them, or the error that ends them."""
        try:
            self.rows.wait(self.patience)
        finally:
            self.rows.close()
        for keeper in self._keepers:
            keeper.join()  # one that brings a server to these weights may not do so when there are newer ones

    def result(self, patience: float | None = None) -> Generation:
        """See :class:`lit_rlhf.engines.base.PendingGeneration`."""
        if patience is not None:
            self.rows.wait(patience, final=False)
        self.wait()
        return as_generation(self.rows.answers(), self.version, self.sampling, self.device)

    def cancel(self) -> None:
        """See :class:`lit_rlhf.engines.base.PendingGeneration`."""
        self.rows.close()
