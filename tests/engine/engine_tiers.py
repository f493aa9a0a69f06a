"""vLLM's own tiering manager with kvdepot's tier behind its CPU tier, and no engine above."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine_manager import context, end_step, key
from kvdepot.vllm.tier import KvdepotTier
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

CHUNK = 64 << 10
TIER = {"type": "KvdepotTier", "module_path": "kvdepot.vllm", "weights": "w"}


def offloading_config(
    tier: dict[str, Any], chunks: int = 64, tensor_parallel: int = 1, **changes: Any
) -> OffloadingConfig:
    """What vLLM's connector makes of an engine's configuration; `changes` are for the model."""
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer.{n}",), n) for n in (0, 1)),
        worker_kv_bytes_per_block=CHUNK // tensor_parallel,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * CHUNK,
            "secondary_tiers": [TIER | tier],
        },
        engine_id=f"test-{os.getpid()}-{uuid.uuid4()}",
        model=OffloadingModelConfig(**{"name": "m", "dtype": "float32"} | changes),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=tensor_parallel,
            tp_size=tensor_parallel,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="NHD",
    )


def content(key: OffloadKey) -> bytes:
    """What is stored for a key unless a test says otherwise."""
    return (key * (CHUNK // len(key) + 1))[:CHUNK]


class Tiers:
    """One engine's tiers."""

    def __init__(self, tier: dict[str, Any], chunks: int = 64, **changes: Any) -> None:
        self.config = offloading_config(tier, chunks, **changes)
        self.manager: Any = OffloadingSpecFactory.create_spec(self.config).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KvdepotTier)
        self.slowest = 0.0
        """Of the calls that are made in the scheduler's thread."""
        self._count = 0

    @property
    def region(self) -> Path:
        """The file of vLLM's CPU tier."""
        return Path(f"/dev/shm/vllm_offload_{self.config.engine_id}.mmap")

    def close(self) -> None:
        self.manager.shutdown()

    def begin(self, *keys: OffloadKey) -> ReqContext:
        self._count += 1
        request = context(f"request-{self._count}", *keys)
        self.manager.on_new_request(request)
        return request

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.monotonic()
        answer = call(*arguments)
        self.slowest = max(self.slowest, time.monotonic() - started)
        return answer

    def step(self) -> None:
        self.timed(end_step, self.manager)

    def offer(self, request: ReqContext, *keys: OffloadKey, fill: bytes | None = None) -> int:
        """Computed, and copied to the CPU tier; how many it took."""
        found = self.timed(self.manager.prepare_store, keys, request)
        if found is None:
            return 0
        rows = self.manager.primary_tier.get_kv_memoryview()
        for each, row in zip(found.keys_to_store, found.store_spec.block_ids, strict=True):
            rows[int(row) : int(row) + 1].cast("B")[:] = fill or content(each)
        if found.keys_to_store:
            self.timed(self.manager.complete_store, found.keys_to_store, request)
        return len(found.keys_to_store)

    def settle(self, seconds: float = 120.0) -> None:
        """Until no job is under way."""
        end = time.monotonic() + seconds
        while self.manager._jobs:
            assert time.monotonic() < end, "a job does not come to an end"
            self.step()
            time.sleep(0.0005)

    def store(self, *keys: OffloadKey, fill: bytes | None = None) -> None:
        request = self.begin(*keys)
        self.offer(request, *keys, fill=fill)
        self.settle()
        self.manager.on_request_finished(request)

    def forget(self) -> None:
        """Empty vLLM's CPU tier, without the reset that all tiers are told of."""
        self.manager.primary_tier.reset_cache()

    def reset(self) -> None:
        """As vLLM's scheduler, which says from 0.33 on when no worker copies any more."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def look(self, request: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """As vLLM's scheduler in one step."""
        found = []
        for each in keys:
            found.append(self.timed(self.manager.lookup, each, request))
            if found[-1] is LookupResult.MISS:
                break
        self.step()
        return found

    def load(self, *keys: OffloadKey, seconds: float = 120.0) -> list[bytes]:
        """The chunks before the first miss, as a worker would copy them to the device."""
        request = self.begin(*keys)
        end = time.monotonic() + seconds
        waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        while waits & set(found := self.look(request, keys)):
            assert time.monotonic() < end, "a request waits without end"
            time.sleep(0.0005)
        hits = keys[: found.count(LookupResult.HIT)]
        rows = self.manager.primary_tier.get_kv_memoryview()
        spec = self.manager.prepare_load(hits, request)
        loaded = [bytes(rows[int(row) : int(row) + 1].cast("B")) for row in spec.block_ids]
        self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        return loaded


def names(text: str, count: int, group: int = 0) -> list[OffloadKey]:
    return [key(f"{text} {n}", group) for n in range(count)]
