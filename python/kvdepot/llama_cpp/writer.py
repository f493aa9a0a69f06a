"""Snapshots are written beside the decoder, by one thread; what waits is bounded."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvdepot.llama_cpp.states import Snapshot

logger = logging.getLogger("kvdepot.llama_cpp")


class Writer:
    """Writes what waits, the oldest first.

    What waits has at most `waiting_bytes`, or is one snapshot. Where that is not enough, what has
    waited longest is dropped: whoever decodes never waits for a medium. A later snapshot of a
    conversation has all that an earlier one had, and takes its place.
    """

    def __init__(self, write: Callable[[Snapshot], None], waiting_bytes: int) -> None:
        self._write = write
        self._waiting_bytes = waiting_bytes
        self._waiting: deque[Snapshot] = deque()
        self._current: Snapshot | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Snapshots that were not written, since too much waited."""

    def put(self, snapshot: Snapshot) -> None:
        """Write a snapshot, later."""
        with self._changed:
            if self._closed:
                raise RuntimeError("internal error: a save started after the cache was closed")
            kept = [one for one in self._waiting if not _takes_place_of(snapshot, one)]
            held = sum(one.nbytes for one in kept)
            while kept and held + snapshot.nbytes > self._waiting_bytes:
                dropped = kept.pop(0)
                held -= dropped.nbytes
                self.dropped += 1
                logger.warning(
                    "a state of %d tokens was dropped: more than %d bytes are waiting for the "
                    "depot",
                    len(dropped.tokens),
                    self._waiting_bytes,
                )
            self._waiting = deque([*kept, snapshot])
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvdepot-llama-writer", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait_for(self, tokens: list[int], more_than: int) -> None:
        """Wait until nothing is under way that has more than so many of these tokens."""
        with self._changed:
            self._changed.wait_for(lambda: not self._has(tokens, more_than))

    def flush(self) -> None:
        """Wait until all that waits now is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._current is None)

    def close(self) -> None:
        """Write what waits, and take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        # It knows a model, whose memory would stay until the garbage collector comes.
        self.__dict__.pop("_write", None)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait, or are being written."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            return sum(one.nbytes for one in [*self._waiting, *current])

    def _has(self, tokens: list[int], more_than: int) -> bool:
        under_way = [*self._waiting] + ([] if self._current is None else [self._current])
        beginning = tokens[: more_than + 1]
        return len(beginning) > more_than and any(
            one.tokens[: more_than + 1] == beginning for one in under_way
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._current = self._waiting.popleft()
            try:
                self._write(self._current)
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()


def _takes_place_of(later: Snapshot, earlier: Snapshot) -> bool:
    """Whether nothing of the earlier is lost with the later: a state that cannot be cut is of use
    at its own last token alone."""
    same = later.tokens[: len(earlier.tokens)] == earlier.tokens
    return same and earlier.rest is None
