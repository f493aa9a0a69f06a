"""The index side on a real depot, without an engine: pins, reservations and reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import kvdepot
import pytest

pytest.importorskip("vllm")

from kvdepot.vllm_manager import Group, KvdepotManager
from kvdepot.vllm_messages import Placements, WorkerReport
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

pytestmark = pytest.mark.integration

PART = 64 << 10
CAPACITY = 4 << 20
# More than the capacity holds.
MANY = 2 * CAPACITY // PART


def key(name: str) -> OffloadKey:
    return make_offload_key(hashlib.sha256(name.encode()).digest(), 0)


def context(request: str, *keys: OffloadKey) -> ReqContext:
    made = ReqContext(request)
    for position, each in enumerate(keys, 1):
        made.set_offload_key_position(each, position)
    return made


def end_step(manager: KvdepotManager) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


class World:
    """A depot, a manager over it, and a worker's mover for each rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.depot = kvdepot.open("Cache", {"cache": {"capacity": CAPACITY}})
        namespace = self.depot.namespace(model="m", dtype="float32", block_tokens=16)
        self.manager = KvdepotManager(self.depot, ranks, lookup_wait_seconds=0.3)
        self.manager.set_groups({0: Group(0, namespace, [PART] * ranks)})
        self.mover = kvdepot.attach(self.depot.socket)

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
        (_, blocks) = placements.groups[0]
        memory = bytearray(fill * (PART * len(blocks)))
        job = self.mover.store(blocks, self.spans(memory, len(blocks)), part=rank)
        assert job.wait(10)
        return WorkerReport(checksums=job.checksums)

    def read(self, placements: Placements, rank: int) -> tuple[WorkerReport, bytes]:
        (_, blocks) = placements.groups[0]
        memory = bytearray(PART * len(blocks))
        job = self.mover.load(blocks, self.spans(memory, len(blocks)), part=rank)
        assert job.wait(10)
        return WorkerReport(corrupt=[n for n, bad in enumerate(job.corrupt) if bad]), bytes(memory)

    def store(self, *keys: OffloadKey, fill: bytes = b"x", request: str = "store") -> int:
        """Store blocks whole; how many were accepted."""
        output = self.manager.prepare_store(keys, context(request, *keys))
        if output.keys_to_store:
            spec = output.store_spec
            reports = {rank: self.write(spec, rank, fill) for rank in range(self.ranks)}
            self.manager.apply({spec.ticket: reports})
        return len(output.keys_to_store)

    def fill_up(self) -> None:
        for n in range(MANY):
            self.store(key(f"filler {time.monotonic_ns()} {n}"))

    def lookup(self, each: OffloadKey, request: str = "lookup") -> LookupResult:
        return self.manager.lookup(each, context(request, each))


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


def test_a_hit_stays_until_it_is_loaded(world: World) -> None:
    a, b = key("a"), key("b")
    assert world.store(a, b, fill=b"q") == 2
    request = context("r", a, b)
    assert world.manager.lookup(a, request) is LookupResult.HIT
    assert world.manager.lookup(b, request) is LookupResult.HIT
    world.fill_up()
    spec = world.manager.prepare_load([a, b], request)
    end_step(world.manager)
    world.fill_up()
    for rank in range(world.ranks):
        report, data = world.read(spec, rank)
        assert report.corrupt == []
        assert data == b"q" * (2 * PART)
        world.manager.apply({spec.ticket: {rank: report}})
    assert not world.manager.has_pending_work()
    world.fill_up()
    assert world.lookup(a) is LookupResult.MISS


def test_a_hit_that_nobody_loads_ends_with_the_step(world: World) -> None:
    world.store(key("a"))
    assert world.lookup(key("a")) is LookupResult.HIT
    end_step(world.manager)
    world.fill_up()
    assert world.lookup(key("a")) is LookupResult.MISS


def test_a_block_is_there_when_all_ranks_have_reported(world: World) -> None:
    a = key("a")
    spec = world.manager.prepare_store([a], context("r", a)).store_spec
    for rank in range(world.ranks):
        end_step(world.manager)
        assert world.lookup(a) is LookupResult.HIT_PENDING
        world.manager.apply({spec.ticket: {rank: world.write(spec, rank)}})
    assert world.lookup(a) is LookupResult.HIT


def test_one_failed_rank_leaves_the_block_absent_and_storable(world: World) -> None:
    a = key("a")
    spec = world.manager.prepare_store([a], context("r", a)).store_spec
    reports = {rank: world.write(spec, rank) for rank in range(world.ranks)}
    reports[world.ranks - 1] = WorkerReport(checksums=[None])
    world.manager.apply({spec.ticket: reports})
    assert world.lookup(a) is LookupResult.MISS
    assert not world.manager.has_pending_work()
    assert world.store(a) == 1
    assert world.lookup(a) is LookupResult.HIT


def test_a_block_that_fails_to_load_is_gone_when_the_first_rank_says_so(world: World) -> None:
    a, b = key("a"), key("b")
    world.store(a, b)
    request = context("r", a, b)
    world.manager.lookup(a, request)
    spec = world.manager.prepare_load([a, b], request)
    world.manager.apply({spec.ticket: {0: WorkerReport(corrupt=[1])}})
    assert world.lookup(b) is LookupResult.MISS
    assert world.lookup(a) is LookupResult.HIT
    for rank in range(1, world.ranks):
        world.manager.apply({spec.ticket: {rank: WorkerReport()}})
    assert not world.manager.has_pending_work()
    assert world.store(b) == 1


def test_a_block_that_was_not_moved_stays_and_is_not_looked_up_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.vllm_manager.RETRY_SECONDS", 0.2)
    a, b = key("a"), key("b")
    world.store(a, b)
    request = context("r", a, b)
    world.manager.lookup(a, request)
    spec = world.manager.prepare_load([a, b], request)
    reports = {rank: WorkerReport(undelivered=[0, 1]) for rank in range(world.ranks)}
    world.manager.apply({spec.ticket: reports})
    assert not world.manager.has_pending_work()
    assert world.lookup(a) is world.lookup(b) is LookupResult.MISS
    assert world.store(a, b) == 0, "they are there"
    time.sleep(0.25)
    assert world.lookup(a) is world.lookup(b) is LookupResult.HIT


def test_a_late_report_of_a_bad_copy_does_not_hit_the_new_one(world: World) -> None:
    a = key("a")
    world.store(a)
    specs = []
    for name in ("one", "two"):
        request = context(name, a)
        world.manager.lookup(a, request)
        specs.append(world.manager.prepare_load([a], request))
    failed = {rank: WorkerReport(corrupt=[0]) for rank in range(world.ranks)}
    world.manager.apply({specs[0].ticket: failed})
    assert world.store(a, fill=b"n") == 1
    world.manager.apply({specs[1].ticket: failed})
    assert world.lookup(a) is LookupResult.HIT


def test_waiting_for_another_store_is_bounded(world: World) -> None:
    a = key("a")
    world.manager.prepare_store([a], context("r", a))
    assert world.lookup(a) is LookupResult.HIT_PENDING
    time.sleep(0.35)
    assert world.lookup(a) is LookupResult.MISS
    assert world.manager.prepare_store([a], context("other", a)).keys_to_store == []


def test_a_reset_drops_what_is_there_and_what_is_on_its_way(world: World) -> None:
    a, b = key("a"), key("b")
    world.store(a)
    spec = world.manager.prepare_store([b], context("r", b)).store_spec
    reports = {rank: world.write(spec, rank) for rank in range(world.ranks)}
    world.manager.reset_cache()
    assert world.lookup(a) is LookupResult.MISS
    world.manager.apply({spec.ticket: reports})
    assert world.lookup(b) is LookupResult.MISS
    assert not world.manager.has_pending_work()
    assert world.store(a, b) == 2


def test_a_block_that_vanished_is_reported_by_the_worker_not_by_an_error(world: World) -> None:
    a = key("a")
    spec = world.manager.prepare_load([a], context("r", a))
    assert spec.groups == [(0, [None])]
    reports = {rank: WorkerReport(undelivered=[0]) for rank in range(world.ranks)}
    world.manager.apply({spec.ticket: reports})
    assert not world.manager.has_pending_work()


def test_adapters_with_other_files_have_other_blocks(world: World) -> None:
    a = key("a")
    world.manager.set_adapter("one", "files of one")
    world.manager.set_adapter("two", "files of two")
    assert world.store(a, request="one") == 1
    assert world.lookup(a, "one") is LookupResult.HIT
    assert world.lookup(a, "two") is LookupResult.MISS
    assert world.lookup(a, "plain") is LookupResult.MISS
    world.manager.on_request_finished(context("two"))
    assert world.store(a, request="two") == 1


def test_reports_of_unknown_tickets_change_nothing(world: World) -> None:
    world.store(key("a"))
    world.manager.apply({999: {0: WorkerReport(corrupt=[0])}})
    assert world.lookup(key("a")) is LookupResult.HIT
