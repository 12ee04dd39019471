"""The rows of a rollout on several servers: what is still to do, what is in progress, what is done."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

from lit_rlhf.engines.vllm.requests import Answer
from lit_rlhf.errors import EngineLostError


class Rows:
    """The rows of a rollout, shared by all threads: to do, in progress, done.

    Args:
        prompts: Of each row.
        keys: Of each row.
    """

    def __init__(self, prompts: list[list[int]], keys: list[int]) -> None:
        self.prompts = prompts
        self.keys = keys
        self._todo = collections.deque(range(len(keys)))
        self._done: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        self._last_answer = time.monotonic()
        self._preparing = 0
        self._reason = ""

    def left(self) -> bool:
        """Whether there is anything left to do."""
        return not self._closed and len(self._done) < len(self.keys)

    def take(self) -> int | None:
        """A row to do; waits where all are in progress, as one of them may be put back."""
        with self._changed:
            while self.left():
                if self._todo:
                    return self._todo.popleft()
                self._changed.wait()
        return None

    def put_back(self, row: int) -> None:
        """Its server was lost; another one may take it.

        Args:
            row: Of :meth:`take`.
        """
        with self._changed:
            self._todo.appendleft(row)
            self._changed.notify_all()

    def give(self, row: int, answer: Answer) -> None:
        """It is done.

        Args:
            row: Of :meth:`take`.
            answer: Its completion.
        """
        with self._changed:
            self._done[row] = answer
            self._last_answer = time.monotonic()
            self._changed.notify_all()

    def answered(self) -> None:
        """A server is at work."""
        self._last_answer = time.monotonic()

    @contextlib.contextmanager
    def being_prepared(self) -> Iterator[None]:
        """A server is there, but not ready: its weights may be large."""
        with self._changed:
            self._preparing += 1
        try:
            yield
        finally:
            with self._changed:
                self._preparing -= 1

    def lost(self, reason: str) -> None:
        """A server does not work; others may.

        Args:
            reason: For the message if nothing else comes.
        """
        self._reason = reason

    def fail(self, error: Exception) -> None:
        """Something that waiting will not mend.

        Args:
            error: Is raised where the rows are waited for.
        """
        with self._changed:
            self._error = self._error or error
            self._closed = True
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Wait, unless everything is done or closed before.

        Args:
            seconds: At most.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.left(), seconds)

    def close(self) -> None:
        """Nobody wants the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, patience: float | None, final: bool = True) -> None:
        """Wait for all rows, or for the error that ends the rollout.

        Args:
            patience: Seconds without any server that works; ``None`` waits for ever.
            final: Once they are over nobody works on the rows any more.

        Raises:
            EngineLostError: They are over.
        """
        with self._changed:
            while self.left():
                self._changed.wait(1.0)
                silent = time.monotonic() - self._last_answer
                if self._reason and not self._preparing and patience is not None and silent > patience:
                    lost = EngineLostError(f"no vLLM server has answered for {silent:.0f} s: {self._reason}")
                    if not final:
                        raise lost
                    self.fail(lost)
        if self._error is not None:
            raise self._error

    def answers(self) -> list[Answer]:
        """Of all rows, in their order."""
        return [self._done[row] for row in range(len(self.keys))]
