"""Whose memory it is, and for how long."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import kvdepot
import numpy as np
import pytest

Keys = Callable[[int], list[bytes]]


class Watched(np.ndarray):
    """An array that can be watched."""


def watched(length: int) -> np.ndarray:
    return np.zeros(length, np.uint8).view(Watched)


def test_buffers_are_free_when_wait_returns(ns: kvdepot.Namespace, keys: Keys) -> None:
    for _ in range(200):
        names = keys(2)
        # A bytearray cannot grow while somebody looks at its memory.
        buffers = [bytearray(b"x" * 5000), bytearray(b"y" * 5000)]
        ns.put(names, buffers).wait(30)
        for buffer in buffers:
            buffer.append(0)
        out = [bytearray(5000), bytearray(5000)]
        task = ns.get(names, out)
        while not task.done:
            time.sleep(0)
        for buffer in out:
            buffer.append(0)


def test_buffers_are_free_when_they_are_released(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    buffer = bytearray(5000)
    task = ns.put(keys(1), [buffer])
    task.wait_released(30)
    buffer.append(0)
    assert task.wait(30) == [True]


def test_memory_lives_while_a_dropped_task_moves_it(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(30)
    for number, name in enumerate(names):
        # Nothing but the task refers to the array, and nothing to the task.
        ns.put([name], [np.full(200_000, number, np.uint8)])
    gc.collect()
    noise = [np.full(200_000, 0xEE, np.uint8) for _ in range(30)]
    del noise
    out = [np.zeros(200_000, np.uint8) for _ in names]
    for name in names:
        ns.put([name], [b"it is there, or on its way"]).wait(30)
    assert all(ns.get(names, out).wait(30))
    assert [(int(one.min()), int(one.max())) for one in out] == [(n, n) for n in range(30)]


def test_a_dropped_task_lets_its_buffers_go(ns: kvdepot.Namespace, keys: Keys) -> None:
    name = keys(1)
    ns.put(name, [bytes(4 << 20)]).wait(30)
    watches = []
    for _ in range(20):
        buffer = watched(4 << 20)
        watches.append(weakref.ref(buffer))
        ns.get(name, [buffer])
        del buffer
    deadline = time.monotonic() + 60
    while any(watch() is not None for watch in watches) and time.monotonic() < deadline:
        # No call of kvdepot: the interpreter is told by itself.
        time.sleep(0.01)
    assert [watch() for watch in watches] == [None] * 20


def test_refused_calls_hold_nothing(ns: kvdepot.Namespace, keys: Keys) -> None:
    buffer = bytearray(100)
    for bad in ([buffer, buffer], [buffer, b""], [buffer, "x"]):
        try:
            ns.get(keys(2), bad)
        except kvdepot.InputError:
            buffer.append(0)
        else:
            raise AssertionError(bad)


class Copying:
    """Hands out a copy of its memory, as an exporter does that cannot hand out its own."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        return self.memory.__dlpack__(max_version=max_version, copy=True)


def test_a_copy_by_dlpack_is_a_source_and_no_destination(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(1)
    assert ns.put(names, [Copying(np.full(8, 7, np.uint8))]).wait(30) == [True]
    # What is delivered there nobody would see.
    with pytest.raises(kvdepot.InputError, match="read-only"):
        ns.get(names, [Copying(np.zeros(8, np.uint8))])
    out = bytearray(8)
    assert ns.get(names, [out]).wait(30) == [True]
    assert out == bytes([7]) * 8
