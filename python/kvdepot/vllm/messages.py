"""What travels between the scheduler's process and vLLM's workers.

vLLM carries all of it: a `Placements` goes to every worker with a job, a
`WorkerReport` comes back from each in vLLM's worker metadata, and a
`RankGeometry` comes once: before the first request in vLLM's handshake, or,
under `MultiConnector`, with the first worker metadata.

A **ticket** is one job as kvdepot counts it. vLLM's own job accounting cannot
be used for that: it reports neither failed stores nor jobs that a cache reset
dropped, and reservations and pins must end in both cases.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

# Attaching can take seconds when nobody answers, on the thread that runs the
# model. After a worker could move nothing, it does not try again for this long,
# and nothing is looked up.
RETRY_SECONDS = 30.0


@dataclass
class Placements(LoadStoreSpec):
    """Where the blocks of one job are, or are to be written."""

    ticket: int
    socket: str
    """The owner's socket, where a worker attaches at its first job."""
    groups: list[tuple[int, list[bytes | None]]]
    """For each KV group of the job, by its position: a placement a block, in the
    order of vLLM's block ids. None: the block is gone, report it as undelivered."""
    memory: tuple[int, ...] = ()
    """The mover's media that are memory: a device driver may pin them. It would read in a file."""

    def __len__(self) -> int:
        return sum(len(blocks) for _, blocks in self.groups)


@dataclass
class WorkerReport:
    """One rank's outcome of one ticket."""

    checksums: list[bytes | None] | None = None
    """Of a store: a checksum a block, None where the copy failed."""
    corrupt: list[int] = field(default_factory=list)
    """Of a load: indexes of the blocks that did not verify."""
    undelivered: list[int] = field(default_factory=list)
    """Of a load: indexes of the blocks that were not moved; they may well be sound."""


@dataclass
class KvdepotWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's worker metadata with kvdepot's reports."""

    reports: dict[int, dict[int, WorkerReport]] = field(default_factory=dict)
    """ticket -> rank -> report"""
    path_seconds: float = 0.0
    """Time spent in kvdepot's calls on the worker's main thread, all ranks."""
    failed_calls: dict[str, int] = field(default_factory=dict)
    """Calls of the depot that raised an error, all ranks."""
    geometries: dict[int, RankGeometry] = field(default_factory=dict)
    """rank -> what its KV caches look like: once, where vLLM's handshake is another connector's."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvdepotWorkerMetadata:
        """Both ranks' reports in one."""
        base = super().aggregate(other)
        reports = {ticket: dict(by_rank) for ticket, by_rank in self.reports.items()}
        seconds = self.path_seconds
        failed = Counter(self.failed_calls)
        geometries = dict(self.geometries)
        if isinstance(other, KvdepotWorkerMetadata):
            for ticket, by_rank in other.reports.items():
                reports.setdefault(ticket, {}).update(by_rank)
            seconds += other.path_seconds
            failed.update(other.failed_calls)
            geometries.update(other.geometries)
        return KvdepotWorkerMetadata(
            completed_jobs=base.completed_jobs,
            transfer_stats=base.transfer_stats,
            reports=reports,
            path_seconds=seconds,
            failed_calls=dict(failed),
            geometries=geometries,
        )


@dataclass
class RankGeometry(KVConnectorHandshakeMetadata):
    """How one rank's KV caches lie in memory, from the worker that allocated them."""

    rank: int
    payload_bytes: list[int]
    """For each KV group by position: bytes that this rank adds to a block."""
    layouts: list[str]
    """For each KV group: a description of the bytes; other bytes, another text."""
    replicated: bool = False
    """Whether these bytes are those of every other rank too: one part for all of them."""
