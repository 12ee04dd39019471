"""Rows that are made instead of read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any


class PromptSource(ABC):
    """Base of classes whose objects stand where a file of prompts may stand; a recipe names them by ``class_path``.

    Rows must be the same each time, in the same order: a resumed run and every process of a distributed one make them
    anew.
    """

    @property
    def name(self) -> str:
        """Stands for the source in messages."""
        return type(self).__name__

    @abstractmethod
    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The rows: values by column name."""
