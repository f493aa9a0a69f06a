"""What becomes of the depot's errors on the engine's path: misses, a count and a log line.

An exception in one of vLLM's hooks ends the engine, with all its requests. A
cache must not do that, so in the engine's processes its depot, namespaces and
movers are used through this module alone. An error there answers as if the
tiers had nothing and took nothing. After one, no block is looked up or reserved
for a second, twice as long with each further error: a depot whose calls wait
until they time out would hold up every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import kvdepot

# Not vLLM's assertions, nor our own mistakes: those are to be seen.
ERRORS = (kvdepot.Error, OSError)

# A broken depot fails at each step, hundreds of times a second.
LOG_SECONDS = 60.0

PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

Answer = TypeVar("Answer")


class Faults:
    """Counts errors by call, and logs the first of each call in a minute."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._counts: dict[str, int] = {}
        self._next_log: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._pause = 0.0
        self._until = 0.0

    @property
    def paused_until(self) -> float:
        """When calls that can be left out are made again, by `time.monotonic`; it may be past."""
        return self._until

    def attempt(self, call: str, fallback: Answer, method: Callable[..., Answer], *args: Any,
                **kwargs: Any) -> Answer:  # fmt: skip
        """The answer of `method`, or `fallback` when it raises one of the depot's errors."""
        try:
            return method(*args, **kwargs)
        except ERRORS as error:
            self.note(call, error)
            return fallback

    def attempt_unless_paused(
        self, call: str, fallback: Answer, method: Callable[..., Answer], *args: Any, **kwargs: Any
    ) -> Answer:
        """As `attempt`, for calls that can be left out: they are, for a while after an error."""
        if time.monotonic() < self._until:
            return fallback
        try:
            answer = method(*args, **kwargs)
        except ERRORS as error:
            self.note(call, error)
            self._pause = min(max(PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
            self._until = time.monotonic() + self._pause
            return fallback
        self._pause = 0.0
        return answer

    def note(self, call: str, error: BaseException) -> None:
        """Count an error, and log it unless one of the same call was logged just before."""
        self._counts[call] = self._counts.get(call, 0) + 1
        now = time.monotonic()
        if now < self._next_log.get(call, 0.0):
            self._unlogged[call] = self._unlogged.get(call, 0) + 1
            return
        self._next_log[call] = now + LOG_SECONDS
        more = self._unlogged.pop(call, 0)
        self._logger.error(
            "depot call %s failed%s: %s: %s; treated as a cache miss",
            call, f" (and {more} times since the last such line)" if more else "",
            type(error).__name__, str(error),
        )  # fmt: skip

    def take(self) -> dict[str, int]:
        """How often each call failed since the last time this was asked."""
        counts, self._counts = self._counts, {}
        return counts


class SafeDepot:
    """A depot whose errors are counted, and mean that there is nothing."""

    def __init__(self, depot: kvdepot.Depot, faults: Faults) -> None:
        self._depot = depot
        self._faults = faults

    def namespace(self, **fields: Any) -> SafeNamespace:
        """Opens a namespace; wrong fields are an error here too, so that a start ends."""
        return SafeNamespace(self._depot.namespace(**fields), self._faults, fields)

    @property
    def raw(self) -> kvdepot.Depot:
        """The depot itself, for threads beside the engine's path that handle errors."""
        return self._depot

    def stats(self) -> Any | None:
        """The depot's, or None."""
        return self._faults.attempt("stats", None, self._depot.stats)

    @property
    def connected(self) -> bool:
        """Whether somebody serves the depot, where it is another process's."""
        return self._faults.attempt("connected", False, lambda: self._depot.connected)

    def pending_bytes(self) -> int:
        """The depot's, or nothing."""
        return self._faults.attempt("pending_bytes", 0, self._depot.pending_bytes)

    def close(self) -> None:
        """Close the depot, as far as it can be."""
        self._faults.attempt("close", None, self._depot.close)


class SafeNamespace:
    """A namespace whose errors are counted, and mean misses and refusals."""

    def __init__(
        self, namespace: kvdepot.Namespace, faults: Faults, fields: Mapping[str, Any]
    ) -> None:
        self._namespace = namespace
        self._faults = faults
        self._fields = fields

    def opened_by(self, depot: kvdepot.Depot) -> kvdepot.Namespace:
        """The same namespace of a depot, or of another client of its server, for threads beside the
        engine's path that handle errors."""
        return depot.namespace(**self._fields)

    @property
    def digest(self) -> bytes:
        """The 16 bytes that identify the namespace."""
        return self._namespace.digest

    def lookup(self, keys: Sequence[bytes]) -> kvdepot.Task | None:
        """The namespace's question which of the blocks are stored, or none."""
        lookup = self._namespace.lookup
        return self._faults.attempt_unless_paused("lookup", None, lookup, keys)

    def prefetch(self, keys: Sequence[bytes]) -> kvdepot.Task | None:
        """The namespace's, or none."""
        return self._faults.attempt_unless_paused("prefetch", None, self._namespace.prefetch, keys)

    def put(self, keys: Sequence[bytes], blocks: kvdepot.Spans) -> kvdepot.Task | None:
        """The namespace's, or none."""
        return self._faults.attempt_unless_paused("put", None, self._namespace.put, keys, blocks)

    def get(self, keys: Sequence[bytes], blocks: kvdepot.Spans) -> kvdepot.Task | None:
        """The namespace's, or none."""
        return self._faults.attempt_unless_paused("get", None, self._namespace.get, keys, blocks)

    def pin(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[kvdepot.Pin | None]:
        """The namespace's, or no pin."""
        nothing: list[kvdepot.Pin | None] = [None] * len(keys)
        pin = self._namespace.pin
        return self._faults.attempt_unless_paused("pin", nothing, pin, keys, prefix=prefix)

    def reserve(
        self, keys: Sequence[bytes], *args: Any, **kwargs: Any
    ) -> list[kvdepot.Reservation | None]:
        """The namespace's, or no room; with `prefix`, for none of them."""
        count = 0 if kwargs.get("prefix") else len(keys)
        nothing: list[kvdepot.Reservation | None] = [None] * count
        reserve = self._namespace.reserve
        return self._faults.attempt_unless_paused(
            "reserve", nothing, reserve, keys, *args, **kwargs
        )

    def commit(
        self, reservations: Sequence[kvdepot.Reservation], checksums: Sequence[Sequence[bytes]]
    ) -> list[bool]:
        """The namespace's; after an error the reservations are given back."""
        try:
            return self._namespace.commit(reservations, checksums)
        except ERRORS as error:
            self._faults.note("commit", error)
            self.abort(reservations)
            return [False] * len(reservations)

    def abort(self, reservations: Sequence[kvdepot.Reservation]) -> None:
        """Give reservations back."""
        self._faults.attempt("abort", None, self._namespace.abort, reservations)

    def unpin(self, pins: Sequence[kvdepot.Pin], *, served: bool = False) -> None:
        """End pins; they end with their objects too."""
        self._faults.attempt("unpin", None, self._namespace.unpin, pins, served=served)

    def discard(self, pins: Sequence[kvdepot.Pin | None]) -> int | None:
        """Unpublish blocks that did not verify; None when they may still be found."""
        nothing: int | None = None
        return self._faults.attempt("discard", nothing, self._namespace.discard, pins)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from every tier."""
        self._faults.attempt("remove", None, self._namespace.remove, keys)

    def clear(self) -> int:
        """Remove every block of the namespace."""
        return self._faults.attempt("clear", 0, self._namespace.clear)
