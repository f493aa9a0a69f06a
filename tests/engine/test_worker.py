"""The moving side on a real depot, without an engine: KV caches in host memory and on a device."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

import torch
from kvdepot.vllm import cuda as vllm_cuda
from kvdepot.vllm.jobs import Group, Job, Moving, Part
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.messages import Placements
from kvdepot.vllm.spec import KvdepotSpec
from kvdepot.vllm.worker import KvdepotConnectorWorker, KvdepotWorker
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
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

pytestmark = pytest.mark.integration

PAGE = 8192
LAYERS = 2
BLOCKS = 8
# vLLM's blocks to a stored block.
CHUNK = 2


class HostHandler:
    """In place of vLLM's handler, which asserts a device: the same rows, copied at once."""

    def __init__(
        self,
        gpu_tensors: list[torch.Tensor],
        cpu_tensors: list[torch.Tensor],
        blocks_per_chunk: int,
        layer_refs_per_group: list[list[CanonicalKVCacheRef]],
        gpu_to_cpu: bool,
        host_memory_is_pinned: bool,
    ) -> None:
        self.sides = [(gpu_tensors, 1), (cpu_tensors, blocks_per_chunk)]
        if not gpu_to_cpu:
            self.sides.reverse()
        (self.refs,) = layer_refs_per_group
        self.done: list[TransferResult] = []

    def transfer_async(self, job_id: int, source: Any, destination: Any) -> bool:
        device = source if isinstance(source, GPULoadStoreSpec) else destination
        (count,), (index,) = device.group_sizes, device.block_indices
        for ref in self.refs:
            addresses = []
            for spec, (tensors, chunk) in zip((source, destination), self.sides, strict=True):
                found = torch.empty(count, dtype=torch.int64).numpy().view("uint64")
                tensor = tensors[ref.tensor_idx]
                compute_sub_block_ptrs(spec.block_ids, chunk, found, tensor, index % chunk)
                addresses.append(found)
            for start, end in zip(*addresses, strict=True):
                ctypes.memmove(int(end), int(start), ref.page_size_bytes)
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, jobs: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        pass


def key(name: str) -> OffloadKey:
    return make_offload_key(hashlib.sha256(name.encode()).digest(), 0)


class World:
    """A depot, the manager over it, and one worker with small KV caches."""

    def __init__(
        self,
        worker: type[KvdepotWorker],
        device: str = "cpu",
        service: kvdepot.Depot | None = None,
        **tiers: dict[str, Any],
    ) -> None:
        self.caches = [
            torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8, device=device)
            for _ in range(LAYERS)
        ]
        self.worker = worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(cache, PAGE) for cache in self.caches],
                [[CanonicalKVCacheRef(layer, PAGE) for layer in range(LAYERS)]],
            ),
            0,
            CHUNK,
        )
        pipeline = "|".join(["Cache", *(tier.capitalize() for tier in tiers)])
        self.depot = service or kvdepot.open(pipeline, {"cache": {"capacity": 4 << 20}, **tiers})
        namespace = self.depot.namespace("m", "int8", 16, contiguous=True)
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
        end = time.monotonic() + 30
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
        return self.manager.lookup(each, ReqContext("lookup"))


@pytest.fixture(params=["host", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param == "host":
        made = World(KvdepotWorker)
    elif request.param == "stand-in":
        monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", HostHandler)
        made = World(vllm_cuda.KvdepotCudaWorker)
    else:
        if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
            pytest.skip("gpu: this vLLM is built without CUDA")
        made = World(vllm_cuda.KvdepotCudaWorker, "cuda")
    yield made
    made.close()


def test_what_was_stored_comes_back(world: World) -> None:
    a, b = key("a"), key("b")
    stored = world.content(0, 1, 2, 3)
    world.store([a, b], [0, 1, 2, 3])
    # From the second of vLLM's blocks on, and not the last: vLLM has those.
    assert world.load([a, b], [7, 5], skip=1) == set()
    for found, expected in zip(world.content(7, 5), stored, strict=True):
        assert torch.equal(found, expected[1:3])


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


def test_a_worker_that_cannot_attach_costs_no_block(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("manager", "worker"):
        monkeypatch.setattr(f"kvdepot.vllm.{module}.RETRY_SECONDS", 0.2)
    a = key("a")
    world.store([a], [0, 1])
    stored = world.content(0, 1)
    world.worker.shutdown()
    attach = kvdepot.attach
    with monkeypatch.context() as nobody:
        nobody.setattr(kvdepot, "attach", lambda *_, **__: attach("/nowhere.sock"))
        assert world.load([a], [2, 3]) == {2, 3}
        assert world.lookup(a) is LookupResult.MISS, "it would fail again without end"
    time.sleep(0.25)
    assert world.lookup(a) is LookupResult.HIT
    assert world.load([a], [4, 5]) == set()
    assert all(torch.equal(*pair) for pair in zip(world.content(4, 5), stored, strict=True))
    assert world.depot.stats()["tiers"]["Cache"]["corrupt_blocks"] == 0


@pytest.mark.parametrize("kind", ["host", "stand-in"])
def test_a_worker_goes_over_to_the_next_service(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", HostHandler)
    settings = {
        "dax": {"path": str(tmp_path / "arena.kvd"), "capacity": 8 << 20},
        "socket": str(tmp_path / "s"),
    }
    service = kvdepot.open("Dax", settings)
    worker = KvdepotWorker if kind == "host" else vllm_cuda.KvdepotCudaWorker
    world = World(worker, service=kvdepot.open(f"unix:{tmp_path / 's'}", {"lanes": 1}))
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
    end = time.monotonic() + 10
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


def test_the_driver_pins_memory_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", HostHandler)
    monkeypatch.setattr(vllm_cuda, "PIN_MEMORY", True)
    monkeypatch.setattr(vllm_cuda, "host_register", lambda _, size: pinned.append(size) or True)
    monkeypatch.setattr(vllm_cuda, "host_unregister", lambda _: None)
    arena = {"path": str(tmp_path / "arena.kvd"), "capacity": 64 << 20}
    world = World(vllm_cuda.KvdepotCudaWorker, dax=arena)
    world.store([key("a")], [0, 1])
    (cache, dax) = world.worker._mover.media
    for medium in range(2):
        world.worker._handlers(world.worker._mover, medium)
    world.close()
    assert pinned == [cache.nbytes] != [dax.nbytes]


def test_blocks_move_while_the_driver_still_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    pins, unpinned, pinned = threading.Event(), list[int](), list[int]()
    handlers: list[bool] = []

    class Handler(HostHandler):
        def __init__(self, **made: Any) -> None:
            super().__init__(**made)
            handlers.append(made["host_memory_is_pinned"])

    def register(address: int, size: int) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        assert pins.wait(30)
        pinned.append(address)
        return True

    monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", Handler)
    monkeypatch.setattr(vllm_cuda, "PIN_MEMORY", True)
    monkeypatch.setattr(vllm_cuda, "host_register", register)
    monkeypatch.setattr(vllm_cuda, "host_unregister", unpinned.append)
    world = World(vllm_cuda.KvdepotCudaWorker)
    stored = world.content(0, 1)
    world.store([key("a")], [0, 1])
    assert world.load([key("a")], [2, 3]) == set()
    assert handlers == [False, False]
    pins.set()
    (medium,) = world.worker._media.values()
    medium._pinning.join()
    assert world.load([key("a")], [4, 5]) == set()
    assert handlers == [False, False, True]
    for blocks in ((2, 3), (4, 5)):
        assert all(map(torch.equal, world.content(*blocks), stored))
    world.close()
    assert pinned == unpinned != []


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


def test_completed_copies_are_forgotten_and_every_part_of_a_job_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", HostHandler)
    world = World(vllm_cuda.KvdepotCudaWorker)
    for n in range(20):
        world.store([key(f"{n}")], [0, 1])
        assert world.load([key(f"{n}")], [2, 3]) == set()
    (medium,) = world.worker._media.values()
    kept = [direction._pending for direction in medium._directions.values()]
    assert len(kept) == 2
    assert not any(kept)

    asked: list[str] = []

    class Move:
        done = False

        def __init__(self, name: str) -> None:
            self.name = name

        def step(self) -> None:
            asked.append(self.name)

    monkeypatch.setattr(vllm_cuda, "_Transfer", Move)
    moves: Any = [Moving(Part(0, 0, [], []), [], Move(n)) for n in ("first", "second", "third")]
    assert not world.worker._advance(Job(0, load=True, parts=[], started=0.0, moves=moves))
    assert asked == ["first", "second", "third"], "asking is what begins a second step"
    world.close()


def test_an_owner_that_goes_before_the_copy_costs_the_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_cuda, "SingleDirectionOffloadingHandler", HostHandler)
    world = World(vllm_cuda.KvdepotCudaWorker)
    world.store([key("a")], [0, 1])
    for medium in world.worker._media.values():
        medium.close()
    world.worker._media.clear()
    mover: Any = world.worker._mover

    class Gone:
        """It has let the media go."""

        media: tuple[memoryview, ...] = ()

        def __getattr__(self, name: str) -> Any:
            return getattr(mover, name)

    world.worker._mover = Gone()
    assert world.load([key("a")], [2, 3]) == {2, 3}
    world.worker._mover = mover
    world.close()


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
