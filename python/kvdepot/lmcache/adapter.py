"""LMCache's Python L2 adapter: what the native surface has no words for.

`lmcache server --l2-adapter '{"type": "plugin", "module_path": "kvdepot.lmcache", "class_name":
"KvdepotAdapter", "adapter_params": {…}}'`. Beyond moving the same blocks it pins them from lookup
to unlock, tells LMCache what kvdepot evicts, and knows after a restart what is there, of whom.

LMCache's store loop submits stores and pops them, its prefetch loop does lookups, loads and
unlocks, its eviction loop deletes; each loop resets a descriptor of ours before it asks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.reconfiguration import L2ReconfigureError

import kvdepot
from kvdepot.lmcache import hotplug as lmcache_hotplug
from kvdepot.lmcache import keys as lmcache_keys
from kvdepot.lmcache.core import Batch, Space, Store, ended

log = logging.getLogger("kvdepot.lmcache")

# What stands for the end of a namespace where a page is full just there.
END = b"\xff" * 20

# Most blocks that are asked for in one go, as the depot has it.
LIST_MAX = 16384


class KvdepotAdapter(L2AdapterInterface):
    """LMCache's Python L2 adapter over one depot.

    LMCache creates it and calls its methods. Each loop of LMCache has a descriptor: stores, lookups
    and loads.

    Args:
        params: The `adapter_params` of LMCache's configuration (docs/engines/lmcache.md).
        l1_memory_desc: Ignored.

    Raises:
        kvdepot.ConfigError: A parameter is unknown, or its value is not allowed.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._store = Store(params)
        self._stores, self._lookups, self._loads = (kvdepot.Completions() for _ in range(3))
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._pins: dict[ObjectKey, list[tuple[Space, kvdepot.Pin]]] = {}
        self._numbers = itertools.count()
        # Of pins and results; never held while a listener is called.
        self._lock = threading.Lock()
        self._max_capacity_bytes = self._tier()["capacity_bytes"]
        # From here on what goes is noted; what the base class counts begins with what is there.
        self._store.depot.removed_blocks()
        usage = self.get_usage()
        self._total_bytes_used = sum(usage.bytes_by_cache_salt.values())
        self._bytes_by_cache_salt = dict(usage.bytes_by_cache_salt)

    def _tier(self) -> Any:
        """The statistics of the tier that has everything."""
        stats: Any = self._store.depot.stats()["tiers"]
        return list(stats.values())[-1]

    # ---- descriptors ------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Returns a descriptor that is readable when a store has ended."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Returns a descriptor that is readable when a lookup has ended."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Returns a descriptor that is readable when a load has ended."""
        return self._loads.fileno()

    # ---- store ------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Stores chunks.

        Blocks are immutable, so that chunks that are stored already count 0 bytes.
        """
        places = [self._store.place_object(key) for key in keys]
        there = self._store.contains(places)
        sizes = [0 if here else obj.get_size() for here, obj in zip(there, objects, strict=True)]
        number = next(self._numbers)
        batch = Batch((number, list(keys), sizes), len(places))
        buffers = [obj.byte_array for obj in objects]
        self._store.submit(batch, places, buffers, self._stores, put=True)
        return number

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Returns the stores that ended.

        A store has failed if one of its chunks was not stored; its other chunks stay stored.
        """
        with self._lock:
            batches = ended(self._stores, clear=False)
        keys: list[ObjectKey] = []
        sizes: list[int] = []
        for batch in batches:
            number, names, bytes_each = batch.tag
            kept = [index for index, ok in enumerate(batch.answers) if ok]
            keys += [names[index] for index in kept]
            sizes += [bytes_each[index] for index in kept]
            whole = len(kept) == len(names)
            if not whole:
                reasons = ", ".join(sorted(batch.reasons))
                log.warning(
                    "%d of %d chunks were not stored: %s",
                    len(names) - len(kept),
                    len(names),
                    reasons,
                )
            self._stored[number] = L2StoreResult(whole, sum(bytes_each) if whole else 0)
        if keys:
            self._notify_keys_stored(keys, sizes)
        self._tell_gone()
        completed, self._stored = self._stored, {}
        return completed

    # ---- lookup, lock -----------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Looks up chunks and adds one pin to each chunk that is stored."""
        places = [self._store.place_object(key) for key in keys]
        bitmap = Bitmap(len(keys))
        with self._lock:
            pins = self._store.pin(places)
            for index, (key, (space, _), pin) in enumerate(zip(keys, places, pins, strict=True)):
                if pin is not None:
                    self._pins.setdefault(key, []).append((space, pin))
                    bitmap.set(index)
        number = next(self._numbers)
        self._lookups.post(number, bitmap)
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Returns the bitmap of a lookup, once."""
        with self._lock:
            self._found.update(self._lookups.drain(clear=False))
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Ends one pin of each chunk. Chunks without a pin are ignored."""
        ending: dict[Space, list[kvdepot.Pin]] = {}
        with self._lock:
            for key in keys:
                pins = self._pins.get(key)
                if pins is None:
                    continue
                space, pin = pins.pop()
                ending.setdefault(space, []).append(pin)
                if not pins:
                    del self._pins[key]
        for space, pins_of in ending.items():
            try:
                space.namespace.unpin(pins_of)
            except kvdepot.ClosedError:
                # The depot's pins have ended with it.
                log.debug("unlock after close")

    # ---- load -------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Reads chunks into objects. A chunk of another length than its object is a miss."""
        places = [self._store.place_object(key) for key in keys]
        number = next(self._numbers)
        batch = Batch((number, list(keys)), len(places))
        buffers = [obj.byte_array for obj in objects]
        self._store.submit(batch, places, buffers, self._loads, put=False)
        return number

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Returns the bitmap of a load, once."""
        with self._lock:
            batches = ended(self._loads, clear=False)
        accessed: list[ObjectKey] = []
        for batch in batches:
            number, keys = batch.tag
            bitmap = Bitmap(len(keys))
            for index, ok in enumerate(batch.answers):
                if ok:
                    bitmap.set(index)
                    accessed.append(keys[index])
            self._loaded[number] = bitmap
        if accessed:
            self._notify_keys_accessed(accessed)
        return self._loaded.pop(task_id, None)

    # ---- what is there, and what goes -------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Removes chunks, except those that a lookup has locked."""
        with self._lock:
            free = [key for key in keys if key not in self._pins]
            self._store.remove([self._store.place_object(key) for key in free])
        told = self._tell_gone()
        # LMCache's eviction forgets what was gone before, too.
        silent = [key for key in free if key not in told]
        if silent:
            self._notify_keys_deleted(silent, [0] * len(silent))

    def _tell_gone(self) -> set[ObjectKey]:
        """Tell the listeners what left the depot: deleted, evicted, or found to be rotten."""
        blocks, overflowed = self._store.depot.removed_blocks()
        if overflowed:
            log.warning(
                "the log of evicted blocks overflowed; LMCache still lists some evicted blocks, "
                "which are misses"
            )
        keys: list[ObjectKey] = []
        sizes: list[int] = []
        spaces = self._store.spaces_of({digest for digest, _, _ in blocks}) if blocks else {}
        for digest, key, size in blocks:
            space = spaces.get(digest)
            if space is not None and space.name is not None:
                keys.append(object_key(space.name, key))
                sizes.append(size)
        if keys:
            self._notify_keys_deleted(keys, sizes)
        return set(keys)

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Adds a listener.

        It is first notified of the chunks that were stored before a restart.
        """
        super().register_listener(listener)
        for space in self._store.spaces():
            rows = space.namespace.blocks()
            if rows and space.name is not None:
                keys = [object_key(space.name, key) for key, _ in rows]
                listener.on_l2_keys_stored(keys, [size for _, size in rows])

    def get_usage(self) -> AdapterUsage:
        """Returns the usage of the depot.

        The total is the allocated space: blocks that are being written, and blocks that readers
        hold, count as used.
        """
        by_salt: dict[str, int] = {}
        for space, size in self._store.held():
            if size and space.name is not None:
                by_salt[space.name.salt] = by_salt.get(space.name.salt, 0) + size
        tier = self._tier()
        return AdapterUsage(
            total_bytes_used=tier["used_bytes"],
            total_capacity_bytes=tier["capacity_bytes"],
            bytes_by_cache_salt=MappingProxyType(by_salt),
        )

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Returns one page of the chunks, including those from before a restart.

        A chunk in two tiers may be on two pages.
        """
        if page_size <= 0:
            raise ValueError(
                f"page_size: {page_size} is not allowed; allowed: a whole number, 1 or more"
            )
        digest, place = self._cursor(cursor)
        entries: dict[ObjectKey, KeyEntry] = {}
        # Names are read once for each listing.
        known = [] if cursor is None else self._store.known_spaces()
        for space in known or self._store.spaces():
            name = space.name
            if name is None or space.digest < digest or model_name not in (None, name.model):
                continue
            at = place if space.digest == digest else None
            while True:
                limit = min(page_size - len(entries), LIST_MAX)
                rows, at = space.namespace.blocks_page(at, limit)
                for key, size in rows:
                    found = object_key(name, key)
                    encoded = found.to_encoded_object_key()
                    entries[found] = KeyEntry(key=encoded, size_bytes=size)
                if len(entries) >= page_size:
                    token = (space.digest + (at or END)).hex()
                    return KeyListPage(tuple(entries.values()), token)
                if at is None:
                    break
        return KeyListPage(tuple(entries.values()), None)

    @staticmethod
    def _cursor(cursor: str | None) -> tuple[bytes, bytes | None]:
        """Where the page before ended: a namespace's digest and a place in it."""
        try:
            at = bytes.fromhex(cursor or "")
        except ValueError:
            at = b"?"
        if len(at) not in (0, 16 + len(END)):
            raise ValueError(
                f"cursor: {cursor!r} is not allowed; allowed: the cursor that the previous page "
                "returned"
            )
        return at[:16], at[16:] or None

    # ---- devices ----------------------------------------------------------------------------

    def owns_device(self, device_path: str) -> bool:
        """Returns true if the depot has this device mapped, under any name."""
        return lmcache_hotplug.owns(self._store.depot, device_path)

    def reconfigure_status(self) -> Any:
        """Returns the devices and the operations that they allow."""
        return lmcache_hotplug.status(self._store.depot, self._store.settings.hotplug_enabled)

    def reconfigure(
        self,
        operation: str,
        payload: dict[str, object],
        *,
        device_owners: Callable[[str], list[str]],
    ) -> dict[str, Any]:
        """Adds, removes or resizes a device while the depot serves; requires `hotplug_enabled`."""
        if operation == "status":
            return dict(self.reconfigure_status())
        if not self._store.settings.hotplug_enabled:
            raise L2ReconfigureError(
                403, "device calls are disabled; set hotplug_enabled: true in adapter_params"
            )
        depot = self._store.depot
        try:
            return lmcache_hotplug.apply(depot, operation, payload, device_owners, self._tell_gone)
        finally:
            self._max_capacity_bytes = self._tier()["capacity_bytes"]

    # ---- state ------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """Returns state and usage for LMCache's `/status`."""
        self._tell_gone()
        tier = self._tier()
        with self._lock:
            locked = len(self._pins)
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "depot": self._store.depot.description,
            "stored_object_count": tier["blocks"],
            "locked_key_count": locked,
            "current_size_bytes": tier["used_bytes"],
            "max_capacity_bytes": tier["capacity_bytes"],
            "evicted_object_count": tier["evicted_blocks"],
            "corrupt_object_count": tier["corrupt_blocks"],
        }

    def close(self) -> None:
        """Waits for calls in progress, then closes the depot and the descriptors."""
        self._store.close()
        with self._lock:
            self._pins.clear()
        for done in (self._stores, self._lookups, self._loads):
            done.close()


def object_key(name: lmcache_keys.Name, key: bytes) -> ObjectKey:
    """LMCache's key of a block."""
    return ObjectKey(
        chunk_hash=key[: name.hash_bytes],
        model_name=name.model,
        kv_rank=name.rank,
        object_group_id=name.group,
        cache_salt=name.salt,
    )
