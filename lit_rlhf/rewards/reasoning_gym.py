"""The verifiers of the package reasoning-gym, run where they can do no harm."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lit_rlhf.data.reasoning_gym import make_task
from lit_rlhf.errors import ConfigurationError, RewardError
from lit_rlhf.rewards.extraction import without_thinking
from lit_rlhf.rewards.isolation import WorkerPool, WorkerStartError
from lit_rlhf.rewards.messages import completion_text
from lit_rlhf.rewards.parallel import map_in_threads

_LOG = logging.getLogger(__name__)
_MEMORY_BYTES = 4 << 30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What no verifier needs, and what an answer that one of them evaluates must not do.
_REFUSED = (
    "ctypes.",
    "os.",
    "pty.",
    "shutil.",
    "signal.pthread_kill",
    "socket.",
    "subprocess.",
    "urllib.",
)
_ALLOWED = {"os.listdir", "os.scandir", "os.walk"}
_TASKS_KEPT = 32

# Task, its options, the entry, and the answer, if there is one.
Call = tuple[str, Mapping[str, Any], Mapping[str, Any], "str | None"]


class ReasoningGymAnswer:
    """The score of a task's own verifier for the final answer, from 0 to 1.

    The answer is the content of the last ``<answer>...</answer>``, else all that follows the thinking; a think block
    that is never closed means that there is none. Several verifiers evaluate the answer as Python, so they run in a
    separate process that opens no file for writing, starts no process, has no network, and is killed when it exceeds
    its limits. A verifier that fails or takes too long on an answer gives it 0.

    The prompts must come from :class:`~lit_rlhf.data.ReasoningGym`.

    Args:
        timeout_seconds: Wall-clock limit for one answer, in seconds.

    Raises:
        ConfigurationError: ``timeout_seconds`` is not positive.
    """

    required_columns = ("task", "task_options", "question", "answer", "metadata")

    def __init__(self, timeout_seconds: float = 5.0) -> None:
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ConfigurationError(f"ReasoningGymAnswer: timeout_seconds must be positive, got {timeout_seconds!r}")
        self.timeout_seconds = float(timeout_seconds)

    def __call__(
        self,
        completions: Sequence[Any],
        task: Sequence[str],
        task_options: Sequence[Mapping[str, Any]],
        question: Sequence[str],
        answer: Sequence[Any],
        metadata: Sequence[Mapping[str, Any]],
        **_: Any,
    ) -> list[float | None]:
        """Score N completions.

        Args:
            completions: N texts, or N lists of chat messages.
            task: N names of tasks.
            task_options: N mappings of their options.
            question: N questions.
            answer: N answers that are right, perhaps among others.
            metadata: N mappings with what the verifiers need.

        Raises:
            RewardError: The verifying process cannot be started.
        """
        calls: list[Call] = [
            (*one, {"question": text, "answer": right, "metadata": about}, final_answer(completion_text(completion)))
            for *one, text, right, about, completion in zip(
                task, task_options, question, answer, metadata, completions, strict=True
            )
        ]
        workers = len(_pool().workers)
        return map_in_threads(lambda row: self._score(calls[row]), range(len(calls)), workers, "reasoning-gym answers")

    def answer_key(self, completion: Any, **_: Any) -> str | None:
        """What a majority vote counts: what the verifier is given of a completion."""
        return final_answer(completion_text(completion))

    def _score(self, call: Call) -> float:
        if call[-1] is None:
            return 0.0
        with _pool().worker() as worker:
            worker.start()
            try:
                score = float(worker.run(verify, *call, timeout_seconds=self.timeout_seconds))
            except WorkerStartError:
                raise
            except (RewardError, TypeError, ValueError) as error:
                _LOG.debug("An answer could not be verified: %s", error)
                return 0.0
        return score if math.isfinite(score) else 0.0


def final_answer(text: str) -> str | None:
    """What a verifier of reasoning-gym is given of a completion; ``None`` where a think block is never closed.

    Args:
        text: The completion.

    >>> final_answer("<think>8 * 3</think>It is <answer> 24 </answer>.")
    '24'
    """
    said = without_thinking(text)
    if said is None:
        return None
    end = said.rfind("</answer>")
    start = said.rfind("<answer>", 0, end) if end >= 0 else -1
    return (said[start + len("<answer>") : end] if start >= 0 else said).strip()


def verify(task: str, options: Mapping[str, Any], entry: Mapping[str, Any], answer: str) -> float:
    """Score of an answer under the verifier of its task; runs in the separate process.

    Args:
        task: Name of the task.
        options: Of the task.
        entry: Question, answer and metadata. Made anew it might be another one: not every task of the package gives
            the same entries in every process.
        answer: Of the model.
    """
    key = f"{task} {sorted(options.items())!r}"
    if key not in _tasks:
        if len(_tasks) >= _TASKS_KEPT:
            _tasks.clear()
        _tasks[key] = make_task(task, options)
    return float(_tasks[key].score_answer(answer, entry))


_tasks: dict[str, Any] = {}


@lru_cache(maxsize=1)
def _pool() -> WorkerPool:
    return WorkerPool(max(1, min(4, os.cpu_count() or 1)), _prepare, _MEMORY_BYTES)


def _prepare() -> None:
    """Import what is slow, then let the interpreter refuse what an evaluated answer could do to the machine."""
    import reasoning_gym  # noqa: F401

    sys.dont_write_bytecode = True
    sys.addaudithook(_guard)


def _guard(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        if isinstance(args[2], int) and args[2] & _WRITING:
            raise PermissionError(f"a verifier must not write {args[0]!r}")
    elif event.startswith(_REFUSED) and event not in _ALLOWED:
        raise PermissionError(f"a verifier must not use {event}")
