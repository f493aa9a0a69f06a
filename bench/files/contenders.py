"""The contenders of run.py beside kvdepot, each with files of its own in one directory."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from contest import PATIENCE, TOKENS, Contender, Contest, InMemory
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from typing_extensions import override
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


class VllmFs(InMemory):
    """vLLM's secondary tier `fs`, as its scheduler drives it: one job a call."""

    def __init__(self, contest: Contest, folder: Path) -> None:
        super().__init__(contest)
        config = SimpleNamespace(
            groups=[],
            parallel=SimpleNamespace(
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                rank=0,
                is_parallelism_agnostic=True,
            ),
            canonical_layout=False,
            kv_cache_layout=None,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="uint8"),
            cache=SimpleNamespace(tokens_per_hash=TOKENS),
        )
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        view = memoryview(self.memory).cast("B", list(contest.content.shape))
        self.tier = FileSystemTierManager(spec, view, "fs", str(folder))
        if not self.tier._use_o_direct:
            raise RuntimeError(f"{folder} takes no direct I/O")

    def _all(self, submit: Callable[[TransferJob], None], number: int, is_load: bool) -> None:
        for job_id, job in enumerate(self.contest.jobs):
            keys = [make_offload_key(key, 0) for key in self.keys(number, job)]
            chunks = np.arange(job.start, job.stop)
            context: Any = None
            submit(TransferJob(job_id, keys, chunks, is_load, context))
        self.tier.drain_jobs()
        if not all(result.success for result in self.tier.get_finished_jobs()):
            raise RuntimeError("vLLM: not every block was moved")

    @override
    def store(self, number: int) -> None:
        self._all(self.tier.submit_store, number, False)

    @override
    def load(self, number: int) -> None:
        self._all(self.tier.submit_load, number, True)

    @override
    def close(self) -> None:
        self.tier.shutdown()


class LmcacheDisk(Contender):
    """LMCache's LocalDiskBackend, with `use_odirect`."""

    def __init__(self, contest: Contest, folder: Path) -> None:
        self.contest = contest
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        block, count = contest.block, contest.count
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, TOKENS, 1, block // 2 // TOKENS),
            chunk_size=TOKENS,
        )
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=(2 * count * block + (64 << 20)) / 2**30,
            local_disk=f"{folder}/",
            max_local_disk_size=1024,
            extra_config={"use_odirect": True, "disk_io_threads": len(contest.jobs)},
        )
        self.cpu = LocalCPUBackend(config, metadata, "cpu")
        self.disk = LocalDiskBackend(config, self.loop, self.cpu, "cpu", metadata=metadata)
        self.objects = self.cpu.batched_allocate(
            torch.Size((2, 1, TOKENS, block // 2 // TOKENS)),
            torch.uint8,
            count,
            MemoryFormat.KV_2LTD,
            busy_loop=False,
        )
        for at, chunk in enumerate(self.objects):
            self._view(chunk)[:] = contest.content[at]
        self.loaded: list[Any] = []

    def _view(self, chunk: Any) -> Any:
        memory = (ctypes.c_uint8 * self.contest.block).from_address(chunk.data_ptr)
        return np.frombuffer(memory, dtype=np.uint8)

    def _keys(self, number: int) -> list[CacheEngineKey]:
        first = 1 + number * self.contest.count
        count = self.contest.count
        return [CacheEngineKey("bench", 1, 0, first + at, torch.uint8) for at in range(count)]

    @override
    def store(self, number: int) -> None:
        done = threading.Semaphore(0)
        keys = self._keys(number)
        self.disk.batched_submit_put_task(
            keys, self.objects, on_complete_callback=lambda key: done.release()
        )
        for _ in keys:
            if not done.acquire(timeout=PATIENCE):
                raise RuntimeError("LMCache: not every block was stored")

    @override
    def load(self, number: int) -> None:
        self.loaded = self.disk.batched_get_blocking(self._keys(number))

    @override
    def wipe(self) -> None:
        """It loads into memory of its own."""

    @override
    def is_right(self) -> bool:
        return len(self.loaded) == self.contest.count and all(
            chunk is not None and np.array_equal(self._view(chunk), self.contest.content[at])
            for at, chunk in enumerate(self.loaded)
        )

    @override
    def settle(self) -> None:
        for chunk in self.loaded:
            chunk.ref_count_down()
        self.loaded = []

    @override
    def close(self) -> None:
        for chunk in self.objects:
            chunk.ref_count_down()
        self.objects = []
        self.disk.close()
        self.cpu.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
