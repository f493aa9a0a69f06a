"""How vLLM carries what travels between the scheduler's process and its workers.

A `Placements` goes to every worker with a job, a `WorkerReport` comes back from each in vLLM's
worker metadata, and a `RankGeometry` comes once: before the first request in vLLM's handshake, or,
under `MultiConnector`, with the first worker metadata.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)

from kvdepot.vllm.compat import LoadStoreSpec, OffloadingWorkerMetadata
from kvdepot.vllm.jobs import GroupPlacements, Reports

# Attaching can take seconds when nobody answers, on the thread that runs the
# model. After a worker could move nothing, it does not try again for this long,
# and nothing is looked up.
RETRY_SECONDS = 30.0
# Where only blocks of other hosts were not loaded: one that does not answer is left alone soon.
HOST_RETRY_SECONDS = 1.0


@dataclass
class Placements(LoadStoreSpec):
    """Where the blocks of one job are, or are to be written."""

    ticket: int
    socket: str
    """The owner's socket, where a worker attaches at its first job."""
    groups: list[GroupPlacements]

    def __len__(self) -> int:
        return sum(len(group.placements) for group in self.groups)


@dataclass
class KvdepotWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's worker metadata with kvdepot's reports."""

    reports: Reports = field(default_factory=dict)
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
    options: str = ""
    """What of the engine's options counts for every block."""
    replicated: bool = False
    """Whether these bytes are those of every other rank too: one part for all of them."""
