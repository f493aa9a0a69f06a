"""Metrics of the connector, through vLLM's own hooks, on the server's `/metrics`.

The depot's own, by the names that `docs/metrics.md` lists, and what only the
connector knows. Prometheus names end in `_total` for counters. vLLM adds its
labels (model, engine) to each.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from kvdepot.vllm.compat import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from kvdepot.vllm.faults import SafeDepot

Method = TypeVar("Method", bound=Callable[..., Any])

MOVED_BLOCKS = "kvdepot_moved_blocks"
MOVED_BYTES = "kvdepot_moved_bytes"
FAILED_BLOCKS = "kvdepot_failed_blocks"
PATH_SECONDS = "kvdepot_request_path_seconds"
PENDING_BYTES = "kvdepot_pending_bytes"
PROBE_BLOCKS = "kvdepot_probe_blocks"
PROBE_DIFFERENCE = "kvdepot_probe_difference"
FAILED_CALLS = "kvdepot_failed_calls"

# Field of the statistics -> name without its prefix, documentation.
TIER_GAUGES = {
    "capacity_bytes": ("capacity_bytes", "Bytes of data that the tier can hold."),
    "live_bytes": ("live_bytes", "Bytes published in the tier."),
    "blocks": ("live_blocks", "Blocks published in the tier."),
    "pinned_blocks": ("pinned_blocks", "Blocks held by readers."),
    "reserved_blocks": ("reserved_blocks", "Blocks being written."),
    "grouped_blocks": ("grouped_blocks", "Blocks that are evicted as a group."),
}
TIER_COUNTERS = {
    "stored_bytes": ("stored_bytes", "Bytes published since the depot was opened."),
    "evicted_blocks": ("evicted_blocks", "Blocks evicted."),
    "evicted_bytes": ("evicted_bytes", "Bytes evicted."),
    "corrupt_blocks": ("corrupt_blocks", "Corrupt blocks; each was a miss."),
    "lost_bytes": ("bad_media_bytes", "Bytes excluded after medium errors."),
    "timeouts": ("timeouts", "Requests to the tier that timed out."),
    "circuit_open": ("circuit_open", "Number of times that the circuit breaker opened."),
    "requests": ("requests", "Requests to an object store."),
    "retries": ("retries", "Requests that were retried."),
    "write_back_deferred_blocks": (
        "write_back_deferred_blocks",
        "Blocks that were kept in the previous tier, for example on their first access.",
    ),
    "evicted_groups": ("evicted_groups", "Groups evicted as a whole."),
    "full": ("no_space_blocks", "Reservations rejected for lack of space."),
    "hit_blocks": ("hit_blocks", "Blocks served, by the tier that had them."),
    "hit_bytes": ("hit_bytes", "Bytes served, by the tier that had them."),
}
DEPOT_COUNTERS = {
    "missed_blocks": ("missed_blocks", "Keys of loads that no tier had."),
    "promoted_bytes": (
        "promoted_bytes",
        "Bytes copied to the first tier after hits in lower tiers.",
    ),
    "dropped_blocks": (
        "overload_dropped_blocks",
        "Blocks dropped because the write-back queue was full.",
    ),
    "declined_blocks": (
        "admission_rejected_blocks",
        "Blocks rejected by the admission policy.",
    ),
    "reserve_present_blocks": (
        "reserve_present_blocks",
        "Reservations refused because the block is stored.",
    ),
    "reserve_pending_blocks": (
        "reserve_pending_blocks",
        "Reservations refused because another call is writing the block.",
    ),
}
WRITE_BACK = ("write_back_bytes", "Bytes in the write-back queue.")

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
            "Blocks that were not copied or were corrupt (load: recomputed), or were not "
            "completely written (store: not stored)."
        ),
        labelnames=("op",),
    ),
    PATH_SECONDS: OffloadingCounterMetadata(
        documentation=(
            "Time inside kvdepot's calls on the engine's own path: source is the scheduler or "
            "the workers' main threads (all ranks together)."
        ),
        labelnames=("source",),
    ),
    FAILED_CALLS: OffloadingCounterMetadata(
        documentation=(
            "Calls of the depot that raised an error, by calling process (scheduler, worker). "
            "Each was treated as a miss or a rejected store."
        ),
        labelnames=("source", "call"),
    ),
    PROBE_BLOCKS: OffloadingCounterMetadata(
        documentation=(
            "Stored blocks that were recomputed and compared: agreed, differed, corrupt, "
            "not_compared. Probes without a comparison: far (from the next boundary of all "
            "KV groups), preempted, abandoned, nothing (the block was evicted)."
        ),
        labelnames=("result",),
    ),
    PROBE_DIFFERENCE: OffloadingGaugeMetadata(
        documentation=("Largest relative difference between stored and recomputed keys or values."),
    ),
    PENDING_BYTES: OffloadingGaugeMetadata(
        documentation="Bytes still to write: stores in flight and the write-back queue.",
    ),
    **{
        f"kvdepot_{name}": OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
        for name, text in TIER_GAUGES.values()
    },
    **{
        f"kvdepot_{name}": OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
        for name, text in TIER_COUNTERS.values()
    },
    **{
        f"kvdepot_{name}": OffloadingCounterMetadata(documentation=text)
        for name, text in DEPOT_COUNTERS.values()
    },
    f"kvdepot_{WRITE_BACK[0]}": OffloadingGaugeMetadata(documentation=WRITE_BACK[1]),
}

# While the write-back queue drains, the engine is kept stepping so that the
# metric follows it. A far tier that stands still must not keep it for ever;
# one whose files are written beside others' work may take this long for a batch.
STALLED_SECONDS = 30.0

# The depot's figures are for people and dashboards, which look once in a few
# seconds; a step may take a millisecond.
DEPOT_SECONDS = 0.5


class Collector:
    """Gathers the connector's figures between two of vLLM's collections."""

    def __init__(self, depot: SafeDepot | None) -> None:
        """Without a depot there are no figures of one."""
        self._depot = depot
        self._stats = OffloadingConnectorStats()
        self._next_depot = 0.0
        self._changed = True
        self._counted: dict[tuple[str, str], int] = {}
        self._queued = (0, 0.0)
        self.largest_difference = 0.0
        """That probes have found."""
        self.published_pending: int | None = None
        """The value of `kvdepot_pending_bytes` that vLLM was last given."""

    def moved(self, op: str, tier: str, blocks: int, size: int) -> None:
        """Count blocks and their bytes."""
        if blocks:
            self._changed = True
            self._stats.increase_counter(MOVED_BLOCKS, blocks, (op, tier))
            self._stats.increase_counter(MOVED_BYTES, size, (op, tier))

    def failed(self, op: str, blocks: int) -> None:
        """Count blocks that failed."""
        if blocks:
            self._changed = True
            self._stats.increase_counter(FAILED_BLOCKS, blocks, (op,))

    def probed(self, result: str, blocks: int) -> None:
        """Count blocks that were compared, or probes that came to nothing."""
        if blocks:
            self._changed = True
            self._stats.increase_counter(PROBE_BLOCKS, blocks, (result,))

    def differs(self, difference: float) -> None:
        """A compared block differs by so much from the stored one."""
        if difference > self.largest_difference:
            self._changed = True
            self.largest_difference = difference
            self._stats.set_gauge(PROBE_DIFFERENCE, difference)

    def path(self, source: str, seconds: float) -> None:
        """Count time on the engine's path."""
        if seconds:
            self._stats.increase_counter(PATH_SECONDS, seconds, (source,))

    def failed_calls(self, source: str, counts: Mapping[str, int]) -> None:
        """Count calls of the depot that raised an error."""
        for call, count in counts.items():
            self._changed = True
            self._stats.increase_counter(FAILED_CALLS, count, (source, call))

    def outdated(self, queued: int) -> bool:
        """Whether the engine must keep stepping: of so many bytes in the write-back queue the
        metric does not tell yet."""
        now = time.monotonic()
        if queued != self._queued[0]:
            self._queued = (queued, now)
        if queued:
            return now - self._queued[1] < STALLED_SECONDS
        return self.published_pending not in (None, 0)

    def take(self, pending: int, *, idle: bool) -> OffloadingConnectorStats | None:
        """What happened since the last call, and the gauges; None if nothing changed.

        With `idle` the engine may sleep after this call, and what is shown stays.
        """
        if pending != self.published_pending:
            self._stats.set_gauge(PENDING_BYTES, pending)
            self.published_pending = pending
            self._changed = True
        now = time.monotonic()
        if self._changed and (idle or now >= self._next_depot):
            self._changed = False
            self._next_depot = now + DEPOT_SECONDS
            self._add_depot()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _add_depot(self) -> None:
        if self._depot is None:
            return
        state = self._depot.stats()
        if state is None or not self._depot.connected:
            # Without a service all is zero, and counters would begin again when it is back.
            return
        for tier, values in state["tiers"].items():
            for field, (name, _) in TIER_GAUGES.items():
                # How many blocks all who share a directory have there is not known.
                if values[field] is not None:
                    self._stats.set_gauge(f"kvdepot_{name}", values[field], (tier,))
            for field, (name, _) in TIER_COUNTERS.items():
                self._count(f"kvdepot_{name}", values[field], tier)
        for field, (name, _) in DEPOT_COUNTERS.items():
            self._count(f"kvdepot_{name}", state[field])
        self._stats.set_gauge(f"kvdepot_{WRITE_BACK[0]}", state["write_back_bytes"])

    def _count(self, name: str, value: int, tier: str = "") -> None:
        """Add what a counter of the depot has grown by."""
        grown = value - self._counted.get((name, tier), 0)
        if grown < 0:
            # Another service counts from the beginning.
            grown = value
            self._counted[name, tier] = 0
        if grown > 0:
            self._stats.increase_counter(name, grown, (tier,) if tier else ())
            self._counted[name, tier] = value


def on_path(method: Method) -> Method:
    """Counts the time of calls that a request waits for."""

    @functools.wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.collector.path("scheduler", time.perf_counter() - start)

    return cast(Method, timed)
