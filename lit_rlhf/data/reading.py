"""From a row to its prompt and to the columns that the reward functions get."""

from __future__ import annotations

from typing import Any

from lit_rlhf.data.encoding import Messages, checked_prompt
from lit_rlhf.data.formats import FORMATS, Format, Layout, find_layout, guess_formats, one_user_message
from lit_rlhf.data.rows import Rows
from lit_rlhf.data.template import PromptTemplate
from lit_rlhf.errors import ConfigurationError, DataError


def check_prompt_options(format: Format | None, prompt_column: str | None, prompt_template: str | None) -> None:
    """Refuse options that contradict each other, before anything is read.

    Args:
        format: See :class:`RowReader`.
        prompt_column: See :class:`RowReader`.
        prompt_template: See :class:`RowReader`.

    Raises:
        ConfigurationError: Naming the option and what is allowed.
    """
    if format is not None and format not in FORMATS:
        raise ConfigurationError(f"format={format!r} is not known; there are {', '.join(FORMATS)}")
    if prompt_column is not None and prompt_template is not None:
        raise ConfigurationError("give prompt_column or prompt_template, not both")
    if prompt_template is not None:
        PromptTemplate(prompt_template)


class RowReader:
    """Knows where the prompt of each row is.

    Args:
        rows: Of one source.
        format: Published layout that the rows have.
        prompt_column: Column with the prompt; wins over the format's.
        prompt_template: Jinja template of the prompt; wins over the format's.
        as_chat: A prompt that is text becomes messages.
        system_prompt: Put in front of messages that have no system message.

    Attributes:
        columns: Names of the columns that :meth:`columns_of` gives: all but one that is itself the prompt.
        has_gold: Whether the format knows a reference answer.
        repeats_prompts: Whether the format's published file holds its prompts many times over.
        source: Where prompts come from, in words.

    Raises:
        DataError: The rows lack a column.
        ConfigurationError: Options contradict each other.
    """

    def __init__(
        self,
        rows: Rows,
        format: Format | None = None,
        prompt_column: str | None = None,
        prompt_template: str | None = None,
        as_chat: bool = False,
        system_prompt: str | None = None,
    ) -> None:
        check_prompt_options(format, prompt_column, prompt_template)
        layout = Layout((), column="prompt") if format is None else find_layout(format, rows.columns, rows.name)
        self._make = layout.make
        self._to_messages = layout.to_messages
        self._gold = layout.gold
        template = layout.template
        self._column = layout.column
        if prompt_column is not None or prompt_template is not None:
            self._make, self._to_messages = None, one_user_message
            self._column, template = prompt_column, prompt_template
        self._template = None if template is None else PromptTemplate(template)
        if self._column is not None and self._column not in rows.columns:
            raise DataError(_no_column(rows, self._column, format))
        self._as_chat = as_chat
        self._system_prompt = system_prompt
        self._added = [name for name in ("gold", "answer") if self._gold and name not in rows.columns]
        self.columns = [name for name in rows.columns if name != self._column] + self._added
        self.has_gold = self._gold is not None
        self.repeats_prompts = layout.unique
        if self._column is not None:
            self.source = f"column {self._column!r}"
        else:
            self.source = f"format {format!r}" if prompt_template is None else "`prompt_template`"

    def prompt_of(self, row: dict[str, Any]) -> str | Messages:
        """The prompt of a row: a string, or messages with the system prompt in front.

        Args:
            row: One of the rows.

        Raises:
            DataError: The row gives no sound prompt.
            ConfigurationError: ``system_prompt`` is set and the prompt is a string.
        """
        if self._column is not None:
            prompt = row.get(self._column)
        elif self._template is not None:
            prompt = self._template.render(row)
        else:
            assert self._make is not None
            prompt = self._make(row)
        if self._as_chat and isinstance(prompt, str) and prompt:
            prompt = self._to_messages(prompt)
        return checked_prompt(prompt, self._system_prompt)

    def columns_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns for the reward functions, unchanged, with those that the format adds.

        Args:
            row: One of the rows; ``None`` stands where it has no value.
        """
        values = {name: row.get(name) for name in self.columns}
        if self._added:
            gold = self.gold_of(row)
            values.update(dict.fromkeys(self._added, gold))
        return values

    def gold_of(self, row: dict[str, Any]) -> Any:
        """The reference answer that the format finds in a row; ``None`` where there is none.

        Args:
            row: One of the rows.
        """
        return None if self._gold is None else self._gold(row)


def _no_column(rows: Rows, column: str, format: Format | None) -> str:
    guesses = guess_formats(rows.columns) if format is None else []
    hint = f", or say what layout this is with `format`, perhaps {' or '.join(guesses[:3])}" if guesses else ""
    return (
        f"{rows.name}: there is no column {column!r}. It has {', '.join(map(repr, rows.columns))}; "
        f"name the one that holds the prompt with the option `prompt_column`{hint}"
    )
