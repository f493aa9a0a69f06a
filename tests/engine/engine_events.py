"""Engines with KV events, what follows these, and a depot that others change during calls."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import kvdepot
import msgspec
import pytest
import zmq
from engine_manager import Clock, World, context, key
from hosts import until
from kvdepot.vllm import events as kvdepot_events
from kvdepot.vllm.beside import Hashes
from kvdepot.vllm.compat.events import Described
from kvdepot.vllm.events import Events
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

GROUP = Described(0, 16, "full_attention", None)
END = (-1).to_bytes(8, "big", signed=True)
# Far more than anything here takes on a busy machine.
DEADLINE_SECONDS = 60.0


class Indexer:
    """Follows the wire form of events, and counts as the strictest router does."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str, Any]] = Counter()
        self.batches = 0

    def hear(self, batch: bytes) -> None:
        """A batch, decoded as what it is: an array with a time and maps with types."""
        _, events, *_ = msgspec.msgpack.decode(batch)
        self.batches += 1
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.counts.clear()
            return
        if "ownership" not in event:
            # vLLM's own, of its prefix cache.
            return
        assert event["medium"] in ("CPU", "STORAGE")
        is_stored = event["type"] == "BlockStored"
        if is_stored:
            # Without them, a router skips the event.
            assert event["block_size"] == GROUP.tokens
            assert event["kv_cache_spec_kind"] == GROUP.kind
        for one in event["block_hashes"]:
            name = event["group_idx"], event["ownership"], one
            self.counts[name] += 1 if is_stored else -1
            assert self.counts[name] in (0, 1)

    def there(self) -> set[tuple[int, str, Any]]:
        return {name for name, count in self.counts.items() if count}


class Published:
    """vLLM's publisher, as far as it is used, with an indexer that hears all of it at once."""

    def __init__(self) -> None:
        self.indexer = Indexer()
        self._buffer: list[tuple[int, bytes]] = []
        self._replay: Any = None

    def publish(self, batch: Any) -> None:
        encoded = msgspec.msgpack.encode(batch)
        self._buffer.append((self.indexer.batches, encoded))
        self.indexer.hear(encoded)

    def stored_since(self, number: int) -> set[tuple[int, str, Any]]:
        """What is announced in the batches from a number on."""
        return {
            (event["group_idx"], event["ownership"], one)
            for each, batch in self._buffer
            for event in msgspec.msgpack.decode(batch)[1]
            if each >= number and event["type"] == "BlockStored"
            for one in event["block_hashes"]
        }


def replayed(endpoint: str, wanted: int, count: int) -> Sequence[bytes]:
    """Batches from a number on. They are published by a thread, so they are asked for until there
    are as many as there should be."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.rcvtimeo = int(DEADLINE_SECONDS * 1000)
        asking.connect(endpoint)
        while True:
            assert time.monotonic() < deadline, f"fewer than {count} batches are published"
            asking.send_multipart([b"", wanted.to_bytes(8, "big")])
            batches = []
            while True:
                *_, number, batch = asking.recv_multipart()
                if number == END:
                    break
                batches.append(batch)
            if len(batches) >= count:
                return batches


@pytest.fixture(autouse=True)
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks stand still here: batches would be waited for."""
    monkeypatch.setattr(kvdepot_events, "BATCHES_PER_SECOND", math.inf)


def settle(events: Events) -> None:
    """Rounds, until nothing is left to be listed."""
    for _ in range(1000):
        events.round()
        # Without a namespace there is nothing to list.
        waits = events._listings or events._stores or (events._list_again and events._used)
        if not waits and events._clears == events._clears_seen:
            return
    raise AssertionError("the listing does not end")


class Engine:
    """A manager over a depot, and the events of it."""

    def __init__(
        self, depot: kvdepot.Depot | None = None, *, client: kvdepot.Depot | None = None
    ) -> None:
        """Of a server's depot, events have a `client` of their own."""
        self.shared = client is not None
        self.world = World(1, depot, shared=self.shared)
        self.client = client or self.world.depot
        self.publisher = Published()
        self.clock = Clock()
        self.hashes = Hashes()
        self.events = self.follow(self.publisher)

    def follow(self, publisher: Any, *, thread: bool = False) -> Events:
        manager = self.world.manager
        self.events = Events(
            self.client,
            lambda: manager.hittable,
            [GROUP],
            self.hashes,
            shared=self.shared,
            clock=self.clock.monotonic,
        )
        (self.events.start if thread else self.events.use)(publisher)
        manager.stored = lambda namespace, keys: self.events.stored(namespace.digest, keys)
        return self.events

    @property
    def namespace(self) -> kvdepot.Namespace:
        return self.world.manager.hittable[0].namespace.opened_by(self.world.depot)

    def store(self, *blocks: Any, request: str = "store") -> int:
        """Store blocks whole; how many were accepted."""
        count = self.world.store(*blocks, request=request)
        self.world.manager.on_request_finished(context(request, *blocks))
        return count

    def settle(self) -> None:
        settle(self.events)

    def stored(self) -> set[tuple[int, str, Any]]:
        """What an indexer should have."""
        keys = list(dict.fromkeys(each for each, _ in self.namespace.blocks()))
        tiers = self.namespace.where(keys) if keys else []
        return {
            (GROUP.number, f"kvdepot:{tier}", maybe_convert_block_hash(self.hashes.of(each)))
            for each, tier in zip(keys, tiers, strict=True)
            if tier is not None
        }

    def agrees(self, *, due: float = 0.0) -> None:
        """As soon as it does: a thread of the depot's evicts ahead of need. Before each try `due`
        seconds pass, so that a listing finds what has moved."""

        def are_equal() -> bool:
            self.clock.now += due
            self.settle()
            return self.publisher.indexer.there() == self.stored()

        until("an indexer has what the depot has", are_equal, DEADLINE_SECONDS)

    def at_rest(self, check: Callable[[], bool]) -> bool:
        """The result of a check during which the depot has neither stored nor evicted anything."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            counted = self.events._counted()
            result = check()
            if self.events._counted() == counted:
                return result
            assert time.monotonic() < deadline, "the depot does not rest"


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.world.close()


def keys(name: str, count: int) -> list[Any]:
    return [key(f"{name} {number}") for number in range(count)]


class SimulatedNamespace:
    """Blocks, with the tiers that have them."""

    def __init__(self, depot: SimulatedDepot, digest: bytes) -> None:
        self.digest = digest
        self.blocks: dict[bytes, set[str]] = {}
        self._depot = depot

    def opened_by(self, depot: SimulatedDepot) -> SimulatedNamespace:
        return self

    def where(self, keys: list[bytes]) -> list[str | None]:
        self._depot.call()
        return [min(self.blocks.get(key) or (), default=None) for key in keys]

    def blocks_page(
        self, cursor: bytes | None, limit: int
    ) -> tuple[list[tuple[bytes, int]], bytes | None]:
        self._depot.call()
        there = sorted(key for key, tiers in self.blocks.items() if tiers)
        rest = [key for key in there if cursor is None or key > cursor]
        page = [(key, 1) for key in rest[:limit] for _ in self.blocks[key]]
        return page, rest[limit - 1] if len(rest) > limit else None

    def put(self, key: bytes, tier: str) -> None:
        self.blocks.setdefault(key, set()).add(tier)
        self._depot.changes += 1

    def drop(self, key: bytes, tier: str) -> None:
        if tier in self.blocks.get(key, ()):
            self.blocks[key].remove(tier)
            self._depot.left(self.digest, key)


class SimulatedDepot:
    """Two tiers. What leaves one is noted, and told unless the block is in the other by then."""

    tiers = ("Cache", "Dax")

    def __init__(self, drawn: random.Random, namespaces: int) -> None:
        self._drawn = drawn
        digests = [bytes([number]) * 16 for number in range(namespaces)]
        self.namespaces = {digest: SimulatedNamespace(self, digest) for digest in digests}
        self.changes = 0
        self.failing = 0.0
        """How many of the calls fail."""
        self.loses = False
        """Whether removals were lost, as those that an owner has noted that is gone."""
        self.others: Callable[[], None] = lambda: None
        """What happens during a call."""
        self._noted: list[tuple[bytes, bytes]] | None = None

    def call(self) -> None:
        if self._drawn.random() < self.failing:
            raise kvdepot.Error("no answer")
        self.others()

    def left(self, digest: bytes, key: bytes) -> None:
        self.changes += 1
        if self._noted is not None:
            self._noted.append((digest, key))

    def removed_blocks(self, limit: int) -> tuple[list[tuple[bytes, bytes, int]], bool]:
        self.call()
        noted, self._noted = self._noted or [], []
        incomplete = self.loses or len(noted) > limit
        self.loses = False
        latest = dict.fromkeys(noted[-limit:])
        gone = [name for name in latest if not self.namespaces[name[0]].blocks[name[1]]]
        return [(digest, key, 1) for digest, key in gone], incomplete

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        counters = {"stored_blocks": self.changes, "evicted_blocks": 0}
        return {"tiers": {"Cache": counters}}


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
        # Whatever each block has been called.
        self.names: dict[bytes, set[bytes]] = {each: set() for each in self.keys}
        for each in self.keys[:20]:
            self.forget(each)
        for each in self.keys[20:]:
            self.note(each)

    def note(self, each: bytes) -> None:
        # Events have the last bytes of a hash.
        name = each[4:] + b"hash"
        self.hashes.note(each, name)
        self.names[each].add(name)

    def forget(self, each: bytes) -> None:
        """The hash is known no longer, as it is not one of the latest."""
        self.hashes._of.pop(each, None)
        self.names[each].add(each)

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
                self.forget(each)
            case 9:
                self.note(each)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.events.round()

    def rest(self) -> None:
        """Nothing changes until all is published."""
        self.depot.others, self.depot.failing = lambda: None, 0.0
        # The listing in progress, one that repeats all, and one that is due.
        for _ in range(4):
            due = max(self.events._next_listing, self.events._next_repeat)
            self.clock.now = max(self.clock.now, due) + 1
            settle(self.events)
        there = self.publisher.indexer.there()
        for number, namespace in self.used():
            for each, tiers in namespace.blocks.items():
                if tiers:
                    owner = f"kvdepot:{min(tiers)}"
                    names = map(maybe_convert_block_hash, self.names[each])
                    found = there & {(number, owner, name) for name in names}
                    assert len(found) == 1
                    there -= found
        assert there == set()
        batches = self.publisher.indexer.batches
        self.rounds(3)
        assert self.publisher.indexer.batches == batches
        self.depot.others = self.change_some
