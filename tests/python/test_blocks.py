"""Blocks go in and come back, whatever holds the keys and the bytes."""

from __future__ import annotations

import array
import ctypes
import random
from collections.abc import Callable
from typing import Any

import kvdepot
import numpy as np
import pytest

Keys = Callable[[int], list[bytes]]


class OnlyDlpack:
    """A tensor without the buffer protocol, like torch's."""

    def __init__(self, held: np.ndarray, *, versioned: bool = True) -> None:
        self.held = held
        self.versioned = versioned

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.held.__dlpack__(**options)


def view_bytes(memory: Any) -> bytes:
    return memory.held.tobytes() if isinstance(memory, OnlyDlpack) else bytes(memory)


MEMORY: dict[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda data: memoryview(bytearray(data)),
    "array": lambda data: array.array("B", data),
    "numpy": lambda data: np.frombuffer(bytearray(data), np.uint8),
    "numpy of floats": lambda data: np.frombuffer(bytearray(data), np.float32).reshape(-1, 25),
    "column order": lambda data: np.asfortranarray(
        np.frombuffer(bytearray(data), np.uint8).reshape(4, -1)
    ),
    "DLPack": lambda data: OnlyDlpack(np.frombuffer(bytearray(data), np.float32).reshape(5, -1)),
    "DLPack before 1.0": lambda data: OnlyDlpack(
        np.frombuffer(bytearray(data), np.int16), versioned=False
    ),
}


@pytest.mark.parametrize("pipeline", ["Cache", "Dax", "Cache|Dax"])
@pytest.mark.parametrize("length", [1, 100, 4096, 70_000, 3 << 20])
def test_blocks_come_back(
    depots: Any, keys: Keys, source: random.Random, pipeline: str, length: int
) -> None:
    depot = depots.open(pipeline)
    ns = depot.namespace("m", "f", 1)
    names = keys(4)
    blocks = [source.randbytes(length) for _ in names]
    put = ns.put(names, blocks)
    assert put.wait(30) == [True] * 4
    assert put.errors == [None] * 4
    out = [bytearray(length) for _ in names]
    assert ns.get(names, out).wait(30) == [True] * 4
    assert out == blocks


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_of_every_kind(
    ns: kvdepot.Namespace, keys: Keys, source: random.Random, kind: str
) -> None:
    names = keys(3)
    blocks = [source.randbytes(10_000) for _ in names]
    memory = [MEMORY[kind](block) for block in blocks]
    held = [view_bytes(one) for one in memory]
    assert ns.put(names, memory).wait(30) == [True] * 3
    plain = [bytearray(10_000) for _ in names]
    assert ns.get(names, plain).wait(30) == [True] * 3
    if kind != "column order":  # bytes() reads those in the order of rows
        assert plain == held
    out = [MEMORY[kind](bytes(10_000)) for _ in names]
    assert ns.get(names, out).wait(30) == [True] * 3
    assert [view_bytes(one) for one in out] == held


def test_memory_without_dimensions(ns: kvdepot.Namespace, keys: Keys) -> None:
    name = keys(1)
    key = np.frombuffer(name[0], np.dtype("V32")).reshape(())
    held: list[Any] = [np.array(2.5), ctypes.c_uint64(7), OnlyDlpack(np.array(2.5))]
    for one in held:
        ns.remove(name)
        assert ns.put([key], [one]).wait(30) == [True]
        out = bytearray(8)
        assert ns.get(name, [out]).wait(30) == [True]
        assert bytes(out) == view_bytes(one)
        blank: list[Any] = [np.zeros(()), ctypes.c_uint64(0), OnlyDlpack(np.zeros(()))]
        for into in blank:
            assert ns.get([key], [into]).wait(30) == [True]
            assert view_bytes(into) == bytes(out)


def test_addresses_and_lengths(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(2)
    memory = np.arange(2000, dtype=np.uint8)
    base = memory.ctypes.data
    assert ns.put(names, [(base, 1000), (base + 1000, 1000)]).wait(30) == [True] * 2
    out = np.zeros(2000, np.uint8)
    pairs = [(out.ctypes.data + 1000, 1000), (out.ctypes.data, 1000)]
    assert ns.get(names[::-1], pairs).wait(30) == [True] * 2
    assert (out == memory).all()


def test_a_matrix_is_one_buffer_a_row(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(8)
    blocks = np.random.default_rng(1).integers(0, 255, (8, 500), np.uint8)
    assert all(ns.put(names, blocks).wait(30))
    out = np.zeros_like(blocks)
    assert all(ns.get(names, out).wait(30))
    assert (out == blocks).all()


def test_keys_of_every_kind(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(5)
    ns.put(names, [b"x" * (i + 1) for i in range(5)]).wait(30)
    joined = b"".join(names)
    forms: list[Any] = [
        names,
        tuple(names),
        joined,
        bytearray(joined),
        memoryview(joined),
        np.frombuffer(joined, np.uint8),
        np.frombuffer(joined, np.uint8).reshape(5, 32),
        np.frombuffer(joined, "S32"),
        np.frombuffer(joined, np.uint64),
        [bytearray(name) for name in names],
        [np.frombuffer(name, np.uint8) for name in names],
        (name for name in names),
    ]
    for form in forms:
        assert ns.prefix(form) == 5
    assert ns.contains(joined) == [True] * 5


def test_prefix_ends_at_the_first_gap(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(6)
    ns.put(names, [b"x"] * 6).wait(30)
    assert ns.remove([names[3]]) == 1
    assert ns.prefix(names) == 3
    assert ns.contains(names) == [True, True, True, False, True, True]
    assert ns.where(names)[2:5] == ["Cache", None, "Cache"]
    assert ns.remove(names) == 5
    assert ns.prefix(names) == 0


def test_nothing_is_something(ns: kvdepot.Namespace) -> None:
    assert ns.prefix([]) == 0
    assert ns.contains(b"") == []
    task = ns.put([], [])
    assert task.wait(1) == []
    assert len(task) == 0
    assert ns.get([], []).wait(1) == []
    assert ns.pin([]) == []
    assert ns.reserve([], 10) == []
    assert ns.commit([], []) == []
    assert ns.remove([]) == 0


def test_a_false_names_its_reason(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(3)
    ns.put(names[:2], [b"x" * 10, b"y" * 10]).wait(30)
    task = ns.get(names, [bytearray(10), bytearray(11), bytearray(10)])
    assert task.wait(30) == [True, False, False]
    assert task.errors == [None, "length", "miss"]
    assert task.done
    assert "done" in repr(task)


def test_a_put_that_cannot_fit_is_false(depots: Any, keys: Keys) -> None:
    ns = depots.open("Cache", cache="1MiB").namespace("m", "f", 1)
    task = ns.put(keys(1), [bytes(2 << 20)])
    assert task.wait(30) == [False]
    assert task.errors == ["full"]


def test_a_second_put_of_a_key_is_true_and_changes_nothing(
    ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(1)
    assert ns.put(names * 2, [b"first"] * 2).wait(30) == [True, True]
    assert ns.put(names, [b"other"]).wait(30) == [True]
    out = bytearray(5)
    ns.get(names, [out]).wait(30)
    assert out == b"first"


def test_namespaces_share_nothing(depot: kvdepot.Depot, keys: Keys) -> None:
    names = keys(1)
    given: dict[str, Any] = {"model": "m", "dtype": "f", "block_tokens": 1}
    variants: list[dict[str, Any]] = [
        {},
        {"model": "n"},
        {"dtype": "g"},
        {"block_tokens": 2},
        {"weights": "w"},
        {"layout": "{}"},
        {"group": 0},
        {"world": 2},
        {"hash": "sha256"},
        {"salt": "s"},
        {"salt": b"s"},
    ]
    spaces = [depot.namespace(**given | variant) for variant in variants]
    assert len({space.digest for space in spaces}) == len(spaces)
    assert {len(space.digest) for space in spaces} == {16}
    spaces[0].put(names, [b"x"]).wait(30)
    assert [space.prefix(names) for space in spaces] == [1] + [0] * (len(spaces) - 1)
    assert depot.namespace(**given, group="0").digest == spaces[6].digest


def test_clear_forgets_one_namespace(depot: kvdepot.Depot, keys: Keys) -> None:
    names = keys(4)
    one, other = (depot.namespace(model, "f", 1) for model in "ab")
    for space in (one, other):
        space.put(names, [b"x"] * 4).wait(30)
    assert one.clear() == 4  # each in two tiers
    assert one.prefix(names) == 0
    assert other.prefix(names) == 4


def test_statistics_count_what_happened(depot: kvdepot.Depot, keys: Keys) -> None:
    ns = depot.namespace("m", "f", 1)
    names = keys(3)
    ns.put(names[:2], [bytes(1000)] * 2).wait(30)
    ns.get(names, [bytearray(1000) for _ in names]).wait(30)
    assert depot.drain(10)
    # Who looks, or has blocks brought near, takes none: whoever does is counted.
    assert ns.prefix(names) == 2
    assert ns.contains(names) == [True, True, False]
    assert ns.lookup(names).wait(30) == [True, True, False]
    assert ns.where(names)[2] is None
    assert ns.prefetch(names).wait(30) == [True, True, False]
    assert depot.stats()["missed_blocks"] == 1
    pins = [ns.pin([names[2], *names]), ns.pin([names[0], names[2], names[1]], prefix=True)]
    ns.unpin([pin for pinned in pins for pin in pinned if pin])
    stats = depot.stats()
    assert stats["put_acknowledged_blocks"] == 2
    assert stats["get_blocks"] == 3
    assert stats["missed_blocks"] == 1 + 2 + 2
    assert (stats["prefetch_tasks"], stats["prefetch_blocks"]) == (1, 3)
    assert stats["pending_bytes"] == stats["dropped_blocks"] == depot.pending_bytes() == 0
    assert list(stats["tiers"]) == depot.tiers == ["Cache", "Dax"]
    near, far = stats["tiers"].values()
    assert near["hit_blocks"] == 2
    assert near["hit_bytes"] == 2000
    assert near["blocks"] == far["blocks"] == 2
    assert near["live_bytes"] == 2000
    assert near["used_bytes"] == 8192
    assert near["capacity_bytes"] == 32 << 20
    text = depot.metrics_text()
    assert 'kvdepot_hit_blocks_total{tier="Cache"} 2' in text
    assert "kvdepot_missed_blocks_total 5" in text
    assert 'kvdepot_blocks_total{op="prefetch"} 3' in text


def test_reasons_of_refused_reservations_are_counted(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(2)
    ns.put(names[:1], [b"x"]).wait(30)
    (held,) = ns.reserve(names[1:], 1)
    assert held is not None
    assert ns.reserve(names, 1) == [None, None]
    stats = depot.stats()
    assert (stats["reserve_present_blocks"], stats["reserve_pending_blocks"]) == (1, 1)
    ns.abort([held])


def test_blocks_outlive_the_depot(depots: Any, keys: Keys) -> None:
    names = keys(20)
    first = depots.open()
    assert first.recovery["created"]
    assert all(first.namespace("m", "f", 1).put(names, [b"abc"] * 20).wait(30))
    first.close()
    with depots.open() as second:
        assert second.recovery == {"blocks": 20, "damaged": 0, "superseded": 0, "created": False}
        ns = second.namespace("m", "f", 1)
        assert ns.where(names) == ["Dax"] * 20
        out = [bytearray(3) for _ in names]
        assert all(ns.get(names, out).wait(30))
        assert out == [b"abc"] * 20
    with pytest.raises(kvdepot.ClosedError):
        ns.prefix(names)
