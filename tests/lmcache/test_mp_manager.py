"""LMCache's storage manager of the multi-process mode over kvdepot, DRAM level and all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.storage_manager import StorageManager

from . import mp
from .mp import CHUNK_BYTES

LAYOUT = MemoryLayoutDesc([torch.Size([CHUNK_BYTES])], [torch.uint8])
Opened = Callable[..., "Manager"]


class Manager:
    """LMCache's storage manager, used as its server uses it."""

    def __init__(self, l1_bytes: int, *specs: str) -> None:
        memory = L1MemoryManagerConfig(l1_bytes, use_lazy=False, shm_name="")
        config = StorageManagerConfig(
            L1ManagerConfig(memory), EvictionConfig("LRU"), mp.configs(*specs)
        )
        self.lmcache = StorageManager(config)
        self.closed = False

    def write(self, names: list[ObjectKey]) -> None:
        for name, made in self.lmcache.reserve_write(names, LAYOUT).items():
            made.raw_data[:CHUNK_BYTES].copy_(mp.content(name))
        self.lmcache.finish_write(names)

    def prefetch(
        self, names: list[ObjectKey], policy: Any = "prefix", layout: MemoryLayoutDesc = LAYOUT
    ) -> list[bool]:
        """Which of the chunks are in DRAM, and locked there, once the prefetch has ended."""
        group = GroupedObjectKeys(names, 0, layout)
        handle = self.lmcache.submit_prefetch_task(
            PrefetchTaskSpec([group], fetching_policy=policy)
        )
        assert self.lmcache.wait_prefetch_status(handle, 60)
        result = self.lmcache.query_prefetch_status(handle)
        assert result is not None
        return [result.hit_cells[0].test(index) for index in range(len(names))]

    def read(
        self, names: list[ObjectKey], policy: Any = "prefix", layout: MemoryLayoutDesc = LAYOUT
    ) -> list[bool]:
        """Prefetches, checks the bytes of what was found, and lets it go."""
        found = self.prefetch(names, policy, layout)
        there = [name for name, hit in zip(names, found, strict=True) if hit]
        with self.lmcache.read_prefetched_results(there) as objects:
            assert objects is not None
            for name, made in zip(there, objects, strict=True):
                assert torch.equal(made.raw_data[:CHUNK_BYTES], mp.content(name))
        self.lmcache.finish_read_prefetched(there)
        return found

    def usage(self) -> Any:
        [(_, adapter)] = self.lmcache.l2_adapters()
        return adapter.get_usage()

    def settle(self, reached: Callable[[], bool]) -> None:
        """Waits until every store has ended, and for `reached`."""
        deadline = time.monotonic() + 60
        looks = 0
        # Between two of LMCache's counts a store is in neither: what is seen twice has ended.
        while looks < 2:
            looks = looks + 1 if reached() and not self.busy() else 0
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def clear(self, stored: int) -> None:
        """Empties DRAM once kvdepot has so many bytes."""
        self.settle(lambda: self.usage().total_bytes_used >= stored)
        self.lmcache.clear(force=True)
        assert self.lmcache.get_l1_usage()[0] == 0

    def busy(self) -> int:
        status = self.lmcache.report_status()
        stores = status["store_controllers"].values()
        under_way = [one["in_flight_task_count"] + one["pending_keys_count"] for one in stores]
        # A store ends with its chunks unlocked; clearing them before would pull them from under it.
        locked = [one["read_locked_count"] for one in status["l1_managers"].values()]
        return sum(under_way + locked)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.lmcache.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    managers: list[Manager] = []

    def go(l1_bytes: int, *specs: str) -> Manager:
        managers.append(Manager(l1_bytes, *specs))
        return managers[-1]

    yield go
    for manager in managers:
        manager.close()


@pytest.fixture(params=list(mp.SURFACES))
def spec(request: pytest.FixtureRequest, tmp_path: Path, pipeline: str) -> str:
    return mp.spec(request.param, tmp_path, pipeline=pipeline)


def test_chunks_written_come_back_after_dram_is_emptied(opened: Opened, spec: str):
    manager = opened(16 << 20, spec)
    names = mp.keys(range(40))
    manager.write(names)
    manager.clear(40 * CHUNK_BYTES)
    assert all(manager.read(names))


def test_a_chunk_of_several_tensors_is_one_block(opened: Opened, spec: str):
    manager = opened(16 << 20, spec)
    shapes = [torch.Size([CHUNK_BYTES // 2]), torch.Size([CHUNK_BYTES // 8])]
    layout = MemoryLayoutDesc(shapes, [torch.uint8, torch.float32])
    names = mp.keys(range(6))
    for name, made in manager.lmcache.reserve_write(names, layout).items():
        made.raw_data[:CHUNK_BYTES].copy_(mp.content(name))
    manager.lmcache.finish_write(names)
    manager.clear(6 * CHUNK_BYTES)
    assert all(manager.read(names, layout=layout))


def test_a_prefetch_stops_at_the_first_miss_and_a_full_one_keeps_holes(opened: Opened, spec: str):
    manager = opened(16 << 20, spec)
    names = mp.keys(range(10))
    manager.write([*names[:4], *names[5:]])
    manager.clear(9 * CHUNK_BYTES)
    assert manager.read(names) == [True] * 4 + [False] * 6
    manager.lmcache.clear(force=True)
    assert manager.read(names, "full") == [True] * 4 + [False] + [True] * 5


def test_everything_is_there_for_the_next_server(opened: Opened, spec: str):
    # LMCache's own backend keeps the bytes and forgets the index.
    names = mp.keys(range(20))
    manager = opened(16 << 20, spec)
    manager.write(names)
    manager.clear(20 * CHUNK_BYTES)
    manager.close()
    assert all(opened(16 << 20, spec).read(names))


def test_ranks_of_a_split_model_have_chunks_of_their_own(opened: Opened, spec: str):
    # LMCache's own backend is silently absent there.
    manager = opened(16 << 20, spec)
    ranks = [ObjectKey.ComputeKVRank(2, rank, 2, rank) for rank in (0, 1)]
    names = [mp.keys(range(6), kv_rank=rank) for rank in ranks]
    for some in names:
        manager.write(some)
    manager.clear(12 * CHUNK_BYTES)
    for some in names:
        assert all(manager.read(some))


def test_a_prefetch_of_more_than_dram_holds_ends(opened: Opened, spec: str):
    # LMCache's own in-process backend waits for ever for room in a full CPU pool.
    manager = opened(2 << 20, spec)
    names = mp.keys(range(64))
    for at in range(0, 64, 8):
        manager.write(names[at : at + 8])
        manager.clear((at + 8) * CHUNK_BYTES)
    found = manager.read(names)
    assert not all(found)
    for at in range(0, 64, 8):
        manager.lmcache.clear(force=True)
        assert all(manager.read(names[at : at + 8]))


def test_a_store_that_fails_gives_dram_back(opened: Opened, spec: str):
    # LMCache's own backend leaks the CPU buffers of a put that finds no room.
    manager = opened(128 << 20, spec)
    size = mp.ARENA_BYTES + 4096
    layout = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
    names = mp.keys(range(2))
    assert len(manager.lmcache.reserve_write(names, layout)) == 2
    manager.lmcache.finish_write(names)

    def emptied() -> bool:
        # Without force: what a store still held would stay.
        manager.lmcache.clear()
        return bool(manager.lmcache.get_l1_usage()[0] == 0)

    manager.settle(emptied)
    manager.write(small := mp.keys(range(10, 20)))
    manager.clear(10 * CHUNK_BYTES)
    assert all(manager.read(small))


def test_lmcaches_eviction_keeps_its_watermark(opened: Opened, tmp_path: Path):
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.5, "eviction_ratio": 0.5}
    manager = opened(64 << 20, mp.spec("adapter", tmp_path, {"eviction": eviction}))
    names = mp.keys(range(400))
    for at in range(0, 400, 40):
        manager.write(names[at : at + 40])
    manager.settle(lambda: manager.usage().usage_fraction < 0.5)
    assert manager.usage().total_bytes_used > 0


def test_quotas_by_salt_hold_also_after_a_restart(opened: Opened, tmp_path: Path):
    eviction = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    given = mp.spec("adapter", tmp_path, {"eviction": eviction})
    plain = mp.spec("adapter", tmp_path)
    manager = opened(16 << 20, plain)
    mine, others = (mp.keys(range(20), cache_salt=salt) for salt in ("mine", "others"))
    manager.write(mine + others)
    manager.clear(40 * CHUNK_BYTES)
    manager.close()
    # This server has stored nothing yet; it evicts whom it gave no quota.
    manager = opened(16 << 20, given)
    manager.lmcache.quota_manager.set_quota("mine", 1 << 30)
    left = {"mine": 20 * CHUNK_BYTES}
    manager.settle(lambda: manager.lmcache.get_usage_bytes_by_cache_salt() == left)
    assert all(manager.read(mine))
    assert not any(manager.read(others))


def test_exactly_the_injected_loads_are_misses(opened: Opened, tmp_path: Path):
    for surface in mp.SURFACES:
        folder = tmp_path / surface
        folder.mkdir()
        inner = json.loads(mp.spec(surface, folder))
        manager = opened(
            16 << 20, json.dumps({"type": "fault_inject", "inner": inner, "gap_indices": [2, 5]})
        )
        names = mp.keys(range(8))
        manager.write(names)
        manager.clear(8 * CHUNK_BYTES)
        assert manager.read(names, "full") == [at not in (2, 5) for at in range(8)]
        manager.lmcache.clear(force=True)
        assert manager.read(names) == [True, True] + [False] * 6
