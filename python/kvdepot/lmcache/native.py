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
    """A connector as `NativeConnectorL2Adapter` wants it; the parameters are `adapter_params`."""

    def __init__(self, **params: Any) -> None:
        self._store = Store(params)
        self._done = kvdepot.Completions()
        self._numbers = itertools.count()
        # Of drains; submits come from several threads and need none.
        self._lock = threading.Lock()

    def event_fd(self) -> int:
        """Readable while completions wait."""
        return self._done.fileno()

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Store chunks; the views are read until the completion."""
        return self._submit(keys, views, put=True)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Fill the views; one that is not of its chunk's length is a miss."""
        return self._submit(keys, views, put=False)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which chunks are stored."""
        places = [self._store.place(key) for key in keys]
        return self._answer(self._store.contains(places))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove chunks. True for all: one that was absent is gone as well, or LMCache would
        count its bytes for ever."""
        self._store.remove([self._store.place(key) for key in keys])
        return self._answer([True] * len(keys))

    def drain_completions(self) -> list[Completion]:
        """What has ended: number, whether all went well, why not, and one bool a key."""
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
        """Wait for what is under way and close the depot. Twice is as good as once."""
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
