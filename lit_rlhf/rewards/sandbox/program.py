"""The process that runs what the model wrote. Nothing in here is trusted: the program shares its interpreter."""

from __future__ import annotations

import builtins
import io
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from lit_rlhf.rewards.sandbox.wire import Channel, decode, encode

_MUTABLE = (list, dict, set, bytearray)


class _Program:
    """Answers the judge's requests."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.module = types.ModuleType("solution")
        self.objects: list[Any] = []
        sys.modules["solution"] = self.module  # dataclasses look their module up

    def serve(self) -> None:
        """Until the judge closes the connection."""
        self.channel.send("ready")
        while True:
            try:
                request = self.channel.receive()
            except (EOFError, OSError):
                return
            self.channel.send(self._answer(request))

    def _answer(self, request: Any) -> Any:
        operation, *rest = request
        try:
            if operation == "load":
                for source in rest:
                    exec(compile(source, "<completion>", "exec"), self.module.__dict__)
                return ["value", self._names()]
            arguments = [decode(item, self._resolve) for item in rest[0]]
            named = {key: decode(item, self._resolve) for key, item in rest[1].items()}
            before = [repr(item) if isinstance(item, _MUTABLE) else None for item in arguments]
            value = self._encode(_OPERATIONS[operation](*arguments, **named))
            # A function may change the lists it was given: the judge's own are to show it.
            changed = {
                str(place): self._encode(item)
                for place, (item, old) in enumerate(zip(arguments, before, strict=True))
                if old is not None and repr(item) != old
            }
            return ["value", value, changed]
        except BaseException as error:
            return ["error", type(error).__name__, _text(error)]

    def _names(self) -> dict[str, str]:
        kinds = {}
        for name, value in list(self.module.__dict__.items()):
            if name == "__builtins__":
                continue
            raised = isinstance(value, type) and issubclass(value, BaseException)
            kinds[name] = "exception" if raised and value.__module__ == "solution" else "object"
        return kinds

    def _encode(self, value: Any) -> Any:
        return encode(value, self._keep)

    def _keep(self, value: Any) -> list[Any]:
        self.objects.append(value)
        return ["object", len(self.objects) - 1]

    def _resolve(self, data: list[Any]) -> Any:
        if data[0] == "object":
            return self.objects[data[1]]
        if data[0] == "name":
            return self.module.__dict__[data[1]]
        return self._callback(data[1])

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.channel.send(["callback", number, [self._encode(item) for item in arguments]])
            while True:
                reply = self.channel.receive()
                if reply[0] == "result":
                    return decode(reply[1], self._resolve)
                if reply[0] == "raise":
                    raise getattr(builtins, reply[1], RuntimeError)(reply[2])
                self.channel.send(self._answer(reply))

        return call


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "value": lambda value: value,
    "getattr": getattr,
    "setattr": setattr,
    "next": lambda iterator, count: [item for _, item in zip(range(count), iterator, strict=False)],
    "method": lambda value, name, *arguments: getattr(value, name)(*arguments),
    "iter": iter,
    "str": str,
    "repr": repr,
    "len": len,
    "bool": bool,
    "equal": lambda one, other: bool(one == other),
    "hash": hash,
}


def main(descriptor: int) -> None:
    """Serve the judge.

    Args:
        descriptor: Number of the connected socket.
    """
    sys.stdin = io.StringIO()
    _Program(Channel(socket.socket(fileno=descriptor))).serve()
