"""The process that runs the tests. It never runs the program: it asks the program's process, and gets data back."""

from __future__ import annotations

import ast
import builtins
import operator
import types
from collections.abc import Iterator
from typing import Any

from lit_rlhf.rewards.sandbox.wire import Channel, decode, encode

_BATCH = 64  # items of an iterator fetched at a time
_PLAIN_METHODS = (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__truediv__", "__floordiv__", "__mod__", "__pow__", "__neg__", "__abs__", "__lt__",
    "__le__", "__gt__", "__ge__", "__enter__", "__exit__", "__and__", "__or__", "__xor__", "__int__", "__float__",
    "__index__", "__reversed__",
)  # fmt: skip


class ProgramEndedError(BaseException):
    """The program's process is gone, or no longer keeps to the protocol: nothing after this can be known.

    No test is to catch it: a test that expects an exception is not passed by a program that exits.
    """


class BrokenTestsError(Exception):
    """The tests are no Python, or import what is not there."""


class ProgramError(Exception):
    """An exception of the program's that is none of Python's own."""


class Program:
    """The other process.

    Args:
        channel: To it.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.callbacks: list[Any] = []
        self.exceptions: dict[str, type[Exception]] = {}
        self.ended = False

    def load(self, sources: list[str]) -> dict[str, str]:
        """Run sources one after the other; gives the names they leave, and what each is.

        Raises:
            ProgramEndedError: The program exited.
            Exception: What the program raised.
        """
        names = self._wait(["load", *sources])[0]
        if not isinstance(names, dict):
            raise ProgramEndedError("no names")
        self.exceptions = {name: type(name, (ProgramError,), {}) for name, kind in names.items() if kind == "exception"}
        return names

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Have the program do something, and return what it gave.

        Raises:
            ProgramEndedError: The program exited.
            Exception: What the program raised.
        """
        items = [self._encode(item) for item in arguments]
        reply = self._wait([operation, items, {key: self._encode(item) for key, item in named.items()}])
        value = self._decode(reply[0])
        changed = reply[1] if len(reply) == 2 and isinstance(reply[1], dict) else {}
        for place, argument in enumerate(arguments):
            if str(place) in changed:
                _become(argument, self._decode(changed[str(place)]))
        return value

    def _wait(self, request: list[Any]) -> list[Any]:
        if self.ended:
            raise ProgramEndedError("the program ended")
        self._send(request)
        while True:
            reply = self._receive()
            if reply[0] == "value":
                return reply[1:]
            if reply[0] == "error":
                raise self._exception(str(reply[1]), str(reply[2]))
            self._send(self._call_back(reply[1], reply[2]))  # the program calls a function of the test

    def _send(self, message: list[Any]) -> None:
        try:
            self.channel.send(message)
        except OSError as error:
            self.ended = True
            raise ProgramEndedError("the program ended") from error

    def _receive(self) -> list[Any]:
        try:
            reply = self.channel.receive()
            if isinstance(reply, list) and len(reply) in (2, 3):
                return reply
        except (EOFError, OSError, ValueError):
            pass
        self.ended = True
        raise ProgramEndedError("the program ended, or what it sent is no reply")

    def _call_back(self, number: int, arguments: list[Any]) -> list[Any]:
        try:
            return ["result", self._encode(self.callbacks[number](*map(self._decode, arguments)))]
        except Exception as error:
            return ["raise", type(error).__name__, str(error)[:300]]

    def _exception(self, name: str, message: str) -> Exception:
        kind = self.exceptions.get(name) or getattr(builtins, name, None)
        usable = isinstance(kind, type) and issubclass(kind, Exception)
        try:
            return kind(message) if usable else ProgramError(f"{name}: {message}")  # type: ignore[misc]
        except TypeError:  # UnicodeDecodeError wants five arguments
            return ProgramError(f"{name}: {message}")

    def _encode(self, value: Any) -> Any:
        return encode(value, self._keep)

    def _keep(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return list(object.__getattribute__(value, "_handle"))
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the test cannot be given to the program")
        self.callbacks.append(value)
        return ["callback", len(self.callbacks) - 1]

    def _decode(self, data: Any) -> Any:
        try:
            return decode(data, lambda handle: Remote(self, handle))
        except Exception as error:
            self.ended = True
            raise ProgramEndedError("what the program sent is no value") from error


class Remote:
    """An object of the program's. It is never equal to data of the test's, whatever the program says."""

    def __init__(self, program: Program, handle: list[Any]) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it."""
        return _ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return _ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("setattr", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask("iter", self)
        while True:
            items = _ask("next", iterator, _BATCH)
            yield from items
            if len(items) < _BATCH:
                return

    def __next__(self) -> Any:
        items = _ask("next", self, 1)
        if not items:
            raise StopIteration
        return items[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _ask("equal", self, other) is True

    def __hash__(self) -> int:
        return int(_ask("hash", self))

    def __bool__(self) -> bool:
        return _ask("bool", self) is True

    def __len__(self) -> int:
        return operator.index(_ask("len", self))

    def __str__(self) -> str:
        return str(_ask("str", self))

    def __repr__(self) -> str:
        return str(_ask("repr", self))


def _ask(operation: str, remote: Remote, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(remote, "_program").ask(operation, remote, *arguments, **named)


def _forwarding(name: str) -> Any:
    return lambda self, *arguments: _ask("method", self, name, *arguments)


for _name in _PLAIN_METHODS:
    setattr(Remote, _name, _forwarding(_name))


def _become(mine: Any, theirs: Any) -> None:
    """Give the test's own list, dictionary or set the content that the program left in its copy."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, (list, bytearray)):
        mine[:] = theirs
    elif isinstance(mine, (dict, set)):
        mine.clear()
        mine.update(theirs)


def judge(channel: Channel, sources: list[str], setup: str, tests: list[list[str]]) -> list[list[str]]:
    """Load a program and run tests on it.

    Args:
        channel: To the program's process.
        sources: Python, run one after the other in the program's process; the last is what the model wrote.
        setup: Python, whose imports the tests may use.
        tests: For each test its name and the Python to run; without a name for code that is run and is no test, such
            as an import.

    Returns:
        For each test that counts ``["passed", ""]`` or ``["failed", why]``.

    Raises:
        BrokenTestsError: Setup or tests cannot be run, whatever the program is.
        ProgramEndedError: The program ended before the last test did, or did not keep to the protocol.
    """
    own: dict[str, Any] = {"__name__": "tests"}
    try:
        used = _names_used([code for _, code in tests])
        for statement in ast.parse(setup).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([statement], []), "<setup>", "exec"), own)
        compiled = [(name, compile(code, "<test>", "exec")) for name, code in tests]
    except Exception as error:
        raise BrokenTestsError(_shown(error)) from error
    program = Program(channel)
    try:
        names = program.load(sources)
    except Exception as error:
        return [["failed", f"the program does not load: {_shown(error)}"] for name, _ in tests if name]
    wanted = used & set(names)
    # One that hides a builtin counts only where it must be the tested one.
    for name in {name for name in wanted if not hasattr(builtins, name)} or wanted:
        raised = names[name] == "exception"
        own.setdefault(name, program.exceptions[name] if raised else program.ask("value", _named(program, name)))
    return [outcome for name, code in compiled if (outcome := _run(code, own, program)) and name]


def _run(code: types.CodeType, namespace: dict[str, Any], program: Program) -> list[str]:
    try:
        exec(code, namespace)
    except ProgramEndedError:
        raise
    except BaseException as error:
        outcome = ["failed", _shown(error)]
    else:
        outcome = ["passed", ""]
    if program.ended:  # and a test may have caught it
        raise ProgramEndedError("the program ended during a test")
    return outcome


def _named(program: Program, name: str) -> Remote:
    return Remote(program, ["name", name])


def _names_used(codes: list[str]) -> set[str]:
    """Names that tests use and do not define themselves."""
    nodes = [node for code in codes for node in ast.walk(ast.parse(code))]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - own


def _shown(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
