"""Spans scatter blocks over several ranges of memory, range after range."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
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
    "int64 of another byte order": lambda rows: np.array(rows, ">i8"),
    "int32 of another byte order": lambda rows: np.array(rows, ">i4"),
    "columns": lambda rows: np.array(rows, order="F"),
    "arrays": lambda rows: [np.array(row) for row in rows],
}


def gather(
    ns: kvdepot.Namespace, names: list[bytes], spans: kvdepot.Spans, memory: np.ndarray
) -> None:
    """Stores two blocks, of pages 7 and 2 and of pages 3 and 4, and looks at them in one piece."""
    assert spans.nbytes == 2 * LAYERS * 2 * PAGE
    assert all(ns.put(names, spans).wait(30))
    plain = [bytearray(LAYERS * 2 * PAGE) for _ in names]
    assert all(ns.get(names, plain).wait(30))
    assert plain[0] == memory[:, [7, 2]].tobytes()
    assert plain[1] == memory[:, [3, 4]].tobytes()


@pytest.mark.parametrize("form", ROWS)
def test_blocks_are_gathered_and_scattered(ns: kvdepot.Namespace, keys: Keys, form: str) -> None:
    memory, names = cache(), keys(2)
    rows = ROWS[form]([[7, 2], [3, 4]])
    spans = kvdepot.Spans(ranges(memory), rows, memory)
    assert len(spans) == 2
    gather(ns, names, spans, memory)
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


def test_what_a_row_raises_is_raised() -> None:
    def ids() -> Iterator[int]:
        yield 0
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        kvdepot.Spans([(4096, 64, 64)], [[1], ids()])


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


TENSORS: dict[str, Callable[[np.ndarray], Any]] = {
    "arrays": list,
    "one array of layers": lambda memory: memory,
    "memory views": lambda memory: [memoryview(layer) for layer in memory],
    "arrays of wider elements": lambda memory: [layer.view(np.float32) for layer in memory],
    "pages of more dimensions": lambda memory: [layer.reshape(BLOCKS, 4, 16) for layer in memory],
    "tensors": lambda memory: list(torch().from_numpy(memory)),
    "bfloat16": lambda memory: list(torch().from_numpy(memory).view(torch().bfloat16)),
    "float8": lambda memory: list(torch().from_numpy(memory).view(torch().float8_e4m3fn)),
    "parameters": lambda memory: list(
        torch().from_numpy(memory).view(torch().float32).requires_grad_()
    ),
}


def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("form", TENSORS)
def test_tensors_are_ranges(ns: kvdepot.Namespace, keys: Keys, form: str) -> None:
    memory, names = cache(), keys(2)
    spans = kvdepot.Spans(TENSORS[form](memory), [[7, 2], [3, 4]])
    gather(ns, names, spans, memory)
    out = np.zeros_like(memory)
    assert all(ns.get(names, kvdepot.Spans(TENSORS[form](out), [[0, 1], [-1, 8]])).wait(30))
    assert (out[:, [0, 1, 8]] == memory[:, [7, 2, 4]]).all()
    assert not out[:, [2, 3, 4, 5, 6, 7, 9]].any()


def test_pages_may_have_gaps_between_them(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory, name = cache(), keys(1)
    # Keys and values of a page apart, as some engines have them; every second page, backwards.
    halves = [memory[:, :, :32].swapaxes(0, 1)[:, 1], memory[2, ::2], memory[1, ::-1]]
    assert all(ns.put(name, kvdepot.Spans(halves, [[4, 1]])).wait(30))
    out = bytearray(2 * 32 + 4 * PAGE)
    assert all(ns.get(name, [out]).wait(30))
    expected = [memory[1, [4, 1], :32], memory[2, [8, 2]], memory[1, [5, 8]]]
    assert out == b"".join(one.tobytes() for one in expected)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: np.zeros(8, np.uint8), r"shape \[8\]"),
        (lambda: np.zeros((0, 8), np.uint8), "empty"),
        (lambda: np.zeros((8, 0), np.uint8), "empty"),
        (lambda: np.zeros((8, 4, 4), np.uint8)[:, :, ::2], "gaps"),
        (lambda: np.zeros((8, 4, 4), np.uint8).swapaxes(1, 2), "order"),
        (lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(64), 8), "overlap"),
        (lambda: np.zeros((4, 4), object), "pointers"),
        (lambda: torch().zeros(8, 16).t(), "gaps"),
        (lambda: torch().zeros(1, 16).expand(8, 16), "overlap"),
        (lambda: torch().zeros(8, 16, device="meta"), "device"),
        (lambda: torch().zeros(8, 16).to_sparse(), ""),
        (lambda: [4096, 64, 64], ""),
        (lambda: (4096, "x", 64), "x"),
        (lambda: (4096, 64), "4096"),
        (lambda: None, "NoneType object"),
    ],
)
def test_what_has_no_pages(tensor: Callable[[], Any], words: str) -> None:
    with pytest.raises(kvdepot.InputError, match=rf"ranges\[1\].*{words}"):
        kvdepot.Spans([cache()[0], tensor()], [[0]])


def test_ranges_are_a_sequence() -> None:
    with pytest.raises(kvdepot.InputError, match=r"ranges.*5.*sequence"):
        kvdepot.Spans(5, [[0]])  # type: ignore[arg-type]


def test_ids_beyond_a_tensors_pages_are_refused() -> None:
    memory = cache()
    kvdepot.Spans(memory, [[0], [9, -1]])
    with pytest.raises(kvdepot.InputError, match=r"rows\[1\]: 10 .*below 10.*ranges\[0\]"):
        kvdepot.Spans(memory, [[0, 9], [3, 10]])


def test_a_stride_in_elements_is_refused() -> None:
    memory = np.zeros((BLOCKS, 32), np.uint16)
    wrong = [(memory.ctypes.data, memory.strides[0] // memory.itemsize, PAGE)]
    with pytest.raises(kvdepot.InputError, match=r"ranges\[0\].*stride of 32 .*in bytes"):
        kvdepot.Spans(wrong, [[7, 2]], memory)
    # One page has no next one.
    kvdepot.Spans([(memory.ctypes.data, 0, PAGE)], [[0]], memory)


OWNERS: dict[str, Callable[[np.ndarray], Any]] = {
    "an array": lambda memory: memory,
    "a view of it": lambda memory: memory[1, 3:],
    "a memory view": lambda memory: memoryview(memory)[1:],
    "a list": lambda memory: [memory, bytearray(8)],
    "a dictionary": lambda memory: {"a": memory[0], "b": memory[2]},
    "a tensor": lambda memory: torch().from_numpy(memory)[1],
    "tensors": lambda memory: tuple(torch().from_numpy(memory)),
    "memory of ctypes": lambda memory: of_ctypes(memory),
    "an array of it": lambda memory: np.frombuffer(of_ctypes(memory), np.uint8)[8:],
    "an array that names itself": lambda memory: memory.view(Itself),
}


class Itself(np.ndarray):
    """An array that says it is a view of itself."""

    base = property(lambda self: self)


def of_ctypes(memory: np.ndarray) -> Any:
    return (ctypes.c_char * PAGE * BLOCKS * LAYERS).from_buffer(memory)


@pytest.mark.parametrize("form", OWNERS)
def test_addresses_must_not_leave_their_owner(form: str) -> None:
    memory = cache()
    owner, where = OWNERS[form](memory), ranges(memory)
    kvdepot.Spans(where, [[0, 9], [-1, 3]], owner)
    with pytest.raises(kvdepot.InputError, match=r"rows\[1\]: 10 .*ranges\[2\].*owner"):
        kvdepot.Spans(where, [[0, 9], [10, -1]], owner)
    address, stride, length = where[0]
    for wrong in [(address - 1, stride, length), (address, stride, memory.nbytes + 1)]:
        with pytest.raises(kvdepot.InputError, match=r"rows\[0\]: 0 .*ranges\[0\].*owner"):
            kvdepot.Spans([wrong], [[0]], owner)


def test_who_owns_more_than_is_known_is_taken_at_its_word() -> None:
    memory = cache()
    other = ranges(np.zeros_like(memory))
    for owner in (Owner(), [memory, Owner()], [], None):
        kvdepot.Spans(other, [[0]], owner)


def test_a_read_only_array_is_no_destination(ns: kvdepot.Namespace, keys: Keys) -> None:
    memory, name = cache(), keys(1)
    memory.flags.writeable = False
    spans = kvdepot.Spans(memory, [[1, 2]])
    assert ns.put(name, spans).wait(30) == [True]
    before = memory.tobytes()
    with pytest.raises(kvdepot.InputError, match="read-only"):
        ns.get(name, spans)
    assert memory.tobytes() == before


def test_tensors_live_until_the_task_is_over(ns: kvdepot.Namespace, keys: Keys) -> None:
    name = keys(1)
    held = [one for one in ns.reserve(name, PAGE) if one is not None]
    memory = np.full((4, PAGE), 7, np.uint8)
    watch = weakref.ref(memory)
    task = ns.put(name, kvdepot.Spans([memory], [[2]]))
    del memory
    gc.collect()
    assert watch() is not None
    ns.abort(held)
    assert task.wait(30) == [True]
    assert watch() is None
