"""Restores: staged, only the consecutive hits, and ahead of their use."""

from __future__ import annotations

from typing import Any

import kvdepot
import pytest

pytestmark = pytest.mark.unit


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(count)]


def blocks(count: int, length: int = 70_001) -> list[bytes]:
    return [
        bytes((number * 7 + at) % 251 for at in range(64)) * (length // 64)
        for number in range(count)
    ]


def test_a_staged_get_delivers_the_same_bytes(ns: kvdepot.Namespace) -> None:
    stored = blocks(6)
    assert all(ns.put(keys(6), stored).wait(30))
    rooms = [bytearray(len(block) + 3) for block in stored]
    targets = [memoryview(room)[3:] for room in rooms]
    assert ns.get(keys(6), targets, staged=True).wait(30) == [True] * 6
    assert [bytes(target) for target in targets] == stored


def test_a_prefix_get_touches_nothing_behind_the_first_miss(ns: kvdepot.Namespace) -> None:
    stored = blocks(6)
    kept = [0, 1, 3, 4]
    ns.put([keys(6)[at] for at in kept], [stored[at] for at in kept]).wait(30)
    targets = [bytearray(len(block)) for block in stored]
    task = ns.get(keys(6), targets, prefix=True)
    assert task.wait(30) == [True, True, False, False, False, False]
    assert task.errors == [None, None, "miss", "miss", "miss", "miss"]
    assert targets[:2] == stored[:2]
    assert not any(any(target) for target in targets[2:])
    holes = ns.get(keys(6), targets, staged=True).wait(30)
    assert holes == [True, True, False, True, True, False]


def test_a_prefetch_brings_blocks_near(depots: Any) -> None:
    def opened() -> tuple[kvdepot.Depot, kvdepot.Namespace]:
        depot = depots.open(promote=False)
        return depot, depot.namespace(model="m", dtype="float32", block_tokens=16)

    depot, ns = opened()
    ns.put(keys(5), blocks(5)).wait(30)
    depot.close()
    depot, ns = opened()
    assert ns.where(keys(5)) == ["Dax"] * 5
    task = ns.prefetch(keys(6))
    assert len(task) == 6
    assert task.wait(30) == [True] * 5 + [False]
    assert task.errors[5] == "miss"
    assert ns.where(keys(5)) == ["Cache"] * 5


def test_prefetches_of_a_closed_depot_are_refused(
    depot: kvdepot.Depot, ns: kvdepot.Namespace
) -> None:
    depot.close()
    with pytest.raises(kvdepot.ClosedError):
        ns.prefetch(keys(1))
    with pytest.raises(kvdepot.ConfigError):
        kvdepot.check("Cache", {"staging_slab": "1MiB", "staging_regions": 17})
