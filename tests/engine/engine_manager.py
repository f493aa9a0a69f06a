"""A manager on a real depot with a worker for each rank, for the tests of the index side."""

from __future__ import annotations

import hashlib
import time

import kvdepot
from kvdepot.vllm.jobs import Group, Groups, WorkerReport
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.messages import Placements
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

PART = 64 << 10
CAPACITY = 4 << 20
# More than the capacity holds.
MANY = 2 * CAPACITY // PART


def key(name: str, group: int = 0) -> OffloadKey:
    return make_offload_key(hashlib.sha256(name.encode()).digest(), group)


def context(request: str, *keys: OffloadKey) -> ReqContext:
    made = ReqContext(request)
    for position, each in enumerate(keys, 1):
        made.set_offload_key_position(each, position)
    return made


def end_step(manager: KvdepotManager) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


class Clock:
    """The time as the manager has it: it passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.perf_counter = time.perf_counter

    def monotonic(self) -> float:
        return self.now


class World:
    """A depot, a manager over it, and a worker's mover for each rank."""

    def __init__(
        self,
        ranks: int,
        depot: kvdepot.Depot | None = None,
        *,
        replicated: bool = False,
        shared: bool = False,
        on_reset: str = "epoch",
        lookup_wait: float = 0.3,
    ) -> None:
        """With `replicated` the first rank stores a block for all of them; a `shared` depot is a
        service's."""
        self.ranks = ranks
        self.depot = depot or kvdepot.open("Cache", {"cache": {"capacity": CAPACITY}})
        self.writers = 1 if replicated else ranks
        self.manager = KvdepotManager(
            self.depot, ranks, lookup_wait, on_reset, writers=self.writers, shared=shared
        )
        self.manager.set_groups(self.groups(None), self.groups)
        self.mover = kvdepot.attach(self.depot.socket or "", with_owner=True)

    def groups(self, epoch: str | None) -> Groups:
        depot = self.manager.depot
        namespace = depot.namespace(model="m", dtype="float32", block_tokens=16, salt=epoch)
        return {0: Group(0, namespace, [PART] * self.writers)}

    def blocks(self) -> int:
        return self.depot.stats()["tiers"]["Cache"]["blocks"] or 0

    def close(self) -> None:
        self.mover.close()
        self.manager.shutdown()

    def spans(self, memory: bytearray, blocks: int) -> kvdepot.Spans:
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return kvdepot.Spans(
            ranges=[(address, PART, PART)], rows=[[n] for n in range(blocks)], owner=memory
        )

    def write(self, placements: Placements, rank: int, fill: bytes = b"x") -> WorkerReport:
        blocks = placements.groups[0].placements
        memory = bytearray(fill * (PART * len(blocks)))
        job = self.mover.store(blocks, self.spans(memory, len(blocks)), part=rank)
        assert job.wait(60)
        return WorkerReport(checksums=job.checksums)

    def read(self, placements: Placements, rank: int) -> tuple[WorkerReport, bytes]:
        blocks = placements.groups[0].placements
        memory = bytearray(PART * len(blocks))
        job = self.mover.load(blocks, self.spans(memory, len(blocks)), part=rank)
        assert job.wait(60)
        return WorkerReport(corrupt=[n for n, bad in enumerate(job.corrupt) if bad]), bytes(memory)

    def store(self, *keys: OffloadKey, fill: bytes = b"x", request: str = "store") -> int:
        """Store blocks whole; how many were accepted."""
        output = self.manager.prepare_store(keys, context(request, *keys))
        if output.keys_to_store:
            spec = output.store_spec
            reports = {rank: self.write(spec, rank, fill) for rank in range(self.writers)}
            self.manager.apply({spec.ticket: reports})
        return len(output.keys_to_store)

    def fill_up(self) -> None:
        # One request could not displace so much, and requests far larger than these displace less.
        for n in range(MANY // 4):
            name = f"filler {time.monotonic_ns()} {n}"
            fillers = [key(f"{name} {block}") for block in range(4)]
            self.store(*fillers, request=f"filler {n}")
            self.manager.on_request_finished(context(f"filler {n}", *fillers))

    def lookup(self, each: OffloadKey, request: str = "lookup") -> LookupResult:
        return soon(self.manager, each, context(request, each))


def soon(manager: KvdepotManager, each: OffloadKey, request: ReqContext) -> LookupResult:
    """The answer, after steps in which it is not known yet."""
    answer = manager.lookup(each, request)
    while answer is LookupResult.RETRY:
        end_step(manager)
        answer = manager.lookup(each, request)
    return answer
