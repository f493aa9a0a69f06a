"""Small blocks that are read whole: the names and layouts that are kept beside the chunks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kvdepot

# A look at a directory of blocks goes over all that lies there: not for more than a tenth of the
# time.
REST = 10
# Pins at a time: a quarter of what a tier of files keeps open for pins where a process may have
# 1,024 descriptors.
PINNED = 32


class Pause:
    """Says when to look again: after `least` seconds, and later where a look takes long."""

    def __init__(self, least: float = 0.0) -> None:
        self._least = least
        self._next = float("-inf")
        self._lock = threading.Lock()

    @contextmanager
    def over(self) -> Iterator[bool]:
        """Whether it is time, and nobody else looks; the look takes as long as the block."""
        begun = time.monotonic()
        with self._lock:
            is_over = begun >= self._next
            if is_over:
                self._next = float("inf")
        try:
            yield is_over
        finally:
            if is_over:
                now = time.monotonic()
                self._next = now + max(self._least, REST * (now - begun))


def read(
    namespace: kvdepot.Namespace, wanted: Callable[[bytes], bool]
) -> list[tuple[bytes, bytes]]:
    """The blocks of the keys that are wanted, as far as they can be read."""
    keys = [key for key, _ in namespace.blocks() if wanted(key)]
    # A tier of files keeps those of all pins open.
    parts = [keys[at : at + PINNED] for at in range(0, len(keys), PINNED)]
    return [found for part in parts for found in _read(namespace, part)]


def _read(namespace: kvdepot.Namespace, keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    # A listing may say more than their length: the room of a file.
    pins = namespace.pin(keys)
    try:
        found = [
            (key, bytearray(pin.length))
            for key, pin in zip(keys, pins, strict=True)
            if pin is not None
        ]
        task = namespace.get([key for key, _ in found], [text for _, text in found])
        answers = task.wait()
    finally:
        namespace.unpin(pins)
    return [(key, bytes(text)) for (key, text), ok in zip(found, answers, strict=True) if ok]
