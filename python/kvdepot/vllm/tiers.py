"""What an engine wants to know of a depot's tiers: where they lie, and how large they are."""

from __future__ import annotations

import math
from typing import Any

from vllm.logger import init_logger

from kvdepot.vllm.compat import CacheHitSource

# What vLLM counts their hits under.
SOURCES = {
    "Cache": CacheHitSource.HOST,
    "Dax": CacheHitSource.DISK,
    "Nvme": CacheHitSource.DISK,
    "Posix": CacheHitSource.DISK,
}

# Tiers whose index is in the memory of their owner: it answers at once.
INDEXED = ("Cache", "Dax", "Nvme")

logger = init_logger("vllm.kvdepot.tiers")


def say_smaller(stats: dict[str, Any] | None, engine: int) -> None:
    """One line where vLLM's own prefix cache, of so many bytes, holds more than the depot."""
    tiers = (stats or {}).get("tiers") or {"": {"capacity_bytes": math.inf}}
    held, name = max((tier["capacity_bytes"], name) for name, tier in tiers.items())
    if held < engine:
        logger.warning(
            "kvdepot: tier %s (%.2f GiB) is smaller than vLLM's prefix cache (%.2f GiB); expect "
            "hits after restarts and resets, and from other engines; increase %s, or reduce "
            "vLLM's size (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE)",
            name, held / 2**30, engine / 2**30, name,
        )  # fmt: skip
