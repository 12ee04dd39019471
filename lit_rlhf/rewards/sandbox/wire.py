"""Values on the wire between the judge and the program: data is copied, everything else stays behind a handle.

Reading never runs code of the sender: what arrives is ``json`` with tags, and becomes builtin types only.
"""

from __future__ import annotations

import datetime
import json
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_HEADER = struct.Struct("!I")
_MAX_MESSAGE = 8 << 20  # bytes
_SAFE_INTEGER = 1 << 53
_COLLECTIONS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "Decimal": Decimal,
    "Fraction": Fraction,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
}


class Channel:
    """Messages over a socket.

    Args:
        connection: A connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Any) -> None:
        """Send what ``json`` can write.

        Raises:
            ValueError: The message is larger than 8 MiB.
            OSError: The other side is gone.
        """
        data = json.dumps(message).encode("ascii")
        if len(data) > _MAX_MESSAGE:
            raise ValueError(f"a value of {len(data)} bytes is too large to be handed over")
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: The other side is gone.
            ValueError: What came is no message.
        """
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if size > _MAX_MESSAGE:
            raise ValueError(f"a message of {size} bytes")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), 1 << 16))
            if not part:
                raise EOFError("the connection was closed")
            data += part
        return bytes(data)


def encode(value: Any, keep: Callable[[Any], list[Any]]) -> Any:
    """Form of a value that ``json`` can write.

    Args:
        value: Builtin data, Decimal, Fraction, dates and NumPy arrays are copied; subclasses of builtin data are
            copied as what they extend.
        keep: Gives a tagged handle for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _SAFE_INTEGER else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    for tag, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [tag, [encode(item, keep) for item in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if type(value) is range:
        return ["range", value.start, value.stop, value.step]
    for tag in _TEXTS:
        if type(value).__name__ == tag and type(value).__module__ in ("decimal", "fractions", "datetime"):
            return [tag, value.isoformat() if hasattr(value, "isoformat") else str(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        return ["numpy", value.dtype.str, list(value.shape), numpy.ascontiguousarray(value).tobytes().hex()]
    return keep(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """The value behind :func:`encode`'s form.

    Args:
        data: From ``json``.
        resolve: Gives the object behind a handle.

    Raises:
        ValueError: The data has no such form.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise ValueError("no encoded value")
    tag, *rest = data
    if tag == "int":
        return int(rest[0], 16)
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](decode(item, resolve) for item in rest[0])
    if tag == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in rest[0]}
    if tag == "bytes":
        return bytes.fromhex(rest[0])
    if tag == "complex":
        return complex(*rest)
    if tag == "range":
        return range(*rest)
    if tag in _TEXTS:
        return _TEXTS[tag](rest[0])
    if tag == "numpy":
        import numpy

        dtype = numpy.dtype(rest[0])
        if dtype.kind not in "biufc":
            raise ValueError("no numeric array")
        array = numpy.frombuffer(bytes.fromhex(rest[2]), dtype=dtype).reshape(rest[1]).copy()
        return array if rest[1] else array[()]
    return resolve(data)
