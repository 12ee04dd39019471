"""Tasks made by the package reasoning-gym, an optional extra."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from lit_rlhf.data.source import PromptSource
from lit_rlhf.errors import ConfigurationError, DataError


class ReasoningGym(PromptSource):
    """Prompts of one task of `reasoning-gym <https://github.com/open-thought/reasoning-gym>`_, with its answers.

    The package's own verifier is the reward: :class:`~lit_rlhf.rewards.ReasoningGymAnswer`. Rows have the columns
    ``prompt`` and, for the verifier, ``question`` (the same), ``answer`` (one right answer; there may be others, or
    ``None``), ``metadata``, ``task`` and ``task_options``.

    Args:
        task: Name in the package, such as ``countdown`` or ``simple_equations``.
        size: Number of prompts.
        seed: Of the prompts. Give held-out prompts another one.
        options: Of the task, such as ``{min_numbers: 3}``.

    Raises:
        ConfigurationError: The package is missing, or does not know the task or an option.
    """

    def __init__(self, task: str, size: int = 1000, seed: int = 0, options: dict[str, Any] | None = None) -> None:
        if size < 1:
            raise ConfigurationError(f"ReasoningGym: size must be at least 1, got {size}")
        self.task = task
        self.options = {**(options or {}), "size": size, "seed": seed}
        self._dataset = make_task(task, self.options)

    @property
    def name(self) -> str:
        """Stands for the source in messages."""
        return f"ReasoningGym({self.task}, seed {self.options['seed']})"

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The rows.

        Raises:
            DataError: The task cannot make one of them; some check their options only here.
        """
        for index in range(self.options["size"]):
            try:
                entry = self._dataset[index]
            except Exception as error:
                raise DataError(
                    f"{self.name}, row {index + 1}: reasoning-gym cannot make it with the options {self.options} "
                    f"({type(error).__name__}: {error})"
                ) from error
            yield {
                "prompt": entry["question"],
                "question": entry["question"],
                "answer": entry["answer"],
                "metadata": entry["metadata"],
                "task": self.task,
                "task_options": self.options,
            }


def make_task(task: str, options: Mapping[str, Any]) -> Any:
    """A data set of reasoning-gym, which makes its entries as they are asked for.

    Args:
        task: Name in the package.
        options: Of the task, with ``size`` and ``seed``.

    Raises:
        ConfigurationError: The package is missing, or does not know the task or an option.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigurationError(
            "tasks of reasoning-gym need the package: pip install 'lit-rlhf[reasoning-gym]' "
            f"(import reasoning_gym: {error})"
        ) from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:8]
        raise ConfigurationError(
            f"reasoning-gym has no task {task!r} among its {len(DATASETS)}; did you mean {', '.join(near)}?"
        )
    try:
        return create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"reasoning-gym refuses the options of {task!r}: {error}") from error
