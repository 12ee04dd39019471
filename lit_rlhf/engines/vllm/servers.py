"""vLLM servers elsewhere: other GPUs, other machines. They may go and come back while a run goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from lit_rlhf.engines.base import Generation, PendingGeneration, SamplingParams, check_request
from lit_rlhf.engines.vllm.adapter import adapter_room
from lit_rlhf.engines.vllm.draw import Draw
from lit_rlhf.engines.vllm.files import WeightFiles
from lit_rlhf.engines.vllm.replica import Replica, ReplicaLostError
from lit_rlhf.engines.vllm.rows import Rows
from lit_rlhf.engines.vllm.weights import is_sharded, same_base, weights_version
from lit_rlhf.errors import ConfigurationError, EngineError, check_choice, check_number
from lit_rlhf.models.lora import is_adapted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_ADAPTER = "policy"
_LONGEST_PAUSE = 30.0
_MOST_STALE = 3


class _StaleError(ReplicaLostError):
    """A server has other weights than it was given."""


class VLLMServers:
    """Samples with vLLM servers, each started with ``python -m lit_rlhf.engines.vllm MODEL``.

    The rows of a rollout are dealt to the servers as they have room. What a row becomes depends on its key alone, so
    when a server is lost its rows are simply asked of another one, or of itself when it is back: nothing is lost, and
    the completions are the same. A server that comes back gets the policy's weights before it is asked for anything.

    Args:
        urls: Of the servers, such as ``http://host:8000``.
        weights_dir: Folder that trainer and servers both see, through which weights are handed over; a temporary one
            by default, which will do where they share a machine. In memory (``/dev/shm``) it is fastest.
        max_rows: Completions that a server is asked for at once.
        lora: How an adapter is handed over: ``merged`` into the weights; or as an ``adapter`` of its own, to servers
            started with ``--enable-lora``.
        on_lost: Once no server has answered for ``patience``: ``stop`` the run, with a checkpoint, or ``wait`` on.
        patience: Seconds.
        timeout: Longest time to wait for one answer, in seconds; a server that takes longer counts as lost.
    """

    def __init__(
        self,
        urls: str | list[str],
        weights_dir: str | None = None,
        max_rows: int = 256,
        lora: Literal["merged", "adapter"] = "merged",
        on_lost: Literal["stop", "wait"] = "stop",
        patience: float = 60.0,
        timeout: float = 600.0,
    ) -> None:
        check_number("VLLMServers: max_rows", max_rows, minimum=1)
        check_number("VLLMServers: patience", patience, minimum=0)
        check_number("VLLMServers: timeout", timeout, above=0)
        check_choice("VLLMServers: lora", lora, ("merged", "adapter"))
        check_choice("VLLMServers: on_lost", on_lost, ("stop", "wait"))
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        if not self.urls:
            raise ConfigurationError("VLLMServers: urls must name at least one server")
        if weights_dir is not None and not Path(weights_dir).is_dir():
            raise ConfigurationError(f"VLLMServers: weights_dir must be a folder that exists, got {weights_dir!r}")
        self.weights_dir = weights_dir
        self.max_rows = max_rows
        self.lora = lora
        self.on_lost = on_lost
        self.patience = patience
        self.timeout = timeout
        self._replicas = [Replica(url, timeout) for url in self.urls]
        self._files = WeightFiles(weights_dir)
        self._writing = threading.Lock()
        self._ahead: Draw | None = None

    @torch.no_grad()
    def generate(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Generation:
        """See :class:`lit_rlhf.engines.base.RolloutEngine`."""
        # Only :meth:`prepare` is called on all processes, without which shards cannot be read.
        version = self._files.version if is_sharded(policy) else self._version(policy)
        assert version is not None
        self._finish_other(version)
        return self._draw(policy, prompts, num_samples, sampling, keys, tokenizer, version).result()

    @torch.no_grad()
    def start(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> PendingGeneration:
        """Sample while the policy learns; see :class:`lit_rlhf.engines.base.AheadEngine`."""
        version = self._version(policy)
        self._finish_other(version)
        self._write_together(policy, version)  # now, and not once a server asks for them: they are about to change
        self._ahead = self._draw(policy, prompts, num_samples, sampling, keys, tokenizer, version)
        return self._ahead

    def _finish_other(self, version: str) -> None:
        """Servers have one version at a time: what is being sampled with another one has to be done first."""
        if self._ahead is not None and self._ahead.version != version:
            with contextlib.suppress(Exception):  # is raised where its result is asked for
                self._ahead.wait()
            self._ahead = None

    def _draw(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: SamplingParams,
        keys: np.ndarray,
        tokenizer: PreTrainedTokenizerBase | None,
        version: str,
    ) -> Draw:
        check_request(prompts, num_samples, keys)
        if sampling.stop and tokenizer is None:
            raise ConfigurationError("stop strings need the policy's tokenizer")
        rows = Rows([list(prompt) for prompt in prompts for _ in range(num_samples)], keys.tolist())
        keepers = [
            functools.partial(self._keep_busy, replica, rows, policy, version, sampling)
            for replica in (self._replicas if prompts else [])
        ]
        patience = self.patience if self.on_lost == "stop" else None
        return Draw(rows, version, sampling, next(policy.parameters()).device, keepers, patience)

    @torch.no_grad()
    def prepare(self, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Gather and write sharded weights; see :class:`lit_rlhf.engines.base.RolloutEngine`."""
        if is_sharded(policy):
            self._write_together(policy, self._version(policy))

    def _write_together(self, policy: nn.Module, version: str) -> None:
        """The first of all processes writes; where it cannot, all of them fail."""
        error: Exception | None = None
        with self._writing:
            try:
                self._files.write(policy, version, keep=not _distributed() or torch.distributed.get_rank() == 0)
            except Exception as raised:
                error = raised
        self._files.share(error)

    def _version(self, policy: nn.Module) -> str:
        separate = self.lora == "adapter" and is_adapted(policy)
        if separate:
            adapter_room(policy)
        return weights_version(policy, separate)

    def _keep_busy(
        self, replica: Replica, rows: Rows, policy: nn.Module, version: str, sampling: SamplingParams
    ) -> None:
        """Bring a server to the policy's weights and have it work, again and again, until all rows are done."""
        pause, stale = 0.5, 0
        try:
            while rows.left():
                try:
                    if not replica.healthy():
                        raise ReplicaLostError(f"no vLLM server answers at {replica}")
                    with replica.lock, rows.being_prepared():
                        if not rows.left():
                            return
                        self._prepare(replica, rows, policy, version)
                        rows.answered()
                    pause = 0.5
                    self._work(replica, rows, version, sampling)
                except ReplicaLostError as error:
                    # Started again between two rows; or another run gives it weights, which would not end.
                    stale += isinstance(error, _StaleError)
                    if stale > _MOST_STALE:
                        raise EngineError(f"{error}, again and again: does another run use it?") from error
                    rows.lost(str(error))
                    _log.warning("%s; asking again in %.1f s", error, pause)
                    rows.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except Exception as error:  # is raised where the rows are waited for
            rows.fail(error)

    def _work(self, replica: Replica, rows: Rows, version: str, sampling: SamplingParams) -> None:
        """Have rows completed, many at once, until none is left or the server is lost."""
        lost: list[ReplicaLostError] = []
        model = _ADAPTER if "+" in version else None

        def work() -> None:
            while (row := rows.take()) is not None:
                if lost:  # while this waited for something to do
                    rows.put_back(row)
                    return
                try:
                    answer = replica.complete(rows.prompts[row], sampling, rows.keys[row], model)
                    if answer.versions != {version}:
                        raise _StaleError(f"{replica} sampled with weights {', '.join(sorted(answer.versions))}")
                    rows.give(row, answer)
                except ReplicaLostError as error:
                    lost.append(error)
                    rows.put_back(row)
                except Exception as error:
                    rows.fail(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.max_rows, len(rows.keys)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if lost:
            raise lost[0]

    def _prepare(self, replica: Replica, rows: Rows, policy: nn.Module, version: str) -> None:
        """Make sure that a server samples as it should and has the policy's weights."""
        found = replica.version()
        if found == version:
            return
        replica.check()
        if self._left_to_rank_zero(replica, version):
            return
        with self._writing:
            if not rows.left():
                return  # given up: by now the policy may have other weights
            self._files.write(policy, version)
        if not same_base(found, version):
            replica.load(self._files.weights(version))
        if "+" in version:
            replica.load_adapter(_ADAPTER, self._files.adapter(version))
        replica.finish(version)

    def _left_to_rank_zero(self, replica: Replica, version: str) -> bool:
        """Whether the first of several trainers brings a server up to date, for which the others wait a while."""
        if not _distributed() or torch.distributed.get_rank() == 0:
            return False
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if replica.version() == version:
                return True
            time.sleep(0.2)
        return False  # it may have no rows in this draw, and hence no reason to look


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
