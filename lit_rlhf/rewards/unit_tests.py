"""Unit tests as data sets hold them, cut into single ones."""

from __future__ import annotations

import ast
import contextlib
import json
from typing import Any


def split_tests(tests: Any, entry_point: Any = None) -> list[tuple[str, str]]:
    r"""Tests of a row, one by one.

    Args:
        tests: A string, or a list of strings.
        entry_point: Name of the function under test, where the tests define ``check(candidate)``.

    Returns:
        Names and Python; the name is empty for code that is no test, such as an import.

    Raises:
        ValueError: There are none, or they cannot be run; says why.

    >>> split_tests("import math\nassert f(4) == 2\nassert f(1) == 1")
    [('', 'import math'), ('1', 'assert f(4) == 2'), ('2', 'assert f(1) == 1')]
    """
    if hasattr(tests, "tolist"):
        tests = tests.tolist()
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            tests = json.loads(tests)
    strings = [tests] if isinstance(tests, str) else tests
    if not isinstance(strings, (list, tuple)) or not all(isinstance(test, str) for test in strings):
        raise ValueError("no list of strings" if tests is not None else "missing")
    units: list[tuple[bool, str]] = []
    for string in strings:
        try:
            body = ast.parse(string.replace("\r\n", "\n")).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"no Python: {error}") from None
        units += _units_of(body, entry_point)
    numbered, count = [], 0
    for is_test, code in units:
        count += is_test
        numbered.append((str(count) if is_test else "", code))
    if not count:
        unnamed = "" if _is_name(entry_point) else ", and no entry point is named"
        raise ValueError(f"nothing is asserted or called{unnamed}")
    return numbered


def _units_of(body: list[ast.stmt], entry_point: Any) -> list[tuple[bool, str]]:
    if any(isinstance(statement, ast.Assert) for statement in body):
        return [(isinstance(statement, ast.Assert), ast.unparse(statement)) for statement in body]
    whole = "\n".join(ast.unparse(statement) for statement in body)
    functions = [statement.name for statement in body if isinstance(statement, ast.FunctionDef)]
    called = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    if any(not isinstance(statement, definitions) and not _is_text(statement) for statement in body):
        return [(True, whole)]
    if "check" in functions and _is_name(entry_point):
        return [(False, whole), (True, f"check({entry_point})")]
    loose = [name for name in functions if name.startswith("test") and name not in called]
    return [(False, whole), *((True, f"{name}()") for name in loose)] if body else []


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()
