"""What follows KV events, and a depot that others change in the middle of calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import kvdepot
import msgspec
import zmq
from kvdepot.vllm.compat.events import Described

GROUP = Described(0, 16, "full_attention", None)
END = (-1).to_bytes(8, "big", signed=True)


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
        self._buffer.append((len(self._buffer), encoded))
        self.indexer.hear(encoded)


def replayed(endpoint: str, wanted: int, count: int) -> Sequence[bytes]:
    """Batches from a number on. They are published by a thread, so they are asked for until there
    are as many as there should be."""
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.connect(endpoint)
        while True:
            asking.send_multipart([b"", wanted.to_bytes(8, "big")])
            batches = []
            while True:
                *_, number, batch = asking.recv_multipart()
                if number == END:
                    break
                batches.append(batch)
            if len(batches) >= count:
                return batches


class SimulatedNamespace:
    """Blocks, with the tiers that have them."""

    def __init__(self, depot: SimulatedDepot, digest: bytes) -> None:
        self.digest = digest
        self.blocks: dict[bytes, set[str]] = {}
        self._depot = depot

    @property
    def raw(self) -> SimulatedNamespace:
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
