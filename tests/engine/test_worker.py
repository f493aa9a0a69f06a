"""The moving side on a real depot, without an engine: KV caches in host memory and on a device."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

import torch
from kvdepot import vllm_cuda
from kvdepot.vllm_manager import Group, KvdepotManager
from kvdepot.vllm_worker import KvdepotWorker
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
        self, worker: type[KvdepotWorker], device: str = "cpu", **tiers: dict[str, Any]
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
        self.depot = kvdepot.open(pipeline, {"cache": {"capacity": 4 << 20}, **tiers})
        namespace = self.depot.namespace("m", "int8", 16, contiguous=True)
        self.manager = KvdepotManager(self.depot, 1, lookup_wait_seconds=0.3)
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
        while not (results := self.worker.get_finished()):
            assert time.monotonic() < end
        assert [(result.job_id, result.success) for result in results] == [(self.jobs, True)]
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
    for module in ("vllm_manager", "vllm_worker"):
        monkeypatch.setattr(f"kvdepot.{module}.RETRY_SECONDS", 0.2)
    a = key("a")
    world.store([a], [0, 1])
    stored = world.content(0, 1)
    world.worker.shutdown()
    attach = kvdepot.attach
    with monkeypatch.context() as nobody:
        nobody.setattr(kvdepot, "attach", lambda _: attach("/nowhere.sock"))
        assert world.load([a], [2, 3]) == {2, 3}
        assert world.lookup(a) is LookupResult.MISS, "it would fail again without end"
    time.sleep(0.25)
    assert world.lookup(a) is LookupResult.HIT
    assert world.load([a], [4, 5]) == set()
    assert all(torch.equal(*pair) for pair in zip(world.content(4, 5), stored, strict=True))
    assert world.depot.stats()["tiers"]["Cache"]["corrupt_blocks"] == 0


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
    assert pinned == [cache.nbytes] != [dax.nbytes]
    world.close()
