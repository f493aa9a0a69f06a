"""LMCache's native plug-in: batches of memory views in, completions out.

`lmcache server --l2-adapter '{"type": "native_plugin", "module_path": "kvdepot.lmcache",
"class_name": "KvdepotNative", "adapter_params": {…}}'`. LMCache wraps it with a lock of its own
under which it submits, so every submit returns at once; the wrapper polls `event_fd`. Capacity and
eviction are kvdepot's: leave `max_capacity_gb` at 0.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import kvdepot
from kvdepot.lmcache.core import Batch, Store, ended

Completion = tuple[int, bool, str, list[bool] | None]


class KvdepotNative:
    """Connector for LMCache's `NativeConnectorL2Adapter`.

    LMCache creates it and calls its methods. `submit_batch_*` return the number of the batch
    immediately; `drain_completions` reports its end.

    Args:
        **params: The `adapter_params` of LMCache's configuration (docs/engines/lmcache.md).

    Raises:
        kvdepot.ConfigError: A parameter is unknown, or its value is not allowed.
    """

    def __init__(self, **params: Any) -> None:
        self._store = Store(params)
        self._done = kvdepot.Completions()
        self._numbers = itertools.count()
        # Of drains; submits come from several threads and need none.
        self._lock = threading.Lock()

    def event_fd(self) -> int:
        """Returns a descriptor that is readable while completions wait."""
        return self._done.fileno()

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Stores chunks. The views are read until the completion."""
        return self._submit(keys, views, put=True)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Reads chunks into views. A view of another length than its chunk is a miss."""
        return self._submit(keys, views, put=False)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Checks which chunks are stored."""
        places = [self._store.place(key) for key in keys]
        return self._answer(self._store.contains(places))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes chunks.

        The result is true for all chunks. With false for a missing chunk, LMCache would count its
        bytes forever.
        """
        self._store.remove([self._store.place(key) for key in keys])
        return self._answer([True] * len(keys))

    def drain_completions(self) -> list[Completion]:
        """Returns the batches that ended, as (number, success, error, one bool per key)."""
        with self._lock:
            batches = ended(self._done, clear=True)
        completions: list[Completion] = []
        for batch in batches:
            number, put = batch.tag
            missing = batch.answers.count(False)
            # A miss is an answer; a chunk that was not stored is a failure.
            ok = not (put and missing)
            reasons = ", ".join(sorted(batch.reasons))
            error = "" if ok else f"{missing} of {len(batch.answers)} not stored: {reasons}"
            completions.append((number, ok, error, batch.answers))
        return completions

    def close(self) -> None:
        """Waits for batches in progress and closes the depot. A second call does nothing."""
        self._store.close()
        self._done.close()

    def _submit(self, keys: Sequence[str], views: Sequence[memoryview], put: bool) -> int:
        places = [self._store.place(key) for key in keys]
        batch = Batch((next(self._numbers), put), len(places))
        self._store.submit(batch, places, views, self._done, put)
        return int(batch.tag[0])

    def _answer(self, answers: list[bool]) -> int:
        batch = Batch((next(self._numbers), False), 0)
        batch.answers = answers
        self._done.post((batch, None), None)
        return int(batch.tag[0])
