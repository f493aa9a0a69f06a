"""Spans scatter blocks over several ranges of memory, range after range."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import kvdepot
import numpy as np
import pytest

Keys = Callable[[int], list[bytes]]

LAYERS, BLOCKS, PAGE = 3, 10, 64


def cache() -> np.ndarray:
    """A paged cache: layers of blocks of a page."""
    return np.random.default_rng(1).integers(0, 255, (LAYERS, BLOCKS, PAGE), np.uint8)


def ranges(memory: np.ndarray) -> list[tuple[int, int, int]]:
    base = memory.ctypes.data
    layer, page = memory.strides[:2]
    return [(base + index * layer, page, PAGE) for index in range(len(memory))]


ROWS: dict[str, Callable[[list[list[int]]], Any]] = {
    "lists": list,
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "int64": lambda rows: np.array(rows, np.int64),
    "int32": lambda rows: np.array(rows, np.int32),
    "arrays": lambda rows: [np.array(row) for row in rows],
}


@pytest.mark.parametrize("form", ROWS)
def test_blocks_are_gathered_and_scattered(ns: kvdepot.Namespace, keys: Keys, form: str) -> None:
    memory, names = cache(), keys(2)
    rows = ROWS[form]([[7, 2], [3, 4]])
    spans = kvdepot.Spans(ranges(memory), rows, memory)
    assert len(spans) == 2
    assert spans.nbytes == 2 * LAYERS * 2 * PAGE
    assert all(ns.put(names, spans).wait(30))
    plain = [bytearray(LAYERS * 2 * PAGE) for _ in names]
    assert all(ns.get(names, plain).wait(30))
    assert plain[0] == memory[:, [7, 2]].tobytes()
    assert plain[1] == memory[:, [3, 4]].tobytes()
    out = np.zeros_like(memory)
    elsewhere = kvdepot.Spans(ranges=ranges(out), rows=[[0, 1], [9, 8]], owner=out)
    assert all(ns.get(names, elsewhere).wait(30))
    assert (out[:, [0, 1, 9, 8]] == memory[:, [7, 2, 3, 4]]).all()
    assert not out[:, 2:8].any()


def test_rows_may_differ_in_length(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory, names = cache(), keys(2)
    assert all(ns.put(names, kvdepot.Spans(ranges(memory), [[0], [1, 2, 3]], memory)).wait(30))
    out = [bytearray(LAYERS * PAGE), bytearray(3 * LAYERS * PAGE)]
    assert all(ns.get(names, out).wait(30))
    assert out[1] == memory[:, 1:4].tobytes()


def test_negative_ids_are_verified_and_not_delivered(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory, names = cache(), keys(2)
    ns.put(names, kvdepot.Spans(ranges(memory), [[0, 1], [2, 3]], memory)).wait(30)
    out = np.zeros_like(memory)
    skipping = kvdepot.Spans(ranges(out), [[-1, 1], [2, -1]], out)
    assert ns.get(names, skipping).wait(30) == [True, True]
    assert (out[:, 1:3] == memory[:, 1:3]).all()
    assert not out[:, 0].any()
    assert not out[:, 3:].any()


def test_negative_ids_have_nothing_to_store(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory = cache()
    with pytest.raises(kvdepot.InputError, match=r"rows\[1\].*-1"):
        ns.put(keys(2), kvdepot.Spans(ranges(memory), [[0], [-1]], memory))


@pytest.mark.parametrize(
    ("where", "rows", "match"),
    [
        ([(0, 1, 1)], [[0]], r"ranges\[0\]"),
        ([(4096, 1, 0)], [[0]], r"ranges\[0\]"),
        ([(2**64 - 1, 1, 8)], [[0]], r"ranges\[0\]"),
        ([(4096, 64, 64)], 5, "rows"),
        ([(4096, 64, 64)], [1, 2], r"rows\[0\]"),
        ([(4096, 64, 64)], [["x"]], r"rows\[0\]"),
    ],
)
def test_spans_that_cannot_be(where: Any, rows: Any, match: str) -> None:
    with pytest.raises(kvdepot.InputError, match=match):
        kvdepot.Spans(where, rows)


def test_ids_beyond_every_address_are_refused(ns: kvdepot.Namespace, keys: Keys) -> None:
    for stride, number in [(2**62, 8), (-4096, 1), (2**62, 2**62)]:
        spans = kvdepot.Spans([(4096, stride, 64)], [[number]])
        with pytest.raises(kvdepot.InputError, match=r"rows\[0\]"):
            ns.put(keys(1), spans)
    with pytest.raises(kvdepot.InputError, match="0 bytes"):
        ns.put(keys(1), kvdepot.Spans([], [[0]]))


class Owner:
    """Something that holds memory."""

    def __init__(self) -> None:
        self.memory = cache()


def test_the_owner_lives_until_the_task_is_over(ns: kvdepot.Namespace, keys: Keys) -> None:
    owner = Owner()
    before = sys.getrefcount(owner)
    spans = kvdepot.Spans(ranges(owner.memory), [[0]], owner)
    # The puts wait for whoever reserved their keys before.
    held = [one for one in ns.reserve(keys(2), spans.nbytes) if one is not None]
    task = ns.put([held[0].key], spans)
    del spans
    assert sys.getrefcount(owner) == before + 1
    ns.abort(held[:1])
    assert task.wait(30) == [True]
    assert sys.getrefcount(owner) == before
    watch = weakref.ref(owner)
    task = ns.put([held[1].key], kvdepot.Spans(ranges(owner.memory), [[0]], owner))
    del owner
    gc.collect()
    assert watch() is not None
    ns.abort(held[1:])
    assert task.wait(30) == [True]
    assert watch() is None


def test_ranges_and_rows_may_be_any_iterables(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory = np.arange(2 * 64, dtype=np.uint8)
    address = memory.__array_interface__["data"][0]
    spans = kvdepot.Spans(
        (one for one in [(address, 64, 64)]), (iter(row) for row in [[0], [1]]), memory
    )
    assert len(spans) == 2
    name = keys(2)
    assert ns.put(name, spans).wait(30) == [True] * 2
    out = [bytearray(64), bytearray(64)]
    assert ns.get(name, out).wait(30) == [True] * 2
    assert b"".join(out) == memory.tobytes()
