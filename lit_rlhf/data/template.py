"""Prompts written as a Jinja template over the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_rlhf.errors import ConfigurationError, DataError


class PromptTemplate:
    """A Jinja template; a column that a row does not have, or has as ``null``, is an error and never an empty string.

    Args:
        source: The template. Columns stand under their names, text goes through unchanged.

    Raises:
        ConfigurationError: It is not Jinja.

    >>> PromptTemplate("Make {{ target }} from {{ nums | join(', ') }}.").render({"target": 24, "nums": [3, 8, 1]})
    'Make 24 from 3, 8, 1.'
    """

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_refuse_null
        )
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"the prompt template is not Jinja (line {error.lineno}: {error})") from error

    def render(self, row: Mapping[str, Any]) -> str:
        """The prompt of one row.

        Args:
            row: Values by column name.

        Raises:
            DataError: The row lacks what the template asks for.
        """
        try:
            return self._template.render(row)
        except UndefinedError as error:
            raise DataError(f"the prompt template fails: {error}. The row has {', '.join(map(repr, row))}") from error
        except DataError:
            raise
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
            raise DataError(f"the prompt template fails: {type(error).__name__}: {error}") from error


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise DataError("the prompt template asks for a value that is null")
    return value
