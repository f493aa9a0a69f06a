"""What takes part in garbage collection, and what lets go by itself."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import kvdepot
import numpy as np
import pytest

pytestmark = pytest.mark.unit

Keys = Callable[[int], list[bytes]]
Descriptors = Callable[[], set[tuple[str, str]]]


class Owner:
    """Something that can be watched, and refer to anything."""

    def __init__(self) -> None:
        self.memory = np.zeros(4096, np.uint8)
        self.other: Any = None


class Watched(np.ndarray):
    """An array that can be watched, and refer to anything."""

    other: Any = None


def spans(owner: Owner) -> kvdepot.Spans:
    address = owner.memory.__array_interface__["data"][0]
    return kvdepot.Spans([(address, 4096, 4096)], [[0]], owner)


def test_a_cycle_through_spans_is_collected(ns: kvdepot.Namespace, keys: Keys) -> None:
    watches = []
    for used in (False, True):
        owner = Owner()
        owner.other = spans(owner)
        if used:
            assert ns.put(keys(1), owner.other).wait(30) == [True]
        watches.append(weakref.ref(owner))
        del owner
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_cycles_through_completions_are_collected(
    ns: kvdepot.Namespace, keys: Keys, descriptors: Descriptors
) -> None:
    gc.collect()
    before = descriptors()
    watches = []
    for number in range(60):
        owner = Owner()
        owner.other = kvdepot.Completions()
        if number % 3 == 0:
            owner.other.post(owner, None)
        elif number % 3 == 1:
            owner.other.post(None, owner)
        else:
            task = ns.put(keys(1), [bytes(100)])
            task.wait(30)
            owner.other.add(task, owner)
        watches.append(weakref.ref(owner))
        del owner
    gc.collect()
    assert [watch() for watch in watches] == [None] * 60
    assert not descriptors() - before


def test_completions_in_use_are_not_collected(ns: kvdepot.Namespace, keys: Keys) -> None:
    completions = kvdepot.Completions()
    owner = Owner()
    completions.add(ns.put(keys(1), [bytes(100)]), owner)
    completions.post("tag", [owner])
    gc.collect()
    answers = []
    deadline = time.monotonic() + 30
    while len(answers) < 2 and time.monotonic() < deadline:
        answers += completions.drain()
    assert sorted(map(str, answers)) == sorted(map(str, [(owner, [True]), ("tag", [owner])]))


def test_a_task_that_nobody_asks_lets_its_buffers_go(ns: kvdepot.Namespace, keys: Keys) -> None:
    name = keys(1)
    ns.put(name, [bytes(1 << 20)]).wait(30)
    tasks, watches = [], []
    for cyclic in [False, True] * 10:
        buffer = np.zeros(1 << 20, np.uint8).view(Watched)
        watches.append(weakref.ref(buffer))
        task = ns.get(name, [buffer])
        if cyclic:
            # Whoever is told of the task knows the memory.
            buffer.other = task
        tasks.append(task)
        del buffer, task
    deadline = time.monotonic() + 60
    while any(watch() is not None for watch in watches) and time.monotonic() < deadline:
        # No call of kvdepot: the interpreter is told by itself.
        time.sleep(0.01)
    assert [watch() for watch in watches] == [None] * 20
    assert all(task.wait(30) == [True] for task in tasks)


def test_a_task_under_way_keeps_its_buffers_from_collection(
    ns: kvdepot.Namespace, keys: Keys
) -> None:
    (held,) = ns.reserve(keys(1), 1 << 20)
    assert held is not None
    buffer = np.full(1 << 20, 7, np.uint8).view(Watched)
    buffer.other = ns.put([held.key], [buffer])
    watch = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert watch() is not None, "the lanes have it"
    ns.abort([held])
    deadline = time.monotonic() + 60
    while watch() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert watch() is None
    out = bytearray(1 << 20)
    while ns.get([held.key], [out]).wait(30) != [True] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bytes(out) == bytes([7]) * (1 << 20)
