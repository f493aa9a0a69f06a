"""kvdepot as an in-process storage plug-in of LMCache.

    storage_plugins: ["dax"]
    extra_config:
      storage_plugin.dax.module_path: kvdepot.lmcache
      storage_plugin.dax.class_name: KvdepotBackend
      dax.device_path: /dev/dax0.0
      dax.max_dax_size: 100

LMCache swallows what a plug-in raises, or ends the request that was served, so
everything but the constructor answers a miss and logs why.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

import kvdepot
from kvdepot.lmcache import settings as lmcache_settings
from kvdepot.lmcache.depot import open_shared
from kvdepot.lmcache.layout import Layout, block_keys, can_store
from kvdepot.lmcache.plugin import parameters, plugin_name, warn_of_exclusion
from kvdepot.lmcache.spaces import Spaces

logger: logging.Logger = init_logger(__name__)

# Waiting is all that these threads do, for restores of LMCache's event loop.
WAITERS = 4

# Bytes whose chunks are allocated at a time.
PART_BYTES = 16 << 20

# How long a restore waits for chunks that puts still read, where memory is full.
RELEASE_SECONDS = 1.0

Stored = Callable[[CacheEngineKey], None]


@dataclass
class Move:
    """Chunks that are being filled, and where they belong."""

    restored: list[MemoryObj | None]
    places: list[int]
    chunks: list[MemoryObj]
    task: kvdepot.Task | None = None

    def end(self) -> None:
        """Wait; hand over the chunks that verify, and give the others back."""
        outcome = [False] * len(self.chunks)
        try:
            if self.task is not None:
                try:
                    outcome = self.task.wait()
                finally:
                    # Also when the wait is interrupted: lanes write until then.
                    self.task.wait_released()
        finally:
            for at, chunk, done in zip(self.places, self.chunks, outcome, strict=True):
                if done:
                    self.restored[at] = chunk
                else:
                    chunk.ref_count_down()


class KvdepotBackend(StoragePluginInterface):
    """Storage backend of LMCache's StorageManager over a depot.

    LMCache creates it and calls its methods; the options are in `extra_config`
    (docs/engines/lmcache.md).

    Raises:
        kvdepot.ConfigError: An option is unknown, or its value is not allowed.
    """

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(
            dst_device=dst_device,
            config=config,
            metadata=metadata,
            local_cpu_backend=local_cpu_backend,
            loop=loop,
        )
        if config is None or metadata is None:
            raise kvdepot.ConfigError("config and metadata are required")
        # LMCache's scheduler has no memory of its own: it looks up, and never loads.
        if local_cpu_backend is None and metadata.role != "scheduler":
            raise kvdepot.ConfigError(
                "max_local_cpu_size: must be above 0; chunks are restored into LMCache's CPU memory"
            )
        if metadata.get_num_groups() != 1:
            raise kvdepot.ConfigError(
                f"KV groups: {metadata.get_num_groups()} is not allowed; allowed: 1 (use "
                "LMCache's multi-process mode for models with several KV groups)"
            )
        self.name = plugin_name(config)
        settings = lmcache_settings.read(parameters(config.extra_config or {}, self.name))
        warn_of_exclusion(config, self.name)
        self.async_put = settings.async_put
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active = 0
        self._borrowed = 0
        self._closing = False
        self._pins: dict[CacheEngineKey, list[kvdepot.Pin]] = {}
        # Keys that are being put, and whether they were removed meanwhile.
        self._putting: dict[CacheEngineKey, bool] = {}
        self._depot = open_shared(settings.pipeline, settings.depot)
        try:
            self._spaces = Spaces(self._depot, config, metadata, settings.salt, settings.weights)
            self._waiters = ThreadPoolExecutor(WAITERS, thread_name_prefix="kvdepot-restore")
            # One: puts end in their order.
            self._putters = ThreadPoolExecutor(1, thread_name_prefix="kvdepot-put")
        except BaseException:
            self._depot.close()
            raise
        if local_cpu_backend is not None:
            self._close_memory_last(local_cpu_backend)
        logger.info("kvdepot as %r: %s", self.name, self._depot.description)

    def __str__(self) -> str:
        return self.name

    # ---- lookups -----------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Returns true if the chunk is stored. With `pin` it stays until `unpin`."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Returns the number of leading chunks that are stored."""
        with self._open() as is_open:
            if not is_open:
                return 0
            if pin:
                return self._pin(keys)
            return self._spaces.prefix(block_keys(keys))

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """`batched_contains` as a coroutine."""
        return self.batched_contains(keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Returns true if the chunk is being stored."""
        with self._lock:
            return key in self._putting

    def pin(self, key: CacheEngineKey) -> bool:
        """Protects a stored chunk from eviction.

        The protection ends when `unpin` was called the same number of times.
        """
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Ends one pin. Returns true if the chunk is stored."""
        with self._open() as is_open:
            if not is_open:
                return False
            with self._lock:
                pins = self._pins.get(key, [])
                pin = pins.pop() if pins else None
                if not pins:
                    self._pins.pop(key, None)
            self._spaces.unpin([pin])
        return self.contains(key)

    def touch_cache(self) -> None:
        """Does nothing: the depot records each use when it happens, in prompt order."""

    # ---- puts --------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Stored | None = None,
    ) -> list[Future[None]] | None:
        """Stores chunks, and calls back for each chunk that this call has stored.

        The call does not raise. With `async_put` it returns before the chunks are stored, and each
        future ends with its chunk.
        """
        try:
            with self._open() as is_open:
                if not is_open:
                    logger.warning("%d chunks were not stored: the depot is closed", len(keys))
                    return None
                return self._put(keys, objs, on_complete_callback)
        except Exception:
            logger.exception("%d chunks were not stored", len(keys))
            return None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Stored | None = None,
    ) -> None:
        """`batched_submit_put_task` without blocking the event loop."""
        await asyncio.to_thread(
            self.batched_submit_put_task, keys, objs, transfer_spec, on_complete_callback
        )

    # ---- restores ----------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Returns one chunk, which the caller frees; None for a miss."""
        return self._restore([key], prefix=False)[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Returns the chunks in the order of the keys, with None for each miss."""
        return self._restore(keys, prefix=False)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Returns the chunks before the first miss."""
        try:
            loop = asyncio.get_running_loop()
            restored = await loop.run_in_executor(self._waiters, self._restore, keys, True)
        except RuntimeError:  # the waiters are gone: closed
            return []
        return [chunk for chunk in restored if chunk is not None]

    def get_allocator_backend(self) -> Any:
        """Returns LMCache's CPU memory."""
        if self.local_cpu_backend is None:
            raise RuntimeError(
                "LMCache's scheduler process has no CPU memory, so the process can look "
                "up chunks, but not load or store chunks"
            )
        return self.local_cpu_backend

    # ---- removal and end ---------------------------------------------------------------------

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Removes a chunk, also one that is being stored. Without `force`, pinned chunks stay."""
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Removes chunks and returns the number of those that were stored."""
        with self._open() as is_open:
            if not is_open:
                return 0
            with self._lock:
                keys = [key for key in keys if force or key not in self._pins]
                putting = [key for key in keys if key in self._putting]
                self._putting.update(dict.fromkeys(putting, True))
            stored = [key for key in keys if key not in putting]
            return len(putting) + self._spaces.remove(block_keys(stored))

    def close(self) -> None:
        """Rejects new calls, waits for calls and puts in progress, and closes the depot."""
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: self._active == 0)
        self._waiters.shutdown(wait=True)
        self._putters.shutdown(wait=True)
        self._pins.clear()
        self._depot.close()

    # ---- inside ------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[bool]:
        """Whether calls are still taken; `close` waits for those that were."""
        with self._lock:
            is_open = not self._closing
            self._active += is_open
        try:
            yield is_open
        finally:
            with self._idle:
                self._active -= is_open
                self._idle.notify_all()

    def _close_memory_last(self, memory: Any) -> None:
        """LMCache closes its CPU memory before its plug-ins: let it wait for what is read there."""
        close = memory.close

        def close_when_given_back() -> None:
            with self._idle:
                self._closing = True
                self._idle.wait_for(lambda: self._active == 0 and self._borrowed == 0)
            close()

        memory.close = close_when_given_back

    def _pin(self, keys: list[CacheEngineKey]) -> int:
        pins = self._spaces.pin(block_keys(keys), prefix=True)
        found = [pin for _, pin in pins if pin is not None]
        with self._lock:
            for key, pin in zip(keys, found, strict=False):
                self._pins.setdefault(key, []).append(pin)
        return len(found)

    def _put(
        self, keys: Sequence[CacheEngineKey], objs: list[MemoryObj], stored: Stored | None
    ) -> list[Future[None]] | None:
        batches: dict[Layout, list[tuple[CacheEngineKey, MemoryObj]]] = {}
        for key, chunk in zip(keys, objs, strict=True):
            if can_store(key, chunk):
                batches.setdefault(Layout.of_object(chunk), []).append((key, chunk))
        futures = []
        for layout, batch in batches.items():
            future = self._put_batch(layout, batch, stored)
            if future is not None:
                futures.append(future)
        return futures or None

    def _put_batch(
        self,
        layout: Layout,
        batch: list[tuple[CacheEngineKey, MemoryObj]],
        stored: Stored | None,
    ) -> Future[None] | None:
        space = self._spaces.of(layout)
        with self._lock:
            batch = list({k: (k, o) for k, o in batch if k not in self._putting}.values())
        present = space.contains(block_keys(key for key, _ in batch))
        batch = [entry for entry, there in zip(batch, present, strict=True) if not there]
        if not batch:
            return None
        keys = [key for key, _ in batch]
        chunks = [chunk for _, chunk in batch]
        with self._lock:
            self._putting.update(dict.fromkeys(keys, False))
        try:
            self._spaces.keep(layout)
            ids = block_keys(keys)
            task = space.put(ids, [(chunk.data_ptr, chunk.get_size()) for chunk in chunks])
        except BaseException:
            self._end_put(keys)
            raise
        if not self.async_put:
            self._finish_put(layout, task, keys, stored)
            return None
        for chunk in chunks:
            chunk.ref_count_up()
        with self._lock:
            self._borrowed += len(chunks)
        return self._putters.submit(self._finish_put, layout, task, keys, stored, chunks)

    def _finish_put(
        self,
        layout: Layout,
        task: kvdepot.Task,
        keys: list[CacheEngineKey],
        stored: Stored | None,
        borrowed: Sequence[MemoryObj] = (),
    ) -> None:
        gone: list[CacheEngineKey] = []
        try:
            try:
                task.wait_released()
            finally:
                # Also when the wait is interrupted: lanes read until then.
                task.wait_released()
                self._give_back(borrowed)
            outcome = task.wait()
            self._spaces.wait_kept(layout)
        finally:
            gone = self._end_put(keys)
        if gone:
            self._spaces.of(layout).remove(block_keys(gone))
        if not all(outcome):
            reasons = {reason for reason in task.errors if reason is not None}
            logger.warning(
                "%d of %d chunks were not stored: %s",
                outcome.count(False),
                len(keys),
                ", ".join(sorted(reasons)),
            )
        for key, done in zip(keys, outcome, strict=True):
            if done and stored is not None and key not in gone:
                try:
                    stored(key)
                except Exception:
                    logger.exception("LMCache's callback failed for the stored chunk %s", key)

    def _give_back(self, borrowed: Sequence[MemoryObj]) -> None:
        for chunk in borrowed:
            chunk.ref_count_down()
        with self._idle:
            self._borrowed -= len(borrowed)
            self._idle.notify_all()

    def _end_put(self, keys: list[CacheEngineKey]) -> list[CacheEngineKey]:
        """The keys are no longer being put; which of them were removed meanwhile."""
        with self._lock:
            return [key for key in keys if self._putting.pop(key, False)]

    def _restore(self, keys: list[CacheEngineKey], prefix: bool) -> list[MemoryObj | None]:
        restored: list[MemoryObj | None] = [None] * len(keys)
        with self._open() as is_open:
            if not is_open or self.local_cpu_backend is None:
                return restored
            try:
                self._fill(block_keys(keys), restored, prefix)
            except Exception:
                logger.exception(
                    "restore of %d chunks failed; LMCache computes the missing chunks", len(keys)
                )
        if prefix:
            end = restored.index(None) if None in restored else len(restored)
            for chunk in restored[end:]:
                if chunk is not None:
                    chunk.ref_count_down()
            del restored[end:]
        return restored

    def _fill(self, ids: list[bytes], restored: list[MemoryObj | None], prefix: bool) -> None:
        """Put a chunk into each place of `restored` whose block is read and verified."""
        found = self._spaces.pin(ids, prefix)
        groups: dict[tuple[Layout, int], list[int]] = {}
        for at, (layout, pin) in enumerate(found):
            if layout is not None and pin is not None:
                groups.setdefault((layout, pin.length), []).append(at)
        # What is begun is ended, also when something raises in between.
        with ExitStack() as ending:
            ending.callback(self._spaces.unpin, [pin for _, pin in found])
            for (layout, length), places in groups.items():
                # LMCache takes long to allocate: lanes copy the part before meanwhile.
                step = max(1, PART_BYTES // length)
                for start in range(0, len(places), step):
                    part = places[start : start + step]
                    chunks = self._allocate(layout, length, len(part))
                    move = Move(restored, part[: len(chunks)], chunks)
                    ending.callback(move.end)
                    move.task = self._spaces.of(layout).get(
                        [ids[at] for at in move.places],
                        [(chunk.data_ptr, length) for chunk in chunks],
                    )
                    if len(chunks) < len(part):
                        logger.warning(
                            "LMCache's CPU memory is full; the remaining chunks are misses"
                        )
                        break

    def _allocate(self, layout: Layout, length: int, count: int) -> list[MemoryObj]:
        """Chunks of LMCache's memory; fewer when it is full of what cannot go."""
        shape = layout.shape_of(length)
        cpu: Any = self.local_cpu_backend
        if shape is None:
            return []
        chunks: list[MemoryObj] | None = None
        # Neither waits for others: LMCache would, for ever. A batch evicts one layer's chunks
        # only, so where there is no room the chunks are allocated one by one.
        if count > 1:
            chunks = cpu.batched_allocate(
                shape, layout.dtype, count, layout.fmt, eviction=False, busy_loop=False
            )
        if chunks is not None:
            return chunks
        chunks, waited = [], False
        while len(chunks) < count:
            chunk = cpu.allocate(shape, layout.dtype, layout.fmt, busy_loop=False)
            if chunk is not None:
                chunks.append(chunk)
            elif waited or not self._puts_released():
                break
            else:
                waited = True
        return chunks

    def _puts_released(self) -> bool:
        """Whether puts had chunks that they have given back now."""
        with self._idle:
            return self._borrowed > 0 and self._idle.wait_for(
                lambda: self._borrowed == 0, RELEASE_SECONDS
            )
