"""Metrics of the connector, through vLLM's own hooks, on the server's `/metrics`.

Prometheus names end in `_total` for counters. vLLM adds its labels (model,
engine) to each.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

MOVED_BLOCKS = "kvdepot_moved_blocks"
MOVED_BYTES = "kvdepot_moved_bytes"
FAILED_BLOCKS = "kvdepot_failed_blocks"
DROPPED_BLOCKS = "kvdepot_dropped_blocks"
PATH_SECONDS = "kvdepot_path_seconds"
PENDING_BYTES = "kvdepot_pending_bytes"
USED_BYTES = "kvdepot_used_bytes"
CAPACITY_BYTES = "kvdepot_capacity_bytes"
HELD_BLOCKS = "kvdepot_held_blocks"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    MOVED_BLOCKS: OffloadingCounterMetadata(
        documentation="Blocks moved, by operation (load, store) and tier.",
        labelnames=("op", "tier"),
    ),
    MOVED_BYTES: OffloadingCounterMetadata(
        documentation="Bytes of the blocks moved, by operation (load, store) and tier.",
        labelnames=("op", "tier"),
    ),
    FAILED_BLOCKS: OffloadingCounterMetadata(
        documentation=(
            "Blocks that did not arrive or did not verify (load; recomputed), or were not "
            "written whole (store; absent)."
        ),
        labelnames=("op",),
    ),
    DROPPED_BLOCKS: OffloadingCounterMetadata(
        documentation="Blocks dropped on their way to the far tier because its queue was full.",
    ),
    PATH_SECONDS: OffloadingCounterMetadata(
        documentation=(
            "Time inside kvdepot's calls on the engine's own path: source is the scheduler or "
            "the workers' main threads (all ranks together)."
        ),
        labelnames=("source",),
    ),
    PENDING_BYTES: OffloadingGaugeMetadata(
        documentation="Bytes still to write: stores in flight and the write-back queue.",
    ),
    USED_BYTES: OffloadingGaugeMetadata(
        documentation="Bytes allocated in each tier.", labelnames=("tier",)
    ),
    CAPACITY_BYTES: OffloadingGaugeMetadata(
        documentation="Bytes of each tier.", labelnames=("tier",)
    ),
    HELD_BLOCKS: OffloadingGaugeMetadata(
        documentation="Blocks in each tier.", labelnames=("tier",)
    ),
}

# The gauges of the tiers are for people and dashboards, which look once in a
# few seconds; a step may take a millisecond.
TIER_GAUGES_SECONDS = 0.5


class Collector:
    """Gathers the connector's figures between two of vLLM's collections."""

    def __init__(self, depot: Any) -> None:
        self._depot = depot
        self._stats = OffloadingConnectorStats()
        self._next_tiers = 0.0
        self._dropped = 0
        self.published_pending: int | None = None
        """The value of `kvdepot_pending_bytes` that vLLM was last given."""

    def moved(self, op: str, tier: str, blocks: int, size: int) -> None:
        """Count blocks and their bytes."""
        if blocks:
            self._stats.increase_counter(MOVED_BLOCKS, blocks, (op, tier))
            self._stats.increase_counter(MOVED_BYTES, size, (op, tier))

    def failed(self, op: str, blocks: int) -> None:
        """Count blocks that failed."""
        if blocks:
            self._stats.increase_counter(FAILED_BLOCKS, blocks, (op,))

    def path(self, source: str, seconds: float) -> None:
        """Count time on the engine's path."""
        if seconds:
            self._stats.increase_counter(PATH_SECONDS, seconds, (source,))

    def take(self, pending: int) -> OffloadingConnectorStats | None:
        """What happened since the last call, and the gauges; None if nothing changed."""
        if pending != self.published_pending:
            self._stats.set_gauge(PENDING_BYTES, pending)
            self.published_pending = pending
        now = time.monotonic()
        if not self._stats.is_empty() and now >= self._next_tiers:
            self._next_tiers = now + TIER_GAUGES_SECONDS
            self._add_tiers()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _add_tiers(self) -> None:
        state = self._depot.stats()
        for tier, values in state["tiers"].items():
            self._stats.set_gauge(USED_BYTES, values["used_bytes"], (tier,))
            self._stats.set_gauge(CAPACITY_BYTES, values["capacity_bytes"], (tier,))
            self._stats.set_gauge(HELD_BLOCKS, values["blocks"], (tier,))
        dropped = state["dropped_blocks"]
        if dropped > self._dropped:
            self._stats.increase_counter(DROPPED_BLOCKS, dropped - self._dropped)
            self._dropped = dropped
