"""KV events: an indexer that follows them has what the depot has, whatever happens to both."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK, full
from engine_events import (
    DEADLINE_SECONDS,
    Engine,
    History,
    Indexer,
    Published,
    engine,
    keys,
    replayed,
    settle,
    unpaced,
)
from engine_harness import logged
from engine_manager import MANY, key
from kvdepot.vllm import events as kvdepot_events
from kvdepot.vllm.beside import Beside, Hashes
from kvdepot.vllm.compat import events as vllm_events
from kvdepot.vllm.connector import KvdepotConnector
from kvdepot.vllm.events import Events
from test_manager_service import Service, patient_service
from test_scheduling import Engines, engines, prompt
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

__all__ = ["engine", "engines", "patient_service", "unpaced"]

pytestmark = pytest.mark.integration


def test_what_is_stored_and_evicted_is_published(engine: Engine) -> None:
    assert engine.store(*keys("a", 8)) == 8
    engine.agrees()
    before = engine.publisher.indexer.there()
    assert len(before) == 8
    for _ in range(3):
        engine.world.fill_up()
        engine.agrees()
    assert not before <= engine.publisher.indexer.there()

    def is_silent() -> bool:
        engine.agrees()
        batches = engine.publisher.indexer.batches
        engine.agrees()
        return engine.publisher.indexer.batches == batches

    assert engine.at_rest(is_silent), "nothing has changed"


def test_what_was_there_is_announced_at_the_start(engine: Engine) -> None:
    assert engine.store(*keys("a", 8)) == 8
    engine.publisher = Published()
    engine.follow(engine.publisher)
    assert engine.store(*keys("b", 8)) == 8
    engine.agrees()
    assert len(engine.publisher.indexer.there()) == 16


def test_what_is_stored_and_gone_before_a_round_is_not_announced(engine: Engine) -> None:
    engine.settle()
    (gone,) = keys("a", 1)
    assert engine.store(gone) == 1
    engine.namespace.remove([gone[:32]])
    engine.agrees()
    assert engine.store(gone) == 1
    engine.agrees()
    engine.namespace.remove([gone[:32]])
    assert engine.store(gone) == 1
    engine.agrees()
    assert len(engine.publisher.indexer.there()) == 1


def test_too_many_removals_are_found_by_a_listing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvdepot_events, "REMOVALS", 1)
    monkeypatch.setattr(kvdepot_events, "PAGE", 5)
    assert engine.store(*keys("a", 8)) == 8
    engine.agrees()
    for _ in range(3):
        engine.world.fill_up()
        # The rest of the removals is lost in this round already.
        engine.events.round()
        engine.store(*keys("b", 4))
        engine.agrees()


def test_after_indexers_have_forgotten_all_blocks_they_hear_of_them_again(engine: Engine) -> None:
    assert engine.store(*keys("a", 8)) == 8
    engine.agrees()
    engine.publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
    assert engine.publisher.indexer.there() == set()
    engine.agrees()
    assert len(engine.publisher.indexer.there()) == 8


def test_they_may_forget_them_in_the_middle_of_a_round(engine: Engine) -> None:
    engine.settle()
    clears = iter([True, False, True])

    def clear(used: Any, some: Any, **more: Any) -> Any:
        if next(clears, False):
            engine.publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
        return found(used, some, **more)

    found, engine.events._found = engine.events._found, clear  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        assert engine.store(*keys(name, 4)) == 4
        engine.agrees()


class Socket:
    """Who asks for batches."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = list(wanted)

    def poll(self, timeout: int) -> int:
        return len(self.wanted)

    def recv_multipart(self) -> list[bytes]:
        return [b"subscriber", b"", self.wanted.pop(0).to_bytes(8, "big")]


def test_who_asks_for_batches_that_are_not_kept_hears_of_all_blocks_again(engine: Engine) -> None:
    engine.publisher._replay = Socket(1, 0)
    engine.follow(engine.publisher)
    for name in ("a", "b"):
        assert engine.store(*keys(name, 8)) == 8
        engine.agrees()
    replay = engine.publisher._replay
    assert replay.poll(0) == 2
    del engine.publisher._buffer[0]
    replay.recv_multipart()
    batches = engine.publisher.indexer.batches
    engine.agrees()
    assert engine.publisher.indexer.batches == batches, "the first that is wanted is kept"
    replay.recv_multipart()
    engine.agrees()
    assert engine.publisher.indexer.batches > batches
    assert engine.publisher.stored_since(batches) == engine.stored()


def test_an_engine_that_looks_up_other_blocks_announces_those(engine: Engine) -> None:
    assert engine.store(*keys("a", 8)) == 8
    engine.agrees()
    manager = engine.world.manager
    manager.withheld = True
    engine.settle()
    assert engine.publisher.indexer.there() == set()
    manager.withheld = False
    engine.agrees()
    assert len(engine.publisher.indexer.there()) == 8
    # In doubt nothing is served.
    manager.probes._state.doubtful = True
    engine.settle()
    assert engine.publisher.indexer.there() == set()
    manager.probes._state.doubtful = False
    engine.agrees()
    assert len(engine.publisher.indexer.there()) == 8
    manager.reset_cache()
    engine.settle()
    assert engine.publisher.indexer.there() == set()
    assert engine.store(*keys("b", 4)) == 4
    engine.agrees()


def test_blocks_under_an_adapter_have_vllms_hashes(engine: Engine) -> None:
    beside = Beside(adapter=b"files", hashes=engine.hashes)
    engine.world.manager.set_beside("one", beside)
    named = keys("a", 4)
    assert engine.store(*named, request="one") == 4
    engine.agrees()
    wanted = {maybe_convert_block_hash(each[:32]) for each in named}
    assert {one for _, _, one in engine.publisher.indexer.there()} == wanted
    # What is announced under a hash is withdrawn under it.
    engine.hashes._of.clear()
    engine.namespace.clear()
    engine.settle()
    assert engine.publisher.indexer.there() == set()


def test_only_the_latest_hashes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.vllm.beside.HASHES", 2)
    hashes = Hashes()
    for number in range(3):
        hashes.note(bytes([number]), b"hash")
    assert [hashes.of(bytes([number])) for number in range(3)] == [b"\x00", b"hash", b"hash"]


def test_a_hash_that_is_noted_again_is_one_of_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.vllm.beside.HASHES", 2)
    hashes = Hashes()
    for number in (0, 1, 0, 2):
        hashes.note(bytes([number]), b"hash")
    assert [hashes.of(bytes([number])) for number in range(3)] == [b"hash", b"\x01", b"hash"]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Engine]:
    settings = {
        "cache": {"capacity": "4MiB"},
        "dax": {"path": str(tmp_path / "arena.kvd"), "capacity": "64MiB"},
    }
    made = Engine(kvdepot.open("Cache|Dax", settings))
    yield made
    made.world.close()


def test_a_block_that_moves_has_another_tier(tiers: Engine) -> None:
    assert tiers.store(*keys("a", 8)) == 8
    tiers.agrees()
    assert {owner for _, owner, _ in tiers.publisher.indexer.there()} == {"kvdepot:Cache"}
    # The first listing that is due has no counters to compare.
    tiers.clock.now += 2 * kvdepot_events.OWN_SECONDS
    tiers.agrees()
    tiers.world.depot.drain()
    for _ in range(3):
        tiers.world.fill_up()
        tiers.world.depot.drain()
    tiers.settle()
    # Moves are found by listings, and these only from time to time.
    tiers.agrees(due=2 * kvdepot_events.OWN_SECONDS)
    owners = {owner for _, owner, _ in tiers.publisher.indexer.there()}
    assert owners == {"kvdepot:Cache", "kvdepot:Dax"}

    def begins_a_listing() -> bool:
        # One that an earlier try has begun.
        tiers.settle()
        tiers.agrees(due=2 * kvdepot_events.OWN_SECONDS)
        tiers.clock.now += 2 * kvdepot_events.OWN_SECONDS
        tiers.events.round()
        return bool(tiers.events._listings)

    assert not tiers.at_rest(begins_a_listing), "nothing has moved"


@pytest.mark.parametrize("pipeline", ["Cache|Posix", "Posix"])
def test_what_another_host_changes_is_found_by_an_idle_engine(
    monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    history = History("another host", monkeypatch)
    history.depot.others, history.uses = lambda: None, {0: 0}
    history.depot.tiers = tuple(pipeline.split("|"))
    ((_, namespace),) = history.used()
    events, stays, goes, comes = history.events, *history.keys[:3]
    events._shared, events._late = False, True
    for each in (stays, goes):
        namespace.put(each, "Posix")

    def announced() -> set[Any]:
        history.clock.now += 2 * kvdepot_events.OWN_SECONDS
        settle(events)
        return {one for _, _, one in history.publisher.indexer.there()}

    def named(*some: bytes) -> set[Any]:
        return {maybe_convert_block_hash(each) for each in some}

    # The first listing that is due has no counters to compare.
    settle(events)
    assert announced() == named(stays, goes)
    # This host's counters stay as they are.
    del namespace.blocks[goes]
    namespace.blocks[comes] = {"Posix"}
    events._late = False
    assert announced() == named(stays, goes)
    events._late = True
    assert announced() == named(stays, comes)


def test_what_another_engine_of_a_server_stores_is_found(patient_service: Service) -> None:
    depot, client = (kvdepot.open(patient_service.address, {"lanes": 1}) for _ in range(2))
    engine = Engine(depot, client=client)
    other = patient_service.engine()
    try:
        engine.agrees()
        # The first listing that is due has no counters to compare.
        engine.clock.now += 2 * kvdepot_events.SHARED_SECONDS
        engine.agrees()
        assert other.store(*keys("a", 8)) == 8
        engine.settle()
        assert engine.publisher.indexer.there() == set(), "only a listing tells"
        engine.clock.now += 2 * kvdepot_events.SHARED_SECONDS
        engine.agrees()
        assert len(engine.publisher.indexer.there()) == 8
        engine.namespace.remove([each[:32] for each in keys("a", 4)])
        engine.agrees()
        assert len(engine.publisher.indexer.there()) == 4
        engine.events.stop()
        assert client.closed
        assert not depot.closed
    finally:
        other.close()
        client.close()
        engine.world.close()


def test_an_error_of_the_depot_delays_events(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.settle()
    warned: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warned.append(text % args))
    monkeypatch.setattr(kvdepot_events, "logger", logger)
    errors = [kvdepot.Error("no answer"), OSError("no answer")]

    def fails() -> None:
        if errors:
            raise errors.pop()
        follow()

    follow = engine.events._follow
    monkeypatch.setattr(engine.events, "_follow", fails)
    assert engine.store(*keys("a", 8)) == 8
    engine.events._stores.clear()
    waits = [engine.events.round() for _ in range(2)]
    assert waits == [kvdepot_events.RETRY_SECONDS] * 2
    assert len(warned) == 1, "once a minute"
    engine.agrees()


def test_batches_are_paced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.store(*keys("a", 8)) == 8
    monkeypatch.setattr(kvdepot_events, "BATCHES_PER_SECOND", 100)
    monkeypatch.setattr(kvdepot_events, "BATCH", 4)
    engine.publisher = Published()
    events = engine.follow(engine.publisher)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        engine.clock.now += seconds
        return False

    monkeypatch.setattr(events._stop, "wait", wait)
    # What is waited for is not rested from.
    assert events.round() == kvdepot_events.ROUND_SECONDS / 10
    assert waits == pytest.approx([0.0, 0.01, 0.01, 0.01])
    assert len(engine.publisher.indexer.there()) == 8
    # The engine ends in the middle.
    assert engine.store(*keys("b", 8)) == 8
    monkeypatch.setattr(events._stop, "wait", lambda seconds: True)
    events.round()
    assert len(engine.publisher.indexer.there()) == 8


def test_an_indexer_has_what_the_depot_has(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(kvdepot_events, "PAGE", 7)
    monkeypatch.setattr(kvdepot_events, "BATCH", 6)
    drawn = random.Random(seed)
    names = [f"block {number}" for number in range(MANY)]
    for number in range(300):
        monkeypatch.setattr(kvdepot_events, "REMOVALS", drawn.choice([1, 4, 1000]))
        some = [key(name) for name in drawn.sample(names, drawn.randint(1, 8))]
        match drawn.randrange(8):
            case 0:
                engine.namespace.remove([each[:32] for each in some])
            case 1:
                cleared = KVEventBatch(ts=0.0, events=[AllBlocksCleared()])
                engine.publisher.publish(cleared)
            case 2:
                engine.events._lost.set()
                engine.clock.now += drawn.choice([1.0, 100.0])
            case 3 if number % 20 == 0:
                engine.world.manager.reset_cache()
            case _:
                engine.store(*some, request=f"request {number}")
        for _ in range(drawn.randrange(4)):
            engine.events.round()
        if drawn.random() < 0.2:
            engine.agrees()
    engine.agrees()


def test_an_indexer_follows_a_depot_that_changes_while_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for number in range(10):
        history = History(f"{seed} {number}", monkeypatch)
        for step in range(100):
            history.depot.failing = history.drawn.choice([0.0, 0.0, 0.05])
            removals = history.drawn.choice([1, 5, 1000])
            monkeypatch.setattr(kvdepot_events, "REMOVALS", removals)
            for _ in range(history.drawn.randrange(5)):
                history.change()
            history.rounds(history.drawn.randrange(4))
            if step % 10 == 9:
                history.rest()


# ---- vLLM's publisher --------------------------------------------------------------------------


def test_the_publisher_of_the_next_scheduler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards, whatever became of it.
    monkeypatch.setattr(EventPublisherFactory, "create", EventPublisherFactory.create)
    told: list[Any] = []
    vllm_events.on_publisher(told.append)
    vllm_events.on_publisher(told.append)
    made = EventPublisherFactory.create(None, 0)
    assert told == [made, made]
    assert EventPublisherFactory.create(None, 0) is not made
    assert told == [made, made]


def test_events_are_off_unless_vllm_publishes_them() -> None:
    def config(**fields: Any) -> Any:
        return SimpleNamespace(kv_events_config=SimpleNamespace(**fields))

    assert vllm_events.are_published(config(enable_kv_cache_events=True, publisher="zmq"))
    assert not vllm_events.are_published(config(enable_kv_cache_events=True, publisher="null"))
    assert not vllm_events.are_published(config(enable_kv_cache_events=False, publisher="zmq"))
    assert not vllm_events.are_published(SimpleNamespace(kv_events_config=None))


def test_vllms_publisher_keeps_them_for_a_subscriber_that_comes_later(engine: Engine) -> None:
    name = f"kvdepot-{id(engine)}"
    publisher = ZmqEventPublisher(
        0, f"inproc://{name}-events", f"inproc://{name}-replay", buffer_steps=100
    )
    try:
        engine.follow(publisher)
        assert engine.store(*keys("a", 8)) == 8
        engine.settle()
        assert engine.store(*keys("b", 8)) == 8
        engine.settle()
        indexer = Indexer()
        for batch in replayed(f"inproc://{name}-replay", 0, 2):
            indexer.hear(batch)
        assert indexer.there() == engine.stored()
        assert len(indexer.there()) == 16
    finally:
        publisher.shutdown()


def serve(engines: Engines, number: int, **settings: Any) -> Events:
    """An engine serves a prompt; a subscriber hears of all its blocks, and the engine ends."""
    name = f"inproc://kvdepot-{id(engines)}-{number}"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"{name}-events",
        "replay_endpoint": f"{name}-replay",
    }
    engine = engines.start([full()], engine={"events": config}, **settings)
    engine.ask(prompt(1, 200))
    manager, events = engine.connector.manager, engine.connector._events
    namespace = manager.hittable[0].namespace.opened_by(manager.depot.raw)
    wanted = {maybe_convert_block_hash(each) for each, _ in namespace.blocks()}
    assert len(wanted) >= 200 // BLOCK
    there: set[Any] = set()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while there != wanted:
        assert time.monotonic() < deadline, "not all blocks are published"
        indexer = Indexer()
        for batch in replayed(f"{name}-replay", 0, 1):
            indexer.hear(batch)
        there = {one for _, _, one in indexer.there()}
    assert events._thread.is_alive()
    engine.scheduler.kv_event_publisher.shutdown()
    engines.stop()
    # `stop` does not wait for a machine that stands still.
    events._thread.join(DEADLINE_SECONDS)
    assert not events._thread.is_alive()
    return events


def test_an_engine_publishes_what_it_has_stored(engines: Engines) -> None:
    # The second finds what the first has stored.
    for number in range(2):
        serve(engines, number)


def test_a_start_that_is_refused_changes_no_publisher(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(connector: Any) -> None:
        connector.manager.shutdown()
        raise kvdepot.ConfigError("refused")

    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    monkeypatch.setattr(KvdepotConnector, "_check_probes", refuses)
    create = EventPublisherFactory.create
    with pytest.raises(kvdepot.ConfigError, match="refused"):
        engines.start([full()], engine={"events": {"enable_kv_cache_events": True}})
    assert EventPublisherFactory.create == create


def test_beside_a_server_events_have_a_connection_of_their_own(
    engines: Engines, patient_service: Service
) -> None:
    opened: list[kvdepot.Depot] = []
    connect = kvdepot.open

    def connected(*args: Any) -> kvdepot.Depot:
        opened.append(connect(*args))
        return opened[-1]

    said = logged("vllm.kvdepot", logging.INFO)
    with pytest.MonkeyPatch.context() as patch, said as lines:
        patch.setattr(kvdepot, "open", connected)
        events = serve(engines, 0, pipeline=patient_service.address)
    assert sum(f"{patient_service.address}: " in line for line in lines) == 1
    _, own = opened
    assert events._depot is own
    assert own.closed
