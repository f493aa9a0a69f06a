"""Before vLLM takes the memory of its KV caches away, nothing of kvdepot's may be under way there.

`/sleep`, and whatever else releases them, waits for the device and tells no connector. What a lane
hands the device after that would meet memory that is gone, so the allocator waits here first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vllm.device_allocator.cumem import CuMemAllocator


class Rests(Protocol):
    """What moves bytes."""

    def rest(self) -> None:
        """Wait until nothing is moved."""


def rest_before_sleep(worker: Rests) -> None:
    """From now on the allocator that unmaps KV caches, where there is one, waits for `worker`."""
    # Made before the KV caches are, where the engine may sleep.
    allocator = CuMemAllocator.instance
    if allocator is None:
        return
    for name in ("sleep", "discard"):
        _rest_before(name, worker, allocator)


def _rest_before(name: str, worker: Rests, allocator: Any) -> None:
    call: Callable[..., Any] | None = getattr(allocator, name, None)
    if call is None:
        return

    def after_a_rest(*args: Any, **kwargs: Any) -> Any:
        worker.rest()
        return call(*args, **kwargs)

    setattr(allocator, name, after_a_rest)
