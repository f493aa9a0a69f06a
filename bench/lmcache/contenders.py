"""The contenders of run.py, over one pool of LMCache's CPU memory and arenas in one folder."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvdepot
import numpy as np
import torch
from kvdepot.lmcache import KvdepotBackend
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.plugins.dax_backend import DaxBackend

TOKENS = 16
THREADS = min(os.cpu_count() or 1, 8)
"""LMCache's default, which kvdepot's lanes get too."""
STEP = 64
"""Bytes by which the content of one block is shifted against the one before."""


class Contest:
    """Arenas that hold the same blocks, and what restores or stores them."""

    def __init__(self, folder: Path, blocks: int, block: int) -> None:
        self.folder, self.blocks, self.block = folder, blocks, block
        self._closing = contextlib.ExitStack()
        self.metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 2, TOKENS, 1, block // 2 // TOKENS),
            chunk_size=TOKENS,
        )
        self.shape = torch.Size((2, 1, TOKENS, block // 2 // TOKENS))
        # The blocks that were stored, or the given buffers, and those that a restore allocates.
        pool = 2 * blocks * block + (64 << 20)
        self.cpu = LocalCPUBackend(self._config(pool), self.metadata, "cpu")
        self._closing.callback(self.cpu.close)
        self.keys = [
            CacheEngineKey("bench", 1, 0, 1 + number, torch.uint8) for number in range(blocks)
        ]
        self.objects = self.cpu.batched_allocate(
            self.shape, torch.uint8, blocks, MemoryFormat.KV_2LTD, busy_loop=False
        )
        self._closing.callback(lambda: [chunk.ref_count_down() for chunk in self.objects])
        warm = self.cpu.batched_allocate(
            self.shape, torch.uint8, blocks, MemoryFormat.KV_2LTD, busy_loop=False
        )
        source = np.random.default_rng(1)
        self.content = source.integers(0, 256, block + STEP * blocks, dtype=np.uint8)
        for number, (chunk, other) in enumerate(zip(self.objects, warm, strict=True)):
            self._view(chunk)[:] = self._expected(number)
            self._view(other)[:] = 0
            other.ref_count_down()
        self.restore: dict[str, Callable[[], tuple[float, Sequence[Any], bool]]] = {}

    def close(self) -> None:
        """Close what was opened, the last first."""
        self._closing.close()
        self.objects.clear()

    def contenders(self, surface: str) -> dict[str, Callable[[], float]]:
        """Name and timed call of each contender."""
        if surface == "put":
            self._put_contenders()
        else:
            getattr(self, f"_{surface}_contenders")()
        names = {name: self._timed(name) for name in self.restore}
        return names | self._copies()

    def check(self, surface: str) -> None:
        """Every contender delivers every block as it was stored."""
        for name, call in self.restore.items():
            for chunk in self.objects:
                self._view(chunk)[:: max(1, self.block // 8)] += surface != "put"
            _, chunks, owned = call()
            wrong = [
                number
                for number, chunk in enumerate(chunks)
                if chunk is None or not np.array_equal(self._view(chunk), self._expected(number))
            ]
            if owned:
                for chunk in chunks:
                    chunk.ref_count_down()
            if wrong or len(chunks) != self.blocks:
                raise RuntimeError(f"{name}: {len(wrong)} of {self.blocks} blocks are wrong")

    # ---- surfaces ------------------------------------------------------------------------------

    def _batched_get_contenders(self) -> None:
        for name, backend in (("lmcache", self._lmcache()), ("kvdepot", self._plugin())):
            backend.batched_submit_put_task(self.keys, self.objects)
            self.restore[name] = self._through(backend.batched_get_blocking)

    def _get_contenders(self) -> None:
        theirs = self._lmcache()
        theirs.batched_submit_put_task(self.keys, self.objects)
        self.restore["lmcache"] = self._through(theirs.batched_get_blocking)
        depot = kvdepot.open("Dax", self._settings())
        self._closing.callback(depot.close)
        ns = depot.namespace(model="bench", dtype="uint8", block_tokens=TOKENS)
        ids = b"".join(number.to_bytes(32, "little") for number in range(self.blocks))
        places = [(chunk.data_ptr, self.block) for chunk in self.objects]
        if not all(ns.put(ids, places).wait()):
            raise RuntimeError("kvdepot: not everything was stored")

        def get() -> tuple[float, Sequence[Any], bool]:
            start = time.perf_counter()
            ns.get(ids, places).wait()
            return time.perf_counter() - start, self.objects, False

        self.restore["kvdepot"] = get

    def _mp_contenders(self, kind: str = "native_plugin", name: str = "KvdepotNative") -> None:
        size = self._arena_bytes()
        specs = {
            "lmcache": {
                "type": "dax",
                "device_path": str(self._file("lmcache", size)),
                "max_dax_size_gb": size / 2**30,
                "slot_bytes": self.block,
                "num_load_workers": THREADS,
            },
            "kvdepot": {
                "type": kind,
                "module_path": "kvdepot.lmcache",
                "class_name": name,
                "adapter_params": self._settings(),
            },
        }
        keys = [
            ObjectKey(number.to_bytes(32, "little"), "bench", 0) for number in range(self.blocks)
        ]
        for contender, spec in specs.items():
            config = get_l2_adapter_config_class(str(spec["type"])).from_dict(spec)
            adapter = create_l2_adapter_from_registry(config)
            self._closing.callback(adapter.close)
            adapter.submit_store_task(keys, self.objects)
            _wait(adapter.get_store_event_fd())
            [stored] = adapter.pop_completed_store_tasks().values()
            if not stored.is_successful():
                raise RuntimeError(f"{contender}: not everything was stored")
            self.restore[contender] = self._load(adapter, keys)

    def _mp_adapter_contenders(self) -> None:
        self._mp_contenders("plugin", "KvdepotAdapter")

    def _put_contenders(self) -> None:
        for name, backend in (("lmcache", self._lmcache()), ("kvdepot", self._plugin())):

            def put(backend: Any = backend) -> tuple[float, Sequence[Any], bool]:
                backend.batched_remove(self.keys)
                start = time.perf_counter()
                backend.batched_submit_put_task(self.keys, self.objects)
                taken = time.perf_counter() - start
                return taken, self._stored(backend), True

            self.restore[name] = put

    def _stored(self, backend: Any) -> Sequence[Any]:
        return backend.batched_get_blocking(self.keys)

    # ---- contenders ----------------------------------------------------------------------------

    def _lmcache(self) -> Any:
        size = self._arena_bytes()
        extra = {
            "dax.device_path": str(self._file("lmcache", size)),
            "dax.max_dax_size": size / 2**30,
            "dax.restore_workers": THREADS,
        }
        backend = DaxBackend(self._config(0, extra), self.metadata, self.cpu, None, "cpu")
        self._closing.callback(backend.close)
        return backend

    def _plugin(self) -> Any:
        extra = {f"kvdepot.{name}": value for name, value in self._flat().items()}
        backend = KvdepotBackend(
            config=self._config(0, extra), metadata=self.metadata, local_cpu_backend=self.cpu
        )
        self._closing.callback(backend.close)
        return backend

    def _load(
        self, adapter: Any, keys: list[Any]
    ) -> Callable[[], tuple[float, Sequence[Any], bool]]:
        descriptor = adapter.get_load_event_fd()

        def load() -> tuple[float, Sequence[Any], bool]:
            start = time.perf_counter()
            task = adapter.submit_load_task(keys, self.objects)
            found = None
            while found is None:
                _wait(descriptor)
                found = adapter.query_load_result(task)
            taken = time.perf_counter() - start
            return taken, [c if found.test(n) else None for n, c in enumerate(self.objects)], False

        return load

    def _through(
        self, get: Callable[[Any], Any]
    ) -> Callable[[], tuple[float, Sequence[Any], bool]]:
        def restore() -> tuple[float, Sequence[Any], bool]:
            start = time.perf_counter()
            chunks = get(self.keys)
            return time.perf_counter() - start, chunks, True

        return restore

    def _timed(self, name: str) -> Callable[[], float]:
        def call() -> float:
            taken, chunks, owned = self.restore[name]()
            if owned:
                for chunk in chunks:
                    chunk.ref_count_down()
            return taken

        return call

    def _copies(self) -> dict[str, Callable[[], float]]:
        """Plain copies of the same blocks from a mapping in the same folder: block by block and in
        one piece a thread, by one thread and by all."""
        length = self.blocks * self.block
        source = np.memmap(self._file("copy", length), dtype=np.uint8, mode="r+", shape=(length,))
        source[:] = 1
        self._closing.callback(lambda: source)  # mapped until then
        to = [chunk.data_ptr for chunk in self.objects]
        # Adjacent in the pool, or there is no one piece.
        adjacent = all(b - a == self.block for a, b in itertools.pairwise(to))
        pieces = [(source.ctypes.data + n * self.block, at, self.block) for n, at in enumerate(to)]
        threads = ThreadPoolExecutor(THREADS)
        self._closing.callback(threads.shutdown)
        spare = self.cpu.batched_allocate(
            self.shape, torch.uint8, self.blocks, MemoryFormat.KV_2LTD, busy_loop=False
        )
        for chunk in spare:
            chunk.ref_count_down()
        where = spare[0].data_ptr - to[0]
        pieces = [(a, b + where, size) for a, b, size in pieces] if adjacent else pieces
        ways = {"copy blocks, 1 thread": [pieces]}
        ways[f"copy blocks, {THREADS} threads"] = [pieces[t::THREADS] for t in range(THREADS)]
        if adjacent:
            cut = -(-length // THREADS)
            first = pieces[0]
            ways[f"copy at once, {THREADS} threads"] = [
                [(first[0] + at, first[1] + at, min(cut, length - at))]
                for at in range(0, length, cut)
            ]

        def run(shares: list[list[tuple[int, int, int]]]) -> Callable[[], float]:
            def copy() -> float:
                start = time.perf_counter()
                if len(shares) == 1:
                    _copy(shares[0])
                else:
                    list(threads.map(_copy, shares))
                return time.perf_counter() - start

            return copy

        return {name: run(shares) for name, shares in ways.items()}

    # ---- small things --------------------------------------------------------------------------

    def _config(self, pool: int, extra: dict[str, Any] | None = None) -> Any:
        return LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=pool / 2**30,
            extra_config=extra or {},
        )

    def _arena_bytes(self) -> int:
        return self.blocks * self.block + (64 << 20)

    def _settings(self) -> dict[str, Any]:
        size = self._arena_bytes()
        dax = {"path": str(self.folder / "kvdepot"), "capacity": size, "records": 8 * self.blocks}
        return {"pipeline": "Dax", "dax": dax, "lanes": THREADS, "socket": "off"}

    def _flat(self) -> dict[str, Any]:
        settings = self._settings()
        dax = settings.pop("dax")
        return settings | {f"dax.{name}": value for name, value in dax.items()}

    def _file(self, name: str, size: int) -> Path:
        path = self.folder / name
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        return path

    def _expected(self, number: int) -> Any:
        return self.content[STEP * number : STEP * number + self.block]

    def _view(self, chunk: Any) -> Any:
        memory = (ctypes.c_uint8 * self.block).from_address(chunk.data_ptr)
        return np.frombuffer(memory, dtype=np.uint8)


def _copy(pieces: list[tuple[int, int, int]]) -> None:
    for source, destination, size in pieces:
        ctypes.memmove(destination, source, size)


def _wait(descriptor: int) -> None:
    """Until the event descriptor is notified."""
    ready, _, _ = select.select([descriptor], [], [], 60)
    if not ready:
        raise RuntimeError("no completion within 60 s")
    os.eventfd_read(descriptor)
