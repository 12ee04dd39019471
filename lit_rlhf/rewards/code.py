"""Reward for a program that passes unit tests, run where it can do no harm."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lit_rlhf.errors import ConfigurationError, RewardError, check_number
from lit_rlhf.rewards.code_blocks import last_code_block
from lit_rlhf.rewards.contract import RewardOutput
from lit_rlhf.rewards.extraction import without_thinking
from lit_rlhf.rewards.messages import column_values, completion_text, optional_column, required_column
from lit_rlhf.rewards.parallel import default_workers, map_in_threads
from lit_rlhf.rewards.sandbox.runner import Limits, Verdict, run_tests, way_of_confining
from lit_rlhf.rewards.unit_tests import split_tests


class _Job(NamedTuple):
    sources: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]
    setup: str


class CodeTests:
    r"""Share of unit tests that the program in a completion passes.

    The program is the last Python code block of the completion, after its think block. It runs in a process of its own
    with limits on time, memory, processes, output and files, and, where the system allows, without network and with a
    read-only file system. The tests run in another process that calls the program's functions and is given plain data
    back; so a program cannot leave early, redefine what equal means or print a report of its own. One that does not
    let every test run to its end gets 0, whatever it passed before.

    The tests of a row are a list of Python strings, or one. Every ``assert`` at the top level is a test; so is a
    function ``test_...`` that the string defines and does not call; so is any other string as a whole. ``check`` of
    the HumanEval layout is called with the entry point. A row without tests has no reward.

    Args:
        tests_column: Dataset column of the tests, or a dotted path into one.
        entry_point_column: Column with the name of the function that ``check(candidate)`` is called with.
        setup_column: Column with code or imports that run before the program; the tests may use its imports.
        prefix_column: Column with code that the completion continues (``prompt`` of HumanEval): it runs before a
            code block, and a completion without any code block is taken as its continuation. Without this option such
            a completion gets 0.
        all_or_nothing: 1 if every test passed, else 0.
        timeout_seconds: Wall-clock limit of one program with all its tests, in seconds.
        memory_mb: Limit of memory, in MiB.
        max_processes: Processes and threads that a program may have at a time.
        max_output_kb: What it may print, in KiB.
        max_disk_mb: What it may write, in MiB.
        workers: Programs that run at a time; one per processor and at least 4 by default.

    Raises:
        ConfigurationError: An argument is out of range, or the system is no POSIX system.

    >>> program = "```python\ndef double(n):\n    return 2 * n\n```"
    >>> CodeTests()(completions=[program], tests=[["assert double(2) == 4"]]).rewards
    [1.0]
    """

    def __init__(
        self,
        tests_column: str = "tests",
        entry_point_column: str = "entry_point",
        setup_column: str | None = None,
        prefix_column: str | None = None,
        all_or_nothing: bool = False,
        timeout_seconds: float = 5.0,
        memory_mb: int = 512,
        max_processes: int = 16,
        max_output_kb: int = 1024,
        max_disk_mb: int = 16,
        workers: int | None = None,
    ) -> None:
        if importlib.util.find_spec("resource") is None:
            raise ConfigurationError("CodeTests limits programs in ways that only Linux, macOS and their like have.")
        if not tests_column:
            raise ConfigurationError("CodeTests: tests_column is empty; name the column that holds the tests.")
        check_number("CodeTests: timeout_seconds", timeout_seconds, above=0)
        check_number("CodeTests: memory_mb", memory_mb, minimum=64)
        for name, value in (("max_processes", max_processes), ("max_output_kb", max_output_kb), ("workers", workers)):
            check_number(f"CodeTests: {name}", value, minimum=1)
        check_number("CodeTests: max_disk_mb", max_disk_mb, minimum=1)
        self.tests_column = tests_column
        self.entry_point_column = entry_point_column
        self.setup_column = setup_column
        self.prefix_column = prefix_column
        self.all_or_nothing = all_or_nothing
        self.limits = Limits(
            float(timeout_seconds), memory_mb << 20, max_processes, max_output_kb << 10, max_disk_mb << 20
        )
        self.workers = workers or default_workers()

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that a call needs."""
        named = (self.tests_column, self.setup_column, self.prefix_column)
        return tuple(name for name in named if name is not None and name != "prompts")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> RewardOutput:
        """Score N completions.

        Args:
            completions: N texts, or N lists of chat messages.
            **columns: Dataset columns, ``tests_column`` among them.

        Returns:
            N rewards, ``None`` where the row has no tests that can be run; and for the log, whether there was code
            (``has_code``) and whether every test ran to its end (``completed``).

        Raises:
            RewardError: A column is missing, or no program can be run on this system.
        """
        count = len(completions)
        tests = required_column("CodeTests", columns, self.tests_column, count)
        entry_points = optional_column("CodeTests", columns, self.entry_point_column, count)
        setups = optional_column("CodeTests", columns, self.setup_column, count)
        prefixes = optional_column("CodeTests", columns, self.prefix_column, count)
        jobs: list[_Job | None] = []
        has_code: list[float | None] = []
        for row in zip(completions, tests, entry_points, setups, prefixes, strict=True):
            completion, given, entry_point, setup, prefix = row
            try:
                units = split_tests(given, entry_point)
            except ValueError:
                jobs.append(None)
                has_code.append(None)
                continue
            program = self._program(completion_text(completion), prefix)
            has_code.append(float(program is not None))
            before = "\n".join(setup) if isinstance(setup, (list, tuple)) else str(setup or "")
            sources = tuple(source for source in (before, _loadable(prefix), program or "") if source)
            jobs.append(_Job(sources if program else (), tuple(units), before))
        way_of_confining()  # tried out once, before the workers start
        verdicts = map_in_threads(self._run, jobs, self.workers, "code tests")
        return RewardOutput(
            [self._reward(verdict) for verdict in verdicts],
            {
                "has_code": has_code,
                "completed": [None if verdict is None else float(verdict.completed) for verdict in verdicts],
            },
        )

    def check_columns(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Report rows whose tests cannot be run, one message per row; empty where all are fine.

        Args:
            columns: Dataset columns by name.
        """
        try:
            tests = column_values(columns, self.tests_column)
        except KeyError:
            return [f"no column {self.tests_column!r}; columns: {', '.join(sorted(columns)) or 'none'}"]
        entry_points = optional_column("CodeTests", columns, self.entry_point_column, len(tests))
        messages = []
        for row, (given, entry_point) in enumerate(zip(tests, entry_points, strict=True)):
            try:
                split_tests(given, entry_point)
            except ValueError as error:
                messages.append(f"{self.tests_column} of row {row}: {error}")
        return messages

    def extracted(self, completion: Any, **_: Any) -> str | None:
        """The program that is run, for a look at it; ``None`` where there is none."""
        return self._program(completion_text(completion), "" if self.prefix_column else None)

    def _program(self, text: str, prefix: Any) -> str | None:
        answer = without_thinking(text)
        if answer is None:
            return None
        block = last_code_block(answer)
        if block is not None:
            return block
        return f"{prefix}{answer}" if isinstance(prefix, str) else None

    def _run(self, job: _Job | None) -> Verdict | None:
        if job is None:
            return None
        if not job.sources:
            return Verdict(0, 1, "no code", completed=False)
        try:
            return run_tests(job.sources, job.tests, job.setup, self.limits)
        except RewardError as error:
            raise RewardError(f"CodeTests: {error}") from error

    def _reward(self, verdict: Verdict | None) -> float | None:
        if verdict is None:
            return None
        share = verdict.passed / verdict.total
        return float(share == 1.0) if self.all_or_nothing else share


def _loadable(code: Any) -> str:
    """Code that can run by itself, such as a signature with its docstring; else nothing."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ""
    return str(code)
