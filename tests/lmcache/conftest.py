"""LMCache's own classes over kvdepot: its CPU memory, its storage manager, chunks and keys."""

from __future__ import annotations

import os

# Before LMCache is imported: it reports its usage otherwise.
os.environ["DO_NOT_TRACK"] = "1"
os.environ["LMCACHE_TRACK_USAGE"] = "false"

import contextlib
import itertools
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager

from . import pipelines

# A chunk of 64 tokens is 64 KiB.
LAYERS, HEADS, HEAD, TOKENS = 2, 4, 32, 64
DTYPE = torch.float16
ARENA_BYTES = 64 << 20
CHUNK_BYTES = 2 * LAYERS * TOKENS * HEADS * HEAD * DTYPE.itemsize


class Engine:
    """What a process of LMCache's in-process mode has, with kvdepot as its plug-in."""

    def __init__(self, folder: Path, pipeline: str = pipelines.DEFAULT) -> None:
        self.folder = folder
        self.pipeline = pipeline
        self._open: list[Any] = []

    def tiers(self) -> dict[str, Any]:
        """Where chunks are: for the default as LMCache's own backend has it."""
        if self.pipeline == pipelines.DEFAULT:
            path = str(self.folder / "arena")
            return {"dax.device_path": path, "dax.max_dax_size": ARENA_BYTES / (1 << 30)}
        found = pipelines.settings(self.pipeline, self.folder, ARENA_BYTES)
        return {f"kvdepot.{name}": value for name, value in found.items()}

    def config(self, name: str = "dax", cpu_mib: int = 32, **options: Any) -> LMCacheEngineConfig:
        extra = {
            f"storage_plugin.{name}.module_path": "kvdepot.lmcache",
            f"storage_plugin.{name}.class_name": "KvdepotBackend",
            **self.tiers(),
            "kvdepot.socket": str(self.folder / "socket"),
            "kvdepot.lock_wait": 0,
            **options.pop("extra", {}),
        }
        return LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=options.pop("local_cpu", False),
            max_local_cpu_size=cpu_mib / 1024,
            storage_plugins=[name],
            extra_config={key: value for key, value in extra.items() if value is not None},
            **options,
        )

    def metadata(self, rank: int = 0, world: int = 1, **options: Any) -> LMCacheMetadata:
        return LMCacheMetadata(
            model_name="model",
            world_size=world,
            local_world_size=world,
            worker_id=rank,
            local_worker_id=rank,
            kv_dtype=DTYPE,
            kv_shape=(LAYERS, 2, TOKENS, HEADS, HEAD),
            chunk_size=TOKENS,
            **options,
        )

    def manager(self, rank: int = 0, world: int = 1, role: str = "worker", **options: Any) -> Any:
        """LMCache's storage manager, which loads the plug-in as its configuration says."""
        manager = StorageManager(
            self.config(**options), self.metadata(rank, world, role=role), EventManager()
        )
        self._open.append(manager)
        return manager

    def backend(self, rank: int = 0, world: int = 1, **options: Any) -> Any:
        """The plug-in alone, over LMCache's CPU memory."""
        from kvdepot.lmcache import KvdepotBackend

        config, metadata = self.config(**options), self.metadata(rank, world)
        cpu = LocalCPUBackend(config, metadata, "cpu")
        self._open.append(cpu)
        backend = KvdepotBackend(config=config, metadata=metadata, local_cpu_backend=cpu)
        self._open.append(backend)
        return backend

    def close(self) -> None:
        for opened in reversed(self._open):
            with contextlib.suppress(Exception):
                opened.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pipeline" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("pipelines")
        metafunc.parametrize("pipeline", only.args if only else pipelines.PIPELINES)


@pytest.fixture
def engine(tmp_path: Path, pipeline: str) -> Iterator[Engine]:
    engine = Engine(tmp_path, pipeline)
    yield engine
    engine.close()


@pytest.fixture
def backend(engine: Engine) -> Any:
    return engine.backend()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """As many as a process has at first where nobody has set more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def pinned(wanted: int, calls: int = 1) -> int:
    """How many chunks each of so many restores may pin here: a file each, an eighth of all that
    this process may have open."""
    return min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8 // calls)


class Chunks:
    """Makes keys, and chunks in LMCache's memory whose bytes follow from the key."""

    def __init__(self) -> None:
        self._hashes = itertools.count(1)

    def key(self, rank: int = 0, world: int = 1, **options: Any) -> CacheEngineKey:
        return CacheEngineKey(
            model_name="model",
            world_size=world,
            worker_id=rank,
            chunk_hash=options.pop("chunk_hash", None) or next(self._hashes),
            dtype=DTYPE,
            **options,
        )

    def keys(self, count: int, **options: Any) -> list[CacheEngineKey]:
        return [self.key(**options) for _ in range(count)]

    def chunk(
        self,
        allocator: Any,
        key: CacheEngineKey,
        tokens: int = TOKENS,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        shape: tuple[int, ...] | None = None,
    ) -> MemoryObj:
        shape = shape or (2, LAYERS, tokens, HEADS * HEAD)
        chunk = allocator.allocate(torch.Size(shape), DTYPE, fmt, busy_loop=False)
        assert chunk is not None, "the test needs more CPU memory"
        chunk.tensor.copy_(self.content(key, chunk.tensor.shape))
        return chunk

    @staticmethod
    def content(key: CacheEngineKey, shape: torch.Size) -> torch.Tensor:
        source = torch.Generator().manual_seed(zlib.crc32(key.to_string().encode()))
        return torch.randint(-1000, 1000, shape, generator=source).to(DTYPE)

    def put(self, backend: Any, keys: list[CacheEngineKey], **options: Any) -> None:
        """Stores a chunk for each key, and gives the caller's reference back."""
        allocator = backend.get_allocator_backend()
        chunks = [self.chunk(allocator, key, **options) for key in keys]
        for future in backend.batched_submit_put_task(keys, chunks) or ():
            future.result(timeout=30)
        for chunk in chunks:
            chunk.ref_count_down()

    def check(self, key: CacheEngineKey, chunk: MemoryObj | None) -> None:
        """The chunk is the key's; gives it back."""
        assert chunk is not None
        assert torch.equal(chunk.tensor, self.content(key, chunk.tensor.shape))
        chunk.ref_count_down()


@pytest.fixture
def chunks() -> Chunks:
    return Chunks()


@pytest.fixture
def in_use() -> Callable[[Any], int]:
    """How many chunks of LMCache's CPU memory are allocated."""

    def count(backend: Any) -> int:
        allocator = backend.get_allocator_backend().memory_allocator
        return int(allocator.pin_allocator.num_active_allocations)

    return count
