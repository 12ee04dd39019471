from __future__ import annotations

import datetime
import json
import socket
import threading
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlhf.rewards.sandbox.wire import Channel, decode, encode


def copied(value: Any) -> Any:
    def refuse(value: Any) -> Any:
        raise TypeError(type(value).__name__)

    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


_keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.fractions()
_leaves = _keys | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.dates() | st.datetimes()


@given(
    st.recursive(
        _leaves,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(_keys, inner)
            | st.frozensets(_keys)
            | st.lists(inner).map(deque)
        ),
        max_leaves=20,
    )
)
def test_data_arrives_as_it_was(value: Any) -> None:
    back = copied(value)
    assert back == value
    assert type(back) is type(value)


def test_subclasses_become_what_they_extend() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    point = namedtuple("point", "x y")
    pairs = [
        (Liar(3), 3),
        (point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (IntEnum("E", "A").A, 1),
        (Decimal("1.50"), Decimal("1.50")),
        (Fraction(1, 3), Fraction(1, 3)),
        (datetime.date(2024, 2, 29), datetime.date(2024, 2, 29)),
        (np.float32(0.5), 0.5),
    ]
    for value, plain in pairs:
        assert copied(value) == plain
    assert type(copied(Liar(3))) is int
    assert type(copied(Counter())) is dict
    array = copied(np.arange(6.0).reshape(2, 3))
    assert array.shape == (2, 3)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_other_objects_stay_behind_a_handle() -> None:
    with pytest.raises(TypeError, match="function"):
        copied(lambda: 1)
    with pytest.raises(TypeError, match="ndarray"):
        copied(np.array([object()]))
    for data in ([], [1], {"a": 1}, ["numpy", "O", [1], "00"]):
        with pytest.raises((ValueError, TypeError)):
            decode(data, lambda handle: (_ for _ in ()).throw(ValueError))


def test_a_channel_refuses_what_is_too_large_and_notices_the_end() -> None:
    left, right = socket.socketpair()
    one, two = Channel(left), Channel(right)
    with pytest.raises(ValueError, match="too large"):
        one.send("x" * (9 << 20))
    sender = threading.Thread(target=one.send, args=([1, "é" * 200_000],))  # more than a socket takes at once
    sender.start()
    assert two.receive() == [1, "é" * 200_000]
    sender.join()
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="bytes"):
        two.receive()
    left.close()
    with pytest.raises(EOFError):
        two.receive()
