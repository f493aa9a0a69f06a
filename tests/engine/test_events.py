"""KV events: an indexer that follows them has what the depot has, whatever happens to both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

import msgspec
from engine_double import BLOCK, full
from engine_events import GROUP, Indexer, Published, SimulatedDepot, replayed
from engine_manager import MANY, Clock, World, context, key
from kvdepot.vllm import events as kvdepot_events
from kvdepot.vllm.beside import Beside, Hashes
from kvdepot.vllm.compat import events as vllm_events
from kvdepot.vllm.events import Events
from test_manager_service import Service, service
from test_scheduling import Engines, engines, prompt
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

__all__ = ["engines", "service"]

pytestmark = pytest.mark.integration


class Engine:
    """A manager over a depot, and the events of it."""

    def __init__(self, depot: kvdepot.Depot | None = None, *, shared: bool = False) -> None:
        self.world = World(1, depot, shared=shared)
        self.publisher = Published()
        self.clock = Clock()
        self.hashes = Hashes()
        self.shared = shared
        self.events = self.follow(self.publisher)

    def follow(self, publisher: Any) -> Events:
        manager = self.world.manager
        self.events = Events(
            self.world.depot,
            lambda: manager.hittable,
            [GROUP],
            self.hashes,
            shared=self.shared,
            clock=self.clock.monotonic,
        )
        self.events.use(publisher)
        manager.stored = lambda namespace, keys: self.events.stored(namespace.digest, keys)
        return self.events

    @property
    def namespace(self) -> kvdepot.Namespace:
        return self.world.manager.hittable[0].namespace.raw

    def store(self, *blocks: Any, request: str = "store") -> int:
        """Store blocks whole; how many were accepted."""
        count = self.world.store(*blocks, request=request)
        self.world.manager.on_request_finished(context(request, *blocks))
        return count

    def settle(self) -> None:
        """Rounds, until nothing is left to be listed."""
        events = self.events
        for _ in range(1000):
            events.round()
            waits = events._listings or events._stores or events._list_again
            if not waits and events._clears == events._clears_seen:
                return
        raise AssertionError("the listing does not end")

    def stored(self) -> set[tuple[int, str, Any]]:
        """What an indexer should have."""
        keys = list(dict.fromkeys(each for each, _ in self.namespace.blocks()))
        tiers = self.namespace.where(keys) if keys else []
        return {
            (GROUP.number, f"kvdepot:{tier}", maybe_convert_block_hash(self.hashes.of(each)))
            for each, tier in zip(keys, tiers, strict=True)
            if tier is not None
        }

    def agrees(self) -> None:
        self.settle()
        assert self.publisher.indexer.there() == self.stored()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.world.close()


def keys(name: str, count: int) -> list[Any]:
    return [key(f"{name} {number}") for number in range(count)]


def test_what_is_stored_and_evicted_is_published(engine: Engine) -> None:
    assert engine.store(*keys("a", 8)) == 8
    engine.agrees()
    before = engine.publisher.indexer.there()
    assert len(before) == 8
    for _ in range(3):
        engine.world.fill_up()
        engine.agrees()
    assert not before <= engine.publisher.indexer.there()
    batches = engine.publisher.indexer.batches
    engine.agrees()
    assert engine.publisher.indexer.batches == batches, "nothing has changed"


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
    late = Indexer()
    since = len(engine.publisher._buffer)
    engine.agrees()
    assert engine.publisher.indexer.batches > batches
    for _, batch in engine.publisher._buffer[since:]:
        _, events, *_ = msgspec.msgpack.decode(batch)
        for event in events:
            if event["type"] == "BlockStored":
                late._apply(event)
    assert late.there() == engine.stored()


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
    tiers.world.depot.drain()
    for _ in range(3):
        tiers.world.fill_up()
        tiers.world.depot.drain()
    tiers.settle()
    # Moves are found by listings, and these only from time to time.
    tiers.clock.now += 2 * kvdepot_events.OWN_SECONDS
    tiers.agrees()
    owners = {owner for _, owner, _ in tiers.publisher.indexer.there()}
    assert owners == {"kvdepot:Cache", "kvdepot:Dax"}


def test_what_another_engine_of_a_server_stores_is_found(service: Service) -> None:
    engine = Engine(kvdepot.open(service.address, {"lanes": 1}), shared=True)
    other = service.engine()
    try:
        engine.agrees()
        assert other.store(*keys("a", 8)) == 8
        engine.settle()
        # Only a listing tells.
        engine.clock.now += 2 * kvdepot_events.SHARED_SECONDS
        engine.agrees()
        assert len(engine.publisher.indexer.there()) == 8
        engine.namespace.remove([each[:32] for each in keys("a", 4)])
        engine.agrees()
        assert len(engine.publisher.indexer.there()) == 4
    finally:
        other.close()
        engine.world.close()


def test_an_error_of_the_depot_delays_events(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.settle()
    warned: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *args: warned.append(text % args))
    monkeypatch.setattr(kvdepot_events, "logger", logger)
    waits: list[float] = []
    rounds = iter([kvdepot.Error("no answer"), OSError("no answer"), None])

    def fails() -> float:
        if (error := next(rounds)) is not None:
            raise error
        raise kvdepot.ClosedError("closed")

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setattr(engine.events, "round", fails)
    monkeypatch.setattr(engine.events._stop, "wait", wait)
    assert engine.store(*keys("a", 8)) == 8
    engine.events._stores.clear()
    engine.events._run()
    assert waits == [0.0, kvdepot_events.RETRY_SECONDS, kvdepot_events.RETRY_SECONDS]
    assert len(warned) == 1, "once a minute"
    monkeypatch.undo()
    engine.agrees()


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


class History:
    """A random one, of an engine over a depot that changes while it is asked."""

    def __init__(self, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn = random.Random(seed)
        for name, values in {"PAGE": (3, 7, 50), "BATCH": (2, 6, 20)}.items():
            monkeypatch.setattr(kvdepot_events, name, self.drawn.choice(values))
        self.depot: Any = SimulatedDepot(self.drawn, 4)
        # A namespace is always of one group.
        self.uses: dict[int, int] = {0: 0, 1: 1}
        self.clock = Clock()
        self.hashes = Hashes()
        self.publisher = Published()
        groups = [GROUP, GROUP._replace(number=1)]
        self.events = Events(
            self.depot,
            lambda: {number: SimpleNamespace(namespace=one) for number, one in self.used()},
            groups,
            self.hashes,
            shared=True,
            clock=self.clock.monotonic,
        )
        self.events.use(self.publisher)
        self.depot.others = self.change_some
        self.keys = [bytes([number]) * 32 for number in range(40)]
        for each in self.keys[20:]:
            self.hashes.note(each, b"hash" + each[4:])

    def used(self) -> list[tuple[int, Any]]:
        namespaces = list(self.depot.namespaces.values())
        return [(number, namespaces[of]) for number, of in self.uses.items()]

    def change_some(self) -> None:
        for _ in range(self.drawn.choice([0, 0, 1, 3])):
            self.change()

    def change(self) -> None:
        drawn = self.drawn
        namespace = drawn.choice(list(self.depot.namespaces.values()))
        each, tier = drawn.choice(self.keys), drawn.choice(self.depot.tiers)
        match drawn.choices(range(10), [35, 25, 25, 10, 2, 1, 2, 2, 10, 10])[0]:
            case 0:
                namespace.put(each, tier)
                self.events.stored(namespace.digest, [each])
            case 1:
                # By another engine, or moved.
                namespace.put(each, tier)
            case 2:
                namespace.drop(each, tier)
            case 3:
                for one in self.depot.tiers:
                    namespace.drop(each, one)
            case 4:
                self.publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            case 5:
                self.uses = drawn.choice([{0: 0, 1: 1}, {0: 2, 1: 1}, {}, {0: 0, 1: 3}])
            case 6:
                self.depot.loses = True
            case 7:
                self.events._lost.set()
            case 8:
                # It is known no longer, as it is not one of the latest.
                self.hashes._of.pop(each, None)
            case 9:
                self.hashes.note(each, b"hash" + each[4:])

    def rounds(self, count: int) -> None:
        for _ in range(count):
            try:
                self.events.round()
            except kvdepot.Error:
                self.events._begin_listing()

    def rest(self) -> None:
        """Nothing changes until all is published."""
        self.depot.others, self.depot.failing = lambda: None, 0.0
        for _ in range(3):
            due = max(self.events._next_listing, self.events._next_repeat)
            self.clock.now = max(self.clock.now, due) + 1
            self.rounds(100)
        wanted = set()
        for number, namespace in self.used():
            said = self.events._used[namespace.digest].said
            for each, tiers in namespace.blocks.items():
                if tiers:
                    named = maybe_convert_block_hash(said.get(each, each))
                    wanted.add((number, f"kvdepot:{min(tiers)}", named))
        assert self.publisher.indexer.there() == wanted
        batches = self.publisher.indexer.batches
        self.rounds(3)
        assert self.publisher.indexer.batches == batches
        self.depot.others = self.change_some


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


def test_an_engine_publishes_what_it_has_stored(engines: Engines) -> None:
    asked = prompt(1, 200)
    for number in range(2):
        # The second finds what the first has stored.
        name = f"inproc://kvdepot-{id(engines)}-{number}"
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"{name}-events",
            "replay_endpoint": f"{name}-replay",
        }
        engine = engines.start([full()], engine={"events": config})
        engine.ask(asked)
        namespace = engine.connector.manager.hittable[0].namespace.raw
        wanted = {maybe_convert_block_hash(each) for each, _ in namespace.blocks()}
        assert len(wanted) >= 200 // BLOCK
        there: set[Any] = set()
        while there != wanted:
            indexer = Indexer()
            for batch in replayed(f"{name}-replay", 0, 1):
                indexer.hear(batch)
            there = {one for _, _, one in indexer.there()}
        engine.scheduler.kv_event_publisher.shutdown()
