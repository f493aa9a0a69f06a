"""The index side on a real depot, without an engine: pins, reservations and reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_manager import CAPACITY, MANY, PART, Clock, World, context, end_step, key, soon
from kvdepot.vllm.beside import Beside
from kvdepot.vllm.jobs import Group, WorkerReport
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.messages import RETRY_SECONDS
from kvdepot.vllm.metrics import DEPOT_COUNTERS, TIER_COUNTERS, TIER_GAUGES, Collector
from kvdepot.vllm.roles import Role
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
)
from vllm_demo.server import free_port

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvdepot.vllm.manager.time", clock)
    return clock


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


def test_a_hit_stays_until_it_is_loaded(world: World) -> None:
    a, b = key("a"), key("b")
    assert world.store(a, b, fill=b"q") == 2
    c = key("c")
    request = context("r", a, b, c)
    assert world.manager.lookup(a, request) is LookupResult.HIT
    assert world.manager.lookup(b, request) is LookupResult.HIT
    assert world.manager.lookup(c, request) is LookupResult.MISS
    assert world.depot.stats()["missed_blocks"] == 0, "it only looked"
    # Another engine's stores: its own come after all lookups and loads of a step.
    other = World(world.ranks, world.depot)
    other.fill_up()
    other.mover.close()
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


@pytest.mark.parametrize("stores_last", [True, False])
def test_hits_that_nobody_loads_leave_room_for_the_stores_of_the_step(stores_last: bool) -> None:
    """vLLM ends a step before its stores, and from 0.33 on after them."""
    world = World(1)
    stored = [key(f"block {n}") for n in range(MANY)]
    for n in range(0, MANY, 4):
        world.store(*stored[n : n + 4], request=f"store {n}")
        world.manager.on_request_finished(context(f"store {n}"))
    for n, each in enumerate(stored):
        world.lookup(each, f"lookup {n}")
    tier = world.depot.stats()["tiers"]["Cache"]
    assert tier["pinned_blocks"] == tier["blocks"] < MANY
    (group,) = world.manager.hittable.values()
    rest = group.namespace.reserve([bytes([n]) * 32 for n in range(8)], PART)
    assert None in rest, "there is no room"
    if stores_last:
        end_step(world.manager)
    assert world.store(key("new"), request="new") == 1
    end_step(world.manager)
    assert world.depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 0
    group.namespace.abort([one for one in rest if one is not None])
    world.close()


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
    world: World, clock: Clock
) -> None:
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
    clock.now += RETRY_SECONDS - 1
    assert world.lookup(a) is LookupResult.MISS
    clock.now += 2
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


def test_waiting_for_another_store_is_bounded(world: World, clock: Clock) -> None:
    a = key("a")
    world.manager.prepare_store([a], context("r", a))
    assert world.lookup(a) is LookupResult.HIT_PENDING
    clock.now += 0.25
    assert world.lookup(a) is LookupResult.HIT_PENDING
    clock.now += 0.1
    assert world.lookup(a) is LookupResult.MISS
    assert world.manager.prepare_store([a], context("other", a)).keys_to_store == []


@pytest.mark.parametrize("on_reset", ["epoch", "clear"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_from_before_a_reset_is_served_after_it(ranks: int, on_reset: str) -> None:
    world = World(ranks, on_reset=on_reset)
    a, b, c = key("a"), key("b"), key("c")
    world.store(a, c)
    request = context("r", a)
    world.manager.lookup(a, request)
    load = world.manager.prepare_load([a], request)
    spec = world.manager.prepare_store([b], context("r", b)).store_spec
    assert world.lookup(c) is LookupResult.HIT, "and stays pinned until the step ends"
    reports = {rank: world.write(spec, rank) for rank in range(world.ranks)}
    world.manager.reset_cache()
    assert {world.lookup(each) for each in (a, b, c)} == {LookupResult.MISS}
    # Which was on its way: its room is still held where nothing but a report ends that.
    again = world.store(b, fill=b"n")
    assert again == (on_reset == "epoch")
    # What was on its way ends where it began.
    world.manager.apply({spec.ticket: reports})
    world.manager.apply({load.ticket: {rank: WorkerReport() for rank in range(ranks)}})
    assert not world.manager.has_pending_work()
    assert world.lookup(b) is (LookupResult.HIT if again else LookupResult.MISS)
    end_step(world.manager)
    assert world.store(a, b, c) == 3 - again
    assert world.depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 0
    assert world.depot.stats()["tiers"]["Cache"]["reserved_blocks"] == 0
    assert world.blocks() == (5 if on_reset == "epoch" else 3), "an epoch destroys nothing"
    world.close()


def test_an_ended_epoch_gives_its_room_back_and_the_first_one_stays(world: World) -> None:
    a = key("a")
    world.store(a, fill=b"q")
    first = world.manager.epoch
    epochs = set()
    for _ in range(3):
        world.manager.reset_cache()
        epochs.add(world.manager.epoch)
        assert world.lookup(a) is LookupResult.MISS
        assert world.store(a) == 1
        assert world.blocks() == 2
    assert first is None
    assert len(epochs) == 3
    # As the engine's next start does.
    world.manager.set_groups(world.groups(None), world.groups)
    request = context("r", a)
    assert world.manager.lookup(a, request) is LookupResult.HIT
    spec = world.manager.prepare_load([a], request)
    for rank in range(world.ranks):
        assert world.read(spec, rank)[1] == b"q" * PART
        world.manager.apply({spec.ticket: {rank: WorkerReport()}})


def test_a_reset_with_the_same_weights_costs_only_what_is_being_stored() -> None:
    world = World(1, on_reset="verify")
    a, b = key("a"), key("b")
    world.store(a)
    spec = world.manager.prepare_store([b], context("r", b)).store_spec
    world.manager.reset_cache()
    world.manager.apply({spec.ticket: {0: world.write(spec, 0)}})
    assert world.lookup(a) is LookupResult.HIT
    # Its worker may have read KV caches that a sleep has discarded.
    assert world.lookup(b) is LookupResult.MISS
    world.store(b)
    assert world.lookup(b) is LookupResult.HIT
    world.close()


def test_until_the_workers_have_described_themselves_a_request_waits_a_little(
    clock: Clock,
) -> None:
    world = World(1)
    manager = KvdepotManager(world.depot, 1, lookup_wait_seconds=0.2)
    a = key("a")
    world.store(a)
    assert manager.has_pending_work(), "the engine steps, so that they can"
    assert manager.lookup(a, context("r", a)) is LookupResult.RETRY
    assert manager.prepare_store([a], context("r", a)).keys_to_store == []
    manager.set_groups(world.groups(None), world.groups)
    assert not manager.has_pending_work()
    assert manager.lookup(a, context("r", a)) is LookupResult.HIT

    never = KvdepotManager(world.depot, 1, lookup_wait_seconds=0.2)
    assert never.lookup(a, context("r", a)) is LookupResult.RETRY
    clock.now += 0.25
    assert never.lookup(a, context("r", a)) is LookupResult.MISS
    for _ in range(2000):
        end_step(never)
    assert not never.has_pending_work(), "an engine without requests may sleep"
    assert never.lookup(a, context("other", a)) is LookupResult.MISS
    world.close()


def test_a_block_with_gaps_is_not_stored_and_those_beside_it_are(world: World) -> None:
    a, b, c = key("a"), key("b"), key("c")
    world.manager.set_whole(lambda each, request: each != b)
    output = world.manager.prepare_store([a, b, c], context("r", a, b, c))
    assert list(output.keys_to_store) == [a, c]
    assert len(output.store_spec) == 2
    world.manager.apply(
        {
            output.store_spec.ticket: {
                r: world.write(output.store_spec, r) for r in range(world.ranks)
            }
        }
    )
    assert [world.lookup(each) for each in (a, b, c)] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]


def test_a_block_that_vanished_is_reported_by_the_worker_not_by_an_error(world: World) -> None:
    a = key("a")
    spec = world.manager.prepare_load([a], context("r", a))
    assert [group.placements for group in spec.groups] == [[None]]
    reports = {rank: WorkerReport(undelivered=[0]) for rank in range(world.ranks)}
    world.manager.apply({spec.ticket: reports})
    assert not world.manager.has_pending_work()


def test_adapters_with_other_files_have_other_blocks(world: World) -> None:
    a = key("a")
    world.manager.set_beside("one", Beside(adapter=b"files of one"))
    world.manager.set_beside("two", Beside(adapter=b"files of two"))
    assert world.store(a, request="one") == 1
    assert world.lookup(a, "one") is LookupResult.HIT
    assert world.lookup(a, "two") is LookupResult.MISS
    assert world.lookup(a, "plain") is LookupResult.MISS
    world.manager.on_request_finished(context("two"))
    assert world.store(a, request="two") == 1


def image_at(offset: int) -> list[Any]:
    return [SimpleNamespace(mm_position=SimpleNamespace(offset=offset))]


def test_blocks_behind_an_image_have_the_name_of_how_it_is_read(world: World) -> None:
    text, image = key("text"), key("image")
    # The first block ends where the image begins.
    world.manager.set_beside("one", Beside(media=b"large", features=image_at(1)))
    world.manager.set_beside("two", Beside(media=b"small", features=image_at(1)))
    assert world.store(text, image, request="one") == 2
    hits = set()
    for request in ("one", "two", "plain"):
        for each in (text, image):
            asked = context(request, text, image)
            if world.manager.lookup(each, asked) is LookupResult.HIT:
                hits.add((request, each))
        end_step(world.manager)
    assert hits == {("one", text), ("two", text), ("plain", text), ("one", image)}


def test_a_miss_in_one_group_asks_for_what_the_others_lack() -> None:
    settings = {"cache": {"capacity": CAPACITY}, "admission": "learned"}
    world = World(1, kvdepot.open("Cache", settings))
    second = world.manager.depot.namespace(model="w", dtype="float32", block_tokens=16)
    world.manager.set_groups({**world.groups(None), 1: Group(1, second, [PART])})
    prompt = [key(name, group) for group in (0, 1) for name in "abcd"]
    request = ReqContext("r")
    for position, each in enumerate(prompt):
        request.set_offload_key_position(each, position % 4 + 1)

    def offer() -> int:
        output = world.manager.prepare_store(prompt, request)
        checksums: list[bytes | None] = []
        for _, placements, _ in output.store_spec.groups:
            memory = bytearray(PART * len(placements))
            job = world.mover.store(placements, world.spans(memory, len(placements)))
            assert job.wait(60)
            checksums += job.checksums
        report = WorkerReport(checksums=checksums)
        world.manager.apply({output.store_spec.ticket: {0: report}})
        return len(output.keys_to_store)

    assert offer() == 8
    world.fill_up()
    # They have left unread.
    assert world.manager.lookup(prompt[0], request) is LookupResult.MISS
    end_step(world.manager)
    assert offer() == 8
    world.close()


def over_peer(**settings: Any) -> kvdepot.Depot:
    """A depot over the only host of a `Peer`."""
    hosts = f"one 127.0.0.1:{free_port()}"
    peer = {"name": "one", "hosts": hosts, "capacity": 32 << 20}
    return kvdepot.open("Cache|Peer", {"cache": {"capacity": CAPACITY}, "peer": peer, **settings})


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lies_on_a_host_is_loaded_from_there(ranks: int) -> None:
    world = World(ranks, over_peer())
    try:
        a, b = key("a"), key("b")
        assert world.store(a, b, fill=b"q") == 2
        assert world.depot.drain(30)
        world.fill_up()
        assert world.depot.drain(30)
        request = context("r", a, b, key("c"))
        assert soon(world.manager, a, request) is LookupResult.HIT
        assert world.manager.lookup(b, request) is LookupResult.HIT
        spec = world.manager.prepare_load([a, b], request)
        assert world.manager.tiers_of("r") == {"Peer": 2}
        for rank in range(ranks):
            report, data = world.read(spec, rank)
            assert report.corrupt == []
            assert data == b"q" * (2 * PART)
            world.manager.apply({spec.ticket: {rank: report}})
    finally:
        world.close()
        world.depot.close()


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(world: World) -> None:
    world.manager.role = Role(loads=False)
    assert world.store(key("a")) == 1
    assert world.lookup(key("a")) is LookupResult.MISS
    world.manager.role = Role(stores=False)
    assert world.lookup(key("a")) is LookupResult.HIT
    assert world.store(key("b")) == 0


def test_a_prompt_that_another_engine_computes_is_waited_for(world: World, clock: Clock) -> None:
    world.manager.alone = True
    request = context("r", key("a"), key("b"))
    request.kv_transfer_params = {"do_remote_prefill": True}
    assert world.manager.lookup(key("a"), request) is LookupResult.RETRY
    # What lies behind it is of no use in this step.
    assert world.manager.lookup(key("b"), request) is LookupResult.MISS
    end_step(world.manager)
    assert world.store(key("a")) == 1
    assert soon(world.manager, key("a"), request) is LookupResult.HIT
    # And no longer than that.
    other = context("other", key("b"))
    other.kv_transfer_params = {"do_remote_prefill": True}
    for seconds in (0.25, 0.1):
        assert world.manager.lookup(key("b"), other) is LookupResult.RETRY
        end_step(world.manager)
        clock.now += seconds
    assert world.manager.lookup(key("b"), other) is LookupResult.MISS


def test_the_words_of_another_connector_are_not_waited_for(world: World) -> None:
    request = context("r", key("a"), key("b"))
    request.kv_transfer_params = {"do_remote_prefill": True}
    assert world.manager.lookup(key("a"), request) is LookupResult.MISS
    request.kv_transfer_params = {"kvdepot_stored": True}
    assert world.manager.lookup(key("a"), request) is LookupResult.RETRY


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_workers_do_not_reach_comes_near_while_its_request_waits(
    ranks: int, tmp_path: Path
) -> None:
    """Who reads verifies, and workers have no keys to authenticate a tier of others with."""
    keys = tmp_path / "keys"
    keys.write_text(f"- {'1' * 64}\n")
    keys.chmod(0o600)
    world = World(ranks, over_peer(mac_key_file=str(keys)))
    try:
        a, b = key("a"), key("b")
        assert world.store(a, b, fill=b"q") == 2
        assert world.depot.drain(30)
        world.fill_up()
        # What is not stored further yet makes no room.
        assert world.depot.drain(30)
        request = context("r", a, b, key("c"))
        answers = [world.manager.lookup(a, request)]
        while answers[-1] is LookupResult.RETRY:
            end_step(world.manager)
            answers.append(world.manager.lookup(a, request))
        assert answers[0] is LookupResult.RETRY
        assert answers[-1] is LookupResult.HIT
        assert world.manager.lookup(b, request) is LookupResult.HIT
        spec = world.manager.prepare_load([a, b], request)
        for rank in range(ranks):
            report, data = world.read(spec, rank)
            assert report.corrupt == []
            assert data == b"q" * (2 * PART)
            world.manager.apply({spec.ticket: {rank: report}})
    finally:
        world.close()
        world.depot.close()


def test_reports_of_unknown_tickets_change_nothing(world: World) -> None:
    world.store(key("a"))
    world.manager.apply({999: {0: WorkerReport(corrupt=[0])}})
    assert world.lookup(key("a")) is LookupResult.HIT


def test_a_block_that_is_the_same_on_all_ranks_is_stored_once_and_read_by_each() -> None:
    world = World(2, replicated=True)
    try:
        a, b = key("a"), key("b")
        spec = world.manager.prepare_store([a, b], context("r", a, b)).store_spec
        world.manager.apply({spec.ticket: {0: world.write(spec, 0, b"q")}})
        assert not world.manager.has_pending_work(), "the other rank writes nothing"
        tier = world.depot.stats()["tiers"]["Cache"]
        assert (tier["blocks"], tier["live_bytes"]) == (2, 2 * PART)

        request = context("r", a, b)
        assert world.manager.lookup(a, request) is LookupResult.HIT
        spec = world.manager.prepare_load([a, b], request)
        for _rank in range(2):
            # Each reads the one part that there is.
            report, data = world.read(spec, 0)
            assert (report.corrupt, data) == ([], b"q" * (2 * PART))
        world.manager.apply({spec.ticket: {0: WorkerReport()}})
        assert world.manager.has_pending_work(), "the second rank still reads"
        world.manager.apply({spec.ticket: {1: WorkerReport(corrupt=[1])}})
        assert not world.manager.has_pending_work()
        assert world.lookup(a) is LookupResult.HIT
        assert world.lookup(b) is LookupResult.MISS
    finally:
        world.close()


def crowded(tmp_path: Path) -> kvdepot.Depot:
    """Four blocks fill the queue to the far tier, eight the near one."""
    return kvdepot.open(
        "Cache|Dax",
        {
            "cache": {"capacity": 8 * PART},
            "dax": {"path": str(tmp_path / "arena"), "capacity": 4 << 20},
            "write_back_depth": 4 * PART,
            "overload": "drop",
        },
    )


def test_under_overload_a_prompt_is_kept_as_far_as_there_is_room(tmp_path: Path) -> None:
    world = World(1, crowded(tmp_path))
    try:
        prompt = [key(f"p{n}") for n in range(12)]
        request = context("r", *prompt)
        step = [world.manager.prepare_store(prompt[:6], request)]
        assert step[0].keys_to_store == prompt[:6], "two of them in the near tier alone"
        step.append(world.manager.prepare_store(prompt[6:10], request))
        assert step[1].keys_to_store == prompt[6:8], "no room for the ninth"
        # There is room again, but not for what nobody could find.
        for output in step:
            spec = output.store_spec
            world.manager.apply({spec.ticket: {0: world.write(spec, 0)}})
        assert world.depot.drain(10)
        assert world.manager.prepare_store(prompt[10:], request).keys_to_store == []
        assert world.manager.prepare_store(prompt[:10], request).keys_to_store == []
        again = context("r", *prompt)
        assert [world.manager.lookup(each, again) for each in prompt[:9]] == (
            [LookupResult.HIT] * 8 + [LookupResult.MISS]
        )
        end_step(world.manager)
        world.manager.on_request_finished(request)

        # The next request with that prompt stores the rest, and what was near only is far too.
        assert world.depot.drain(10)
        other = context("s", *prompt)
        output = world.manager.prepare_store(prompt, other)
        assert output.keys_to_store == prompt[8:]
        spec = output.store_spec
        world.manager.apply({spec.ticket: {0: world.write(spec, 0)}})
        assert world.depot.drain(10)
        assert world.depot.stats()["tiers"]["Dax"]["blocks"] == 12
    finally:
        world.close()


def test_counters_of_the_next_service_are_added_to_those_of_the_last() -> None:
    figures = {"value": 5}

    class Depot:
        connected = True

        def stats(self) -> dict[str, Any]:
            tier = dict.fromkeys([*TIER_GAUGES, *TIER_COUNTERS], figures["value"])
            return {
                "tiers": {"Cache": tier},
                "write_back_bytes": 0,
                **dict.fromkeys(DEPOT_COUNTERS, 0),
            }

    depot = Depot()
    collector = Collector(depot)
    taken = []
    # It counts to 5, and to 9; the next one to 2, and to 3.
    for value in (5, 9, 2, 3):
        figures["value"] = value
        collector.failed("load", 1)
        stats = collector.take(0, idle=True)
        assert stats is not None
        taken.append(stats._values["kvdepot_hit_blocks"][("Cache",)])
    assert taken == [5, 4, 2, 1]
    # One that is only away for a while is all zeros meanwhile, and then goes on where it was.
    figures["value"], depot.connected = 0, False
    collector.failed("load", 1)
    stats = collector.take(0, idle=True)
    assert stats is None or "kvdepot_hit_blocks" not in stats._values
    figures["value"], depot.connected = 4, True
    collector.failed("load", 1)
    stats = collector.take(0, idle=True)
    assert stats is not None
    assert stats._values["kvdepot_hit_blocks"][("Cache",)] == 1
