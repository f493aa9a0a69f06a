"""KV events: which blocks of the depot this engine could load, for routers and indexers.

A thread in the scheduler's process publishes them through vLLM's own publisher. It asks the depot
in rounds what has left all tiers, and looks up in which tier the blocks are that this engine has
stored. What the depot cannot tell (what was there at the start, what others store, moves between
tiers, changes that were too many to be kept) is found by listing the namespaces, and the listing is
compared with what is announced already: no block is announced twice, since an indexer may count.
An error ends a round, not a listing: its next part is tried again, and another listing follows.

The order within a round makes it right. What has left is asked for first, so a block that is looked
up or listed afterwards and is there was stored after that, and its next removal is in a later
round.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm.beside import Hashes
from kvdepot.vllm.compat import events as vllm_events
from kvdepot.vllm.compat.events import Described
from kvdepot.vllm.faults import ERRORS, Faults
from kvdepot.vllm.jobs import Groups
from kvdepot.vllm.tiers import INDEXED

logger = init_logger("vllm.kvdepot.events")

ROUND_SECONDS = 0.05
RETRY_SECONDS = 1.0
LOG_SECONDS = 60.0
STOP_SECONDS = 5.0

# Removals that are kept between two rounds, of each tier.
REMOVALS = 1 << 18
# Blocks of a page of a listing, and how much longer than a page the thread rests after it: the
# engine's steps need the interpreter, too.
PAGE = 1024
REST = 4
# How often a listing tries its pages, `RETRY_SECONDS` apart, before it does without the rest of
# them: a host may be silent for hours.
TRIES = 30
# Hashes in a batch, and batches a second: subscribers keep up, and vLLM's replay buffer (10,000
# batches) has all of it.
BATCH = 1024
BATCHES_PER_SECOND = 200
# Blocks that are looked up at a time where a tier may answer late: one that it does not answer for
# in time is taken for gone.
LATE_BATCH = 32

# The depot is listed again, if it has changed or a tier may answer late, after this time and after
# 20 times what the last listing took. Only a listing finds what other engines of a server store.
SHARED_SECONDS = 30.0
OWN_SECONDS = 600.0
LISTING_SHARE = 20

# Indexers take an unknown medium for a GPU, so a tier's own name is the event's `ownership`.
MEMORY, STORAGE = "CPU", "STORAGE"

TIER = attrgetter("tier")


class Change(NamedTuple):
    """A block that is to be announced in a tier, or no longer."""

    key: bytes
    tier: str
    stored: bool


@dataclass
class Announced:
    """A namespace that the engine uses, and what is published of it."""

    group: Described
    namespace: kvdepot.Namespace
    tiers: dict[bytes, str] = field(default_factory=dict)
    """By key, the tier that a block is announced in."""
    unseen: dict[bytes, str] = field(default_factory=dict)
    """The same, of blocks that the listing in progress has not found. Without one it is empty."""
    said: dict[bytes, bytes] = field(default_factory=dict)
    """Of announced blocks, the hashes that are not their keys."""

    def tier_of(self, key: bytes) -> str | None:
        """The tier that a block is announced in."""
        return self.tiers.get(key) or self.unseen.get(key)

    def see(self, keys: Iterable[bytes]) -> None:
        """The listing in progress has found these blocks."""
        for key in keys:
            if (tier := self.unseen.pop(key, None)) is not None:
                self.tiers[key] = tier

    def add(self, tier: str, keys: Sequence[bytes], hashes: Hashes) -> list[bytes]:
        """Announce blocks. Returns their hashes."""
        for key in keys:
            # As it is called in one tier, it is called in the next.
            if (found := hashes.of(key)) != key and self.tier_of(key) is None:
                self.said[key] = found
            self.unseen.pop(key, None)
            self.tiers[key] = tier
        return [self.said.get(key, key) for key in keys]

    def drop(self, tier: str, keys: Sequence[bytes]) -> list[bytes]:
        """Announce blocks no longer in a tier. Returns their hashes."""
        found = [self.said.get(key, key) for key in keys]
        for key in keys:
            # One that has moved is announced in another tier already.
            if self.tier_of(key) == tier:
                self.tiers.pop(key, None)
                self.unseen.pop(key, None)
                self.said.pop(key, None)
        return found


@dataclass
class Listing:
    """A namespace that is compared with what is announced of it."""

    used: Announced
    repeats: bool
    """Whether what is announced is announced again: a subscriber has missed events."""
    cursor: bytes | None = None
    ended: bool = False
    """Whether there are no more pages."""
    failed: int = 0
    """How often a page could not be read."""


class Events:
    """Keeps vLLM's subscribers informed of a depot."""

    def __init__(
        self,
        depot: kvdepot.Depot,
        groups: Callable[[], Groups],
        described: Iterable[Described],
        hashes: Hashes,
        *,
        shared: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`groups` are the KV groups that are looked up now, and `hashes` are vLLM's hashes of
        blocks whose keys differ from them. A `shared` depot is a server's, and `depot` is a client
        for events alone, which `stop` closes."""
        self._depot = depot
        self._groups = groups
        self._described = {group.number: group for group in described}
        self._hashes = hashes
        self._shared = shared
        self._clock = clock
        self._late = any(tier not in INDEXED for tier in depot.tiers)
        # Held while something is published, so that the order of the batches is known.
        self._lock = threading.Lock()
        # None before anybody listens, and after the thread's end: nothing is kept for it then.
        self._publish: Callable[[Sequence[Any]], None] | None = None
        # When the next batch may be published, and how long this round has waited for that.
        self._next_batch = 0.0
        self._paced = 0.0
        # How often indexers were told to forget all blocks of this engine, and what of it is known.
        self._clears = 0
        self._clears_seen = 0
        self._stores: deque[tuple[bytes, list[bytes]]] = deque()
        self._used: dict[bytes, Announced] = {}
        """By digest."""
        self._listings: deque[Listing] = deque()
        self._list_again = False
        self._listing_began = 0.0
        self._next_listing = 0.0
        self._counted_last: Any = None
        self._lost = threading.Event()
        self._next_repeat = 0.0
        self._next_log = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-events", daemon=True)

    # ---- called by others -----------------------------------------------------------------------

    def use(self, publisher: Any) -> None:
        """From now on events are published there."""
        self._publish = vllm_events.watch(publisher, self._around, self._lost.set)

    def start(self, publisher: Any) -> None:
        """The same, by a thread of its own."""
        self.use(publisher)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. What is announced stays so: indexers notice the end of an engine."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        if self._shared:
            # vLLM's own half of the connector is still to be shut down.
            Faults(logger).attempt("close", None, self._depot.close)

    def stored(self, digest: bytes, keys: list[bytes]) -> None:
        """This engine has stored blocks of a namespace."""
        if keys and self._publish is not None:
            self._stores.append((digest, keys))

    def _around(self, publish: Callable[[], None], clears: bool) -> None:
        with self._lock:
            publish()
            self._clears += clears

    # ---- a round --------------------------------------------------------------------------------

    def _run(self) -> None:
        wait = 0.0
        try:
            while not self._stop.wait(wait):
                wait = self.round()
        except kvdepot.ClosedError as error:
            # vLLM closes its publisher before its connectors.
            logger.info("kvdepot: KV events end: %s", error)
        except Exception:
            logger.exception(
                "kvdepot: KV events have ended after an internal error; restart the engine to "
                "publish events again"
            )
        finally:
            self._publish = None
            self._stores.clear()

    def round(self) -> float:
        """Publish what has changed, and a part of a listing. Returns the seconds to wait."""
        try:
            return self._round()
        except kvdepot.ClosedError:
            raise
        except ERRORS as error:
            self._say(error)
            # It finds what was read in this round and is not published.
            self._list_again = True
            return RETRY_SECONDS

    def _round(self) -> float:
        began, self._paced = self._clock(), 0.0
        with self._lock:
            clears = self._clears
        if clears != self._clears_seen:
            self._forget_all()
            self._clears_seen = clears
        self._follow()
        rows, incomplete = self._depot.removed_blocks(REMOVALS)
        self._list_again |= incomplete
        self._left_all(rows)
        for _ in range(len(self._stores)):
            digest, keys = self._stores.popleft()
            if digest in self._used:
                self._found(self._used[digest], list(dict.fromkeys(keys)))
        self._list_if_due()
        if not self._listings:
            return ROUND_SECONDS
        self._list(self._listings[0])
        # A slow tier is not waited for by the interpreter.
        rest = min(REST * (self._clock() - began - self._paced), RETRY_SECONDS)
        return max(ROUND_SECONDS / 10, rest)

    def _follow(self) -> None:
        """Use the namespaces that the engine uses: it could not load what is in others."""
        groups = self._groups()
        wanted = {group.namespace.digest: (number, group) for number, group in groups.items()}
        for digest in [digest for digest in self._used if digest not in wanted]:
            used = self._used.pop(digest)
            self._left(used, [*used.tiers, *used.unseen])
            self._listings = deque(one for one in self._listings if one.used is not used)
        for digest, (number, group) in wanted.items():
            if digest not in self._used:
                namespace = group.namespace.opened_by(self._depot)
                used = self._used[digest] = Announced(self._described[number], namespace)
                if not self._listings:
                    self._listing_began = self._clock()
                self._listings.append(Listing(used, repeats=False))

    def _forget_all(self) -> None:
        """Indexers have dropped all blocks of this engine, those in the depot too."""
        for used in self._used.values():
            used.tiers, used.unseen, used.said = {}, {}, {}
        self._begin_listing()

    # ---- what has changed -----------------------------------------------------------------------

    def _left_all(self, rows: Iterable[tuple[bytes, bytes, int]]) -> None:
        """Blocks of any namespaces that are in no tier."""
        by_digest: dict[bytes, list[bytes]] = {}
        for digest, key, _ in rows:
            if digest in self._used:
                by_digest.setdefault(digest, []).append(key)
        for digest, keys in by_digest.items():
            self._left(self._used[digest], keys)

    def _left(self, used: Announced, keys: Iterable[bytes]) -> None:
        """Blocks that cannot be loaded any more."""
        tiers = ((key, used.tier_of(key)) for key in keys)
        self._send(used, (Change(key, tier, stored=False) for key, tier in tiers if tier))

    def _found(self, used: Announced, keys: Sequence[bytes], *, repeats: bool = False) -> None:
        """Blocks that were there at some time: announce those that are there now."""
        # With a removal for each, they fit into one batch.
        for start in range(0, len(keys), BATCH // 2):
            some = keys[start : start + BATCH // 2]
            before: list[Change] = []
            stored: list[Change] = []
            after: list[Change] = []
            for key, tier in zip(some, self._where(used, some), strict=True):
                known = used.tier_of(key)
                if tier is None or (tier == known and not repeats):
                    continue
                stored.append(Change(key, tier, stored=True))
                if known is not None:
                    # Whoever counts has the same number afterwards.
                    removals = before if known == tier else after
                    removals.append(Change(key, known, stored=False))
            for changes in (before, stored, after):
                changes.sort(key=TIER)
            self._send(used, before + stored + after)

    def _where(self, used: Announced, keys: Sequence[bytes]) -> list[str | None]:
        """The uppermost tiers of blocks."""
        each = LATE_BATCH if self._late else BATCH
        starts = range(0, len(keys), each)
        found = (used.namespace.where(keys[start : start + each]) for start in starts)
        return list(itertools.chain.from_iterable(found))

    # ---- listings -------------------------------------------------------------------------------

    def _list_if_due(self) -> None:
        if self._listings or not self._used:
            return
        now = self._clock()
        if self._lost.is_set() and now >= self._next_repeat:
            self._lost.clear()
            self._next_repeat = now + SHARED_SECONDS
            self._begin_listing(repeats=True)
        elif self._list_again:
            self._begin_listing()
        elif now >= self._next_listing and (
            self._shared or self._late or len(self._depot.tiers) > 1
        ):
            counted = self._counted()
            # Others change a tier that may answer late, and a late answer withdraws blocks, without
            # a change of these counters.
            if self._late or counted != self._counted_last:
                self._counted_last = counted
                self._begin_listing()
            else:
                self._next_listing = now + SHARED_SECONDS

    def _begin_listing(self, *, repeats: bool = False) -> None:
        """Compare all namespaces with what is announced. No listing is in progress."""
        self._list_again = False
        self._listing_began = self._clock()
        for used in self._used.values():
            used.tiers, used.unseen = {}, used.tiers
        self._listings = deque(Listing(used, repeats) for used in self._used.values())

    def _list(self, listing: Listing) -> None:
        """A page of a listing; after the last, some announced blocks that were in none."""
        used = listing.used
        if not listing.ended:
            self._list_page(listing)
        else:
            # Gone, or stored while the listing went on.
            some = [used.unseen.popitem() for _ in range(min(PAGE, len(used.unseen)))]
            used.tiers.update(some)
            keys = [key for key, _ in some]
            pairs = zip(keys, self._where(used, keys), strict=True)
            self._left(used, [key for key, tier in pairs if tier is None])
        if not listing.ended or used.unseen:
            return
        self._listings.popleft()
        if not self._listings:
            now = self._clock()
            least = SHARED_SECONDS if self._shared else OWN_SECONDS
            self._next_listing = now + max(least, LISTING_SHARE * (now - self._listing_began))

    def _list_page(self, listing: Listing) -> None:
        """The next blocks of a listing."""
        used = listing.used
        try:
            page, cursor = used.namespace.blocks_page(listing.cursor, PAGE)
        except ERRORS:
            listing.failed += 1
            if listing.failed < TRIES:
                raise
            # What is announced is looked up all the same, and the pages are for another listing.
            listing.ended = True
            if listing.repeats:
                self._lost.set()
            return
        # In two tiers it may be listed twice.
        keys = list(dict.fromkeys(key for key, _ in page))
        used.see(keys)
        self._found(used, keys, repeats=listing.repeats)
        # Not before: after an error, the page is read again.
        listing.cursor, listing.ended = cursor, cursor is None

    def _counted(self) -> Any:
        """What is other where blocks have come, gone or moved."""
        tiers = self._depot.stats()["tiers"].values()
        return [(tier["stored_blocks"], tier["evicted_blocks"]) for tier in tiers]

    # ---- publishing -----------------------------------------------------------------------------

    def _send(self, used: Announced, changes: Iterable[Change]) -> None:
        """Publish changes in their order."""
        changes = iter(changes)
        while some := list(itertools.islice(changes, BATCH)):
            wait = max(0.0, self._next_batch - self._clock())
            self._paced += wait
            if self._stop.wait(wait):
                return
            self._next_batch = self._clock() + 1 / BATCHES_PER_SECOND
            with self._lock:
                if self._publish is None or self._clears != self._clears_seen:
                    # All is announced again in the next round.
                    return
                self._publish(list(self._events_of(used, some)))

    def _events_of(self, used: Announced, changes: Sequence[Change]) -> Iterator[Any]:
        """One event for each run of blocks of one tier. What is announced is up to date then."""
        for (tier, is_stored), run in itertools.groupby(changes, attrgetter("tier", "stored")):
            keys = [change.key for change in run]
            if is_stored:
                hashes = used.add(tier, keys, self._hashes)
                make = vllm_events.stored
            else:
                hashes = used.drop(tier, keys)
                make = vllm_events.removed
            medium = MEMORY if tier == "Cache" else STORAGE
            locality = "REMOTE" if tier == "Peer" else "LOCAL"
            yield make(used.group, hashes, medium, locality, f"kvdepot:{tier}")

    def _say(self, error: BaseException) -> None:
        now = self._clock()
        if now >= self._next_log:
            self._next_log = now + LOG_SECONDS
            logger.warning("kvdepot: KV events are late, because the depot failed: %s", error)
