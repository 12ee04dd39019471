"""Reward for a completion that is JSON of a given shape."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lit_rlhf.errors import ConfigurationError, RewardError, check_number
from lit_rlhf.rewards.code_blocks import JSON, last_code_block
from lit_rlhf.rewards.extraction import without_thinking
from lit_rlhf.rewards.isolation import WorkerPool, WorkerStartError
from lit_rlhf.rewards.messages import column_values, completion_text, required_column
from lit_rlhf.rewards.parallel import map_in_threads

_MEMORY_BYTES = 1 << 30


class JSONSchema:
    r"""1 where a completion is a JSON value that a schema allows, else 0.

    The value is the last code block that is marked ``json`` or not at all, else the whole completion; what comes before
    a ``</think>`` is left out. Infinity and NaN are no JSON. Schemas are checked by the ``jsonschema`` package
    (``pip install 'lit-rlhf[json]'``) in a separate process with a limit on time and memory: a ``pattern`` in a schema
    can take forever on a text made for it. References to other documents are not fetched.

    Args:
        schema: The schema of all rows, as a dictionary or the path of a json file.
        schema_column: Dataset column with each row's schema, a dictionary or JSON text, instead.
        timeout_seconds: Wall-clock limit of one row, in seconds. A row that exceeds it is wrong.

    Raises:
        ConfigurationError: ``jsonschema`` is not installed, not exactly one schema is given, or it is none.

    >>> reward = JSONSchema({"type": "object", "required": ["city"]})
    >>> reward(completions=['{"city": "Paris"}', '{"town": "Paris"}', "Paris"])
    [1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        schema: dict[str, Any] | str | None = None,
        schema_column: str | None = None,
        timeout_seconds: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise ConfigurationError("JSONSchema needs the package jsonschema: pip install 'lit-rlhf[json]'.")
        if (schema is None) == (schema_column is None):
            raise ConfigurationError("JSONSchema: give either schema or schema_column.")
        check_number("JSONSchema: timeout_seconds", timeout_seconds, above=0)
        if isinstance(schema, str):
            try:
                with open(schema, encoding="utf-8") as stream:
                    schema = json.load(stream)
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"JSONSchema: {schema!r} is no json file: {error}.") from error
        self.schema = None if schema is None else _schema_text(schema)
        if schema is not None and self.schema is None:
            raise ConfigurationError(f"JSONSchema: this is no JSON schema: {str(schema)[:200]}.")
        self.schema_column = schema_column
        self.timeout_seconds = float(timeout_seconds)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        return () if self.schema_column is None else (self.schema_column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score N completions; ``None`` where the row's schema is missing or none.

        Raises:
            RewardError: The column is missing.
        """
        if self.schema_column is None:
            schemas = [self.schema] * len(completions)
        else:
            given = required_column("JSONSchema", columns, self.schema_column, len(completions))
            schemas = [_schema_text(schema) for schema in given]
        rows = [(schema, self.extracted(completion)) for schema, completion in zip(schemas, completions, strict=True)]
        return map_in_threads(self._reward, rows, len(_pool().workers), "json schemas")

    def check_columns(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Report rows whose schema cannot be used, one message per row; empty where all are fine.

        Args:
            columns: Dataset columns by name.
        """
        if self.schema_column is None:
            return []
        try:
            schemas = column_values(columns, self.schema_column)
        except KeyError:
            return [f"no column {self.schema_column!r}; columns: {', '.join(sorted(columns)) or 'none'}"]
        return [
            f"{self.schema_column} of row {row} is no JSON schema"
            for row, schema in enumerate(schemas)
            if _schema_text(schema) is None
        ]

    def extracted(self, completion: Any, **_: Any) -> str | None:
        """The text that is read as JSON; ``None`` where there is none."""
        text = without_thinking(completion_text(completion))
        if text is None:
            return None
        return (last_code_block(text, JSON) or text).strip()

    def _reward(self, row: tuple[str | None, str | None]) -> float | None:
        schema, text = row
        if schema is None:
            return None
        if not text or not _is_json(text):
            return 0.0
        with _pool().worker() as worker:
            worker.start()
            try:
                return float(worker.run(allows, schema, text, timeout_seconds=self.timeout_seconds))
            except WorkerStartError:
                raise
            except RewardError:
                return 0.0


def allows(schema: str, text: str) -> bool:
    """Whether a JSON text is what a schema allows. Runs in a worker process.

    Args:
        schema: JSON text.
        text: JSON text.
    """
    import jsonschema
    import referencing

    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded)
    return bool(kind(loaded, registry=referencing.Registry()).is_valid(json.loads(text)))


def _warm_up() -> None:
    allows("{}", "1")


@functools.lru_cache(maxsize=1)
def _pool() -> WorkerPool:
    return WorkerPool(max(1, min(4, os.cpu_count() or 1)), _warm_up, _MEMORY_BYTES)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _schema_text(schema: Any) -> str | None:
    """A schema as JSON text, ``None`` where it is none."""
    import jsonschema

    try:
        loaded = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(loaded, (dict, bool)):
            return None
        jsonschema.validators.validator_for(loaded).check_schema(loaded)
        return json.dumps(loaded)
    except (ValueError, TypeError, RecursionError, jsonschema.SchemaError):
        return None
