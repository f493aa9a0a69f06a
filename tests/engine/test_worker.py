"""The moving side on a real depot, without an engine: KV caches in host memory and on a device."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest
from cuda_double import double

pytest.importorskip("vllm")

import torch
from engine_device import DeviceWorker
from engine_manager import soon
from kvdepot.vllm.jobs import SKIP, Group, GroupPlacements
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.messages import Placements
from kvdepot.vllm.spec import KvdepotSpec
from kvdepot.vllm.worker import KvdepotConnectorWorker, KvdepotWorker, split
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    TransferResult,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

pytestmark = pytest.mark.integration

PAGE = 8192
LAYERS = 2
BLOCKS = 8
# vLLM's blocks to a stored block.
CHUNK = 2


def key(name: str) -> OffloadKey:
    return make_offload_key(hashlib.sha256(name.encode()).digest(), 0)


class World:
    """A depot, the manager over it, and one worker with small KV caches."""

    def __init__(
        self,
        worker: type[KvdepotWorker],
        device: str = "cpu",
        service: kvdepot.Depot | None = None,
        page: int = PAGE,
        **tiers: dict[str, Any],
    ) -> None:
        self.caches, self.worker = rank_of(0, worker, device, page)
        pipeline = "|".join(["Cache", *(tier.capitalize() for tier in tiers)])
        self.depot = service or kvdepot.open(pipeline, {"cache": {"capacity": 4 << 20}, **tiers})
        namespace = self.depot.namespace("m", "int8", 16)
        shared = service is not None
        self.manager = KvdepotManager(self.depot, 1, lookup_wait_seconds=0.3, shared=shared)
        self.manager.set_groups({0: Group(0, namespace, self.worker.payload_bytes())})
        self.jobs = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def content(self, *blocks: int) -> list[torch.Tensor]:
        return [cache[list(blocks)].cpu() for cache in self.caches]

    def store(self, keys: list[OffloadKey], blocks: list[int]) -> None:
        output = self.manager.prepare_store(keys, ReqContext("store"))
        assert list(output.keys_to_store) == keys
        device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        self.finish(self.worker.submit_store(self.next(), device, output.store_spec))

    def load(self, keys: list[OffloadKey], blocks: list[int], skip: int = 0) -> set[int]:
        """Load into these of vLLM's blocks; those of them that were not filled."""
        host = self.manager.prepare_load(keys, ReqContext("load"))
        device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[skip])
        self.finish(self.worker.submit_load(self.next(), host, device))
        return set().union(*self.worker.take_invalid().values())

    def next(self) -> int:
        self.jobs += 1
        return self.jobs

    def finish(self, submitted: bool) -> None:
        assert submitted
        self.worker.wait({self.jobs})
        end = time.monotonic() + 60
        done: list[TransferResult] = []
        while not any(result.job_id == self.jobs for result in done):
            assert time.monotonic() < end
            done += self.worker.get_finished()
        assert all(result.success for result in done)
        self.manager.apply(self.worker.take_reports())
        # A far tier gets its copy in the background.
        while self.manager.has_pending_work():
            assert time.monotonic() < end

    def lookup(self, each: OffloadKey) -> LookupResult:
        return soon(self.manager, each, ReqContext("lookup"))


def rank_of(
    rank: int, worker: type[KvdepotWorker], device: str, page: int
) -> tuple[list[torch.Tensor], KvdepotWorker]:
    """A rank's KV caches, and what moves them."""
    caches = [
        torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8, device=device)
        for _ in range(LAYERS)
    ]
    canonical = CanonicalKVCaches(
        [CanonicalKVCacheTensor(cache, page) for cache in caches],
        [[CanonicalKVCacheRef(layer, page) for layer in range(LAYERS)]],
    )
    return caches, worker(canonical, rank, CHUNK)


KINDS = ["host", "double", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = made_of(request.param)
    yield made
    made.close()


def made_of(kind: str, **more: Any) -> World:
    """A world of host memory, of a double's, or of a device."""
    if kind == "double" and torch.cuda.is_available():
        pytest.skip("gpu: a process has one driver, and here there is a device")
    worker = DeviceWorker if kind == "double" else KvdepotWorker
    return World(worker, "cuda" if kind == "cuda" else "cpu", **more)


def test_what_was_stored_comes_back(world: World) -> None:
    a, b = key("a"), key("b")
    stored = world.content(0, 1, 2, 3)
    world.store([a, b], [0, 1, 2, 3])
    # From the second of vLLM's blocks on, and not the last: vLLM has those.
    assert world.load([a, b], [7, 5], skip=1) == set()
    for found, expected in zip(world.content(7, 5), stored, strict=True):
        assert torch.equal(found, expected[1:3])


# Of 16 tokens: MLA in bfloat16 and in fp8 with its scales, grouped heads in fp8, and an odd one.
@pytest.mark.parametrize("page", [16 * 576 * 2, 16 * 656, 16 * 2 * 8 * 128, 4097])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_any_length_come_back(kind: str, page: int) -> None:
    world = made_of(kind, page=page)
    keys = [key("a"), key("b")]
    stored = world.content(0, 1, 2, 3)
    world.store(keys, [0, 1, 2, 3])
    beside = world.content(4, 5)
    assert world.load(keys, [7, 6, 2, 1]) == set()
    assert all(map(torch.equal, world.content(7, 6, 2, 1), stored))
    assert all(map(torch.equal, world.content(4, 5), beside))
    world.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_moves_its_part_and_one_that_fails_decides(kind: str) -> None:
    world = made_of(kind)
    caches, other = rank_of(1, type(world.worker), str(world.caches[0].device), PAGE // 2)
    parts = world.worker.payload_bytes() + other.payload_bytes()
    world.manager.shutdown()
    world.depot = kvdepot.open("Cache", {"cache": {"capacity": 4 << 20}})
    world.manager = KvdepotManager(world.depot, 2, lookup_wait_seconds=0.3)
    group = Group(0, world.depot.namespace("m", "int8", 16), parts)
    world.manager.set_groups({0: group})
    workers = [(world.worker, world.caches), (other, caches)]

    def move(blocks: list[int], *, load: bool) -> list[set[int]]:
        context = ReqContext("load" if load else "store")
        if load:
            placements: Any = world.manager.prepare_load([key("a")], context)
        else:
            placements = world.manager.prepare_store([key("a")], context).store_spec
        device = GPULoadStoreSpec(blocks, group_sizes=[2], block_indices=[0])
        invalid = []
        for worker, _ in workers:
            ends = (placements, device) if load else (device, placements)
            submit = worker.submit_load if load else worker.submit_store
            assert submit(world.next(), *ends)
            worker.wait({world.jobs})
            assert [result.success for result in worker.get_finished()] == [True]
            invalid.append(set().union(*worker.take_invalid().values()))
            world.manager.apply(worker.take_reports())
        return invalid

    stored = [[cache[:2].cpu() for cache in caches] for _, caches in workers]
    move([0, 1], load=False)
    assert move([4, 5], load=True) == [set(), set()]
    for (_, found), expected in zip(workers, stored, strict=True):
        assert all(map(torch.equal, [cache[4:6].cpu() for cache in found], expected))

    (pin,) = group.namespace.pin([key("a")[:32]])
    with kvdepot.attach(world.depot.socket) as mover:
        ((medium, offset, _),) = mover.locate([pin.placement], part=1)
        mover.media[medium][offset + 77] ^= 0x10
    group.namespace.unpin([pin])
    assert move([6, 7], load=True) == [set(), {6, 7}]
    assert world.lookup(key("a")) is LookupResult.MISS
    other.shutdown()
    world.close()


def test_a_corrupt_block_is_not_delivered_and_leaves_the_index(world: World) -> None:
    keys = [key("a"), key("b"), key("c")]
    stored = world.content(0, 1, 2, 3, 4, 5)
    world.store(keys, [0, 1, 2, 3, 4, 5])
    group = world.manager._groups[0]
    pins = group.namespace.pin([keys[1][:32]])
    with kvdepot.attach(world.depot.socket) as mover:
        ((medium, offset, _),) = mover.locate([pins[0].placement])
        mover.media[medium][offset + PAGE + 77] ^= 0x10
    group.namespace.unpin(pins)
    for cache in world.caches:
        cache.zero_()
    assert world.load(keys, [7, 6, 5, 4, 3, 2]) == {5, 4}
    for found, expected in zip(world.content(7, 6, 3, 2), stored, strict=True):
        assert torch.equal(found, expected[[0, 1, 4, 5]])
    assert [world.lookup(each) for each in keys] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]
    world.store([keys[1]], [4, 5])
    assert world.lookup(keys[1]) is LookupResult.HIT


def test_a_load_without_its_kv_group_is_not_taken_for_whole(world: World) -> None:
    """As after a quarantine between lookup and load."""
    keys = [key("a"), key("b")]
    stored = world.content(0, 1, 2, 3)
    world.store(keys, [0, 1, 2, 3])
    before = world.content(4, 5, 6, 7)
    groups = world.manager._groups
    world.manager.set_groups({})
    assert world.load(keys, [7, 6, 5], skip=1) == {7, 6, 5}
    assert all(map(torch.equal, world.content(4, 5, 6, 7), before))
    world.manager.set_groups(groups)
    assert world.load(keys, [4, 5, 6, 7]) == set()
    assert all(map(torch.equal, world.content(4, 5, 6, 7), stored))


def test_every_block_of_a_load_is_in_a_part() -> None:
    """In the order of the scheduler's, which reports name blocks by."""
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], [2, 0, 3, 1], [0, 0, 1, 0])
    placements = Placements(1, "", [GroupPlacements(2, [b"p", b"q"])])
    parts = split(placements, blocks, CHUNK, load=True)
    assert [(part.group, part.first, part.placements) for part in parts] == [
        (0, 0, [None]),
        (2, 1, [b"p", b"q"]),
        (3, 3, [None]),
    ]
    assert [part.rows.tolist() for part in parts] == [
        [[1, 2]],
        [[SKIP, 3], [4, 5]],
        [[6, SKIP]],
    ]
    # A store has what was reserved.
    assert [part.group for part in split(placements, blocks, CHUNK, load=False)] == [2]


def test_a_worker_that_cannot_attach_costs_no_block(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("manager", "worker"):
        monkeypatch.setattr(f"kvdepot.vllm.{module}.RETRY_SECONDS", 3600.0)
    a = key("a")
    world.store([a], [0, 1])
    stored = world.content(0, 1)
    world.worker.shutdown()
    attach = kvdepot.attach
    with monkeypatch.context() as nobody:
        nobody.setattr(kvdepot, "attach", lambda *_, **__: attach("/nowhere.sock"))
        assert world.load([a], [2, 3]) == {2, 3}
        assert world.lookup(a) is LookupResult.MISS, "it would fail again without end"
    # An hour later.
    world.manager._lookups_after = world.worker._attach_after = 0.0
    assert world.lookup(a) is LookupResult.HIT
    assert world.load([a], [4, 5]) == set()
    assert all(torch.equal(*pair) for pair in zip(world.content(4, 5), stored, strict=True))
    assert world.depot.stats()["tiers"]["Cache"]["corrupt_blocks"] == 0


@pytest.mark.parametrize("kind", ["host", "double"])
def test_a_worker_goes_over_to_the_next_service(kind: str, tmp_path: Path) -> None:
    settings = {
        "dax": {"path": str(tmp_path / "arena.kvd"), "capacity": 8 << 20},
        "socket": str(tmp_path / "s"),
    }
    service = kvdepot.open("Dax", settings)
    world = made_of(kind, service=kvdepot.open(f"unix:{tmp_path / 's'}", {"lanes": 1}))
    a, b, c = key("a"), key("b"), key("c")
    stored = world.content(0, 1)
    world.store([a], [0, 1])
    # Copied, and not reported yet, when the service ends.
    output = world.manager.prepare_store([b], ReqContext("late"))
    device = GPULoadStoreSpec([2, 3], group_sizes=[2], block_indices=[0])
    assert world.worker.submit_store(world.next(), device, output.store_spec)
    world.worker.wait({world.jobs})
    service.close()
    first = world.worker._mover
    end = time.monotonic() + 60
    while not first.ended:
        assert time.monotonic() < end
    del first
    with kvdepot.open("Dax", settings):
        while world.lookup(a) is not LookupResult.HIT:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert world.load([a], [6, 7]) == set()
        for found, expected in zip(world.content(6, 7), stored, strict=True):
            assert torch.equal(found, expected)
        assert world.lookup(b) is LookupResult.MISS
        # The old service's worker keeps nobody waiting: it is this one.
        world.store([c], [4, 5])
        assert world.lookup(c) is LookupResult.HIT
        world.close()


def test_ranks_whose_bytes_are_the_same_read_one_part() -> None:
    """As vLLM has it where the layout is replicated: the first rank alone is asked to store."""
    world = World(KvdepotWorker)
    a = key("a")
    stored = world.content(0, 1)
    world.store([a], [0, 1])
    world.worker.rank = 1
    world.manager._ranks = 2
    world.worker.part = 0
    host = world.manager.prepare_load([a], ReqContext("load"))
    for rank, blocks in ((0, [2, 3]), (1, [4, 5])):
        world.worker.rank = rank
        device = GPULoadStoreSpec(blocks, group_sizes=[2], block_indices=[0])
        assert world.worker.submit_load(world.next(), host, device)
        world.worker.wait({world.jobs})
        assert [result.success for result in world.worker.get_finished()] == [True]
        world.manager.apply(world.worker.take_reports())
        for found, expected in zip(world.content(*blocks), stored, strict=True):
            assert torch.equal(found, expected)
    assert not world.manager.has_pending_work()
    world.close()


def test_what_is_stored_is_what_the_engine_has_computed_by_then() -> None:
    """And what is loaded is written behind what the engine still reads there."""
    library = double()
    world = made_of("double")
    world.store([key("a")], [0, 1])
    expected = world.content(0, 1)
    stream = library.double_busy_stream()
    world.worker.stream = stream
    output = world.manager.prepare_store([key("b")], ReqContext("late"))
    device = GPULoadStoreSpec([2, 3], group_sizes=[2], block_indices=[0])
    assert world.worker.submit_store(world.next(), device, output.store_spec)
    host = world.manager.prepare_load([key("a")], ReqContext("load"))
    device = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[0])
    before = world.content(4, 5)
    assert world.worker.submit_load(world.next(), host, device)
    # The engine's thread has waited for nothing: the stream goes on below.
    time.sleep(0.1)
    assert world.worker.get_finished() == []
    assert all(map(torch.equal, world.content(4, 5), before))
    # The last of what the stream computes.
    for cache in world.caches:
        cache[2:4] = 7
    library.double_release(stream)
    world.worker.rest()
    assert all(map(torch.equal, world.content(4, 5), expected))
    assert len(world.worker.get_finished()) == 2
    world.manager.apply(world.worker.take_reports())
    world.worker.stream = 0
    assert world.load([key("b")], [6, 7]) == set()
    assert all((found == 7).all() for found in world.content(6, 7))
    world.close()


def test_the_engine_sleeps_when_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdepot.vllm.compat import internals

    why = "this build of vLLM needs a driver for its allocator"
    cumem = pytest.importorskip("vllm.device_allocator.cumem", reason=why, exc_type=ImportError)
    done: list[str] = []
    # From 0.33 on vLLM tells the connector, and the allocator is left alone.
    rest_before_sleep = internals.Adapter().rest_before_sleep
    rest_before_sleep(lambda: done.append("rest"))
    allocator = SimpleNamespace(
        sleep=lambda tags=None: done.append(f"sleep {tags}"),
        discard=lambda tags: done.append(f"discard {tags}"),
    )
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    rest_before_sleep(lambda: done.append("rest"))
    allocator.sleep(("weights",))
    allocator.discard("kv_cache")
    assert done == ["rest", "sleep ('weights',)", "rest", "discard kv_cache"]


def test_a_rest_waits_for_copies_whose_stores_were_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after two minutes behind a stream that does not come on: the device is still read."""
    monkeypatch.setattr("kvdepot.vllm.worker.REST_SECONDS", 0.05)
    library = double()
    world = made_of("double")
    stream = library.double_busy_stream()
    world.worker.stream = stream
    output = world.manager.prepare_store([key("a")], ReqContext("late"))
    device = GPULoadStoreSpec([2, 3], group_sizes=[2], block_indices=[0])
    assert world.worker.submit_store(world.next(), device, output.store_spec)
    given_up = world.worker._jobs.pop(world.jobs)
    # A store is given up once its copies are under way.
    while world.worker._pages[0].synchronize(0):
        os.sched_yield()
    assert not given_up.moves[0].move.wait(0.2)
    rests = threading.Thread(target=world.worker.rest)
    rests.start()
    rests.join(0.3)
    assert rests.is_alive()
    library.double_release(stream)
    rests.join(30)
    assert not rests.is_alive()
    assert given_up.moves[0].move.wait(30)
    world.worker.stream = 0
    world.close()


def test_a_move_that_is_refused_is_a_call_that_failed() -> None:
    world = made_of("host")
    world.store([key("a")], [0, 1])
    host = world.manager.prepare_load([key("a")], ReqContext("load"))
    world.worker._mover.close()
    device = GPULoadStoreSpec([2, 3], group_sizes=[2], block_indices=[0])
    world.finish(world.worker.submit_load(world.next(), host, device))
    assert world.worker.take_invalid() == {world.jobs: {2, 3}}
    assert world.worker.faults.take() == {"load": 1}
    world.close()


def test_a_device_that_is_lost_costs_blocks_and_no_more() -> None:
    library = double()
    world = made_of("double")
    a, b = key("a"), key("b")
    world.store([a], [0, 1])
    stored = world.content(0, 1)
    library.double_lose(1)
    try:
        assert world.load([a], [2, 3]) == {2, 3}
        output = world.manager.prepare_store([b], ReqContext("store"))
        device = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[0])
        world.finish(world.worker.submit_store(world.next(), device, output.store_spec))
        assert world.lookup(b) is LookupResult.MISS
    finally:
        library.double_lose(0)
    assert world.load([a], [6, 7]) == set(), "the block is not to blame"
    assert all(map(torch.equal, world.content(6, 7), stored))
    assert world.depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 0
    world.close()


@pytest.mark.parametrize("chunk_of", [(0, 3), (3, 2), (1, 4), (0, 1), (2, 2)])
def test_a_store_that_vllm_left_blocks_out_of_stores_none_of_them(
    world: World, chunk_of: tuple[int, int]
) -> None:
    """vLLM leaves out what is outside a window, wherever that is; the rest has lost its place."""
    first, count = chunk_of
    keys = [key("a"), key("b"), key("c")]
    world.store([keys[0]], [0, 1])
    before = world.depot.stats()["tiers"]["Cache"]["blocks"]
    output = world.manager.prepare_store(keys[1:], ReqContext("store"))
    assert list(output.keys_to_store) == keys[1:]
    blocks = [4, 5, 6, 7][:count]
    device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
    if (first % CHUNK, count) == (0, 2 * CHUNK):
        pytest.fail("that one is whole")
    world.finish(world.worker.submit_store(world.next(), device, output.store_spec))
    assert world.depot.stats()["tiers"]["Cache"]["blocks"] == before
    assert world.depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 0
    assert [world.lookup(each) for each in keys[1:]] == [LookupResult.MISS] * 2
    world.store(keys[1:], [4, 5, 6, 7])
    assert [world.lookup(each) for each in keys[1:]] == [LookupResult.HIT] * 2


def replicated(rank: int, **extra: Any) -> OffloadingConfig:
    """What vLLM says of a model with MLA and two ranks."""
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=PAGE * LAYERS,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=OffloadingModelConfig("m", "bfloat16"),
        cache=OffloadingCacheConfig(16, CHUNK),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=True,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_where_ranks_have_the_same_bytes_the_first_stores_and_the_others_say_so(rank: int) -> None:
    spec = KvdepotSpec(replicated(rank, pipeline="Cache", cache={"capacity": 4 << 20}))
    cache = torch.zeros((BLOCKS, PAGE), dtype=torch.int8)
    mover = spec.get_worker(
        CanonicalKVCaches([CanonicalKVCacheTensor(cache, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]])
    )
    assert (mover.rank, mover.part) == (rank, 0)
    half = KvdepotConnectorWorker(spec, SimpleNamespace(), SimpleNamespace(kv_cache_groups=[]))
    half.worker = mover
    device = GPULoadStoreSpec([0, 1], group_sizes=[2], block_indices=[0])
    job = TransferJob(req_id="r", src_spec=device, dst_spec=Placements(1, "", []))
    half.prepare_store_kv(OffloadingConnectorMetadata({}, {5: job}, set()))
    reported = half.build_connector_worker_meta()
    if rank == 0:
        assert reported is None, "it stores, and reports then"
    else:
        assert reported is not None
        assert dict(reported.completed_jobs) == {5: 1}
        assert reported.reports == {}
    if rank == 0:
        manager = spec.get_manager()
        assert manager.writers == 1
        manager.shutdown()
