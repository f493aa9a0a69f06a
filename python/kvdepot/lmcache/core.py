"""What LMCache's two multi-process surfaces share: a depot, and the namespaces of LMCache's keys.

A call of LMCache may mix models, ranks, groups and salts; kvdepot's calls are of one namespace.
`Batch` is one of LMCache's calls, split by namespace and put together again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import kvdepot
from kvdepot.lmcache import keys as lmcache_keys
from kvdepot.lmcache import settings as lmcache_settings
from kvdepot.lmcache import small as lmcache_small
from kvdepot.lmcache.keys import Name

# A name is stored again with a store that comes so much later: used, it is not evicted.
NAME_AGAIN_S = 10.0

K = TypeVar("K")

logger = logging.getLogger(__name__)


class Space:
    """One namespace, and the name that LMCache's keys give it; None for keys of another form."""

    def __init__(self, namespace: kvdepot.Namespace, name: Name | None) -> None:
        self.namespace = namespace
        self.name = name
        self.digest = namespace.digest
        self.named_at = float("-inf")


Place = tuple[Space, bytes]


class Batch:
    """One call of LMCache: its answers so far, and how many of its parts are under way."""

    def __init__(self, tag: Any, count: int) -> None:
        self.tag = tag
        self.answers = [False] * count
        self.reasons: set[str] = set()
        self.parts = 0

    def end(self, part: Part, answers: list[bool]) -> bool:
        """Take one part's answers; whether it was the last."""
        task, positions = part
        for position, answer in zip(positions, answers, strict=True):
            self.answers[position] = answer
        if not all(answers):
            self.reasons.update(reason for reason in task.errors if reason is not None)
        self.parts -= 1
        return self.parts == 0


Part = tuple[kvdepot.Task, Sequence[int]]


class Store:
    """A depot by LMCache's keys."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.settings = lmcache_settings.read(params)
        self._texts = self.settings.salt, self.settings.weights
        if self.settings.weights is None:
            # The server outlives engines, so that files tell nothing about a chunk's weights.
            lmcache_keys.warn_of_names(logger, "the weights, ")
        self.depot = kvdepot.open(self.settings.pipeline, self.settings.depot)
        self._lock = threading.Lock()
        self._by_name: dict[Name | None, Space] = {}
        self._by_prefix: dict[tuple[Any, ...], Space] = {}
        self._by_digest: dict[bytes, Space] = {}
        self._listed: list[tuple[Space, int]] = []
        self._listing = lmcache_small.Pause()
        try:
            self._names = self.depot.namespace(**lmcache_keys.names(*self._texts))
            # What a directory of blocks holds is others' too, and its tier keeps no count by name.
            self.counts = self.depot.tiers[-1] in lmcache_settings.ARENAS + ("Cache",)
        except BaseException:
            self.depot.close()
            raise

    def place(self, text: str) -> Place:
        """Where the chunk of a key lies that LMCache gives as text."""
        prefix, chunk = lmcache_keys.split(text)
        space = self._by_prefix.get(prefix)
        if space is not None and (chunk_hash := lmcache_keys.hash_of(chunk)) is not None:
            return space, lmcache_keys.key(chunk_hash)
        parsed = lmcache_keys.parse(text)
        if parsed is None:
            return self._space(None), lmcache_keys.key_of_text(text)
        name, chunk_hash = parsed
        space = self._by_prefix[prefix] = self._space(name)
        return space, lmcache_keys.key(chunk_hash)

    def place_object(self, key: Any) -> Place:
        """Where the chunk of an `ObjectKey` lies: where its text's does."""
        chunk_hash = key.chunk_hash
        prefix = (
            key.model_name,
            key.kv_rank,
            key.object_group_id,
            key.cache_salt,
            len(chunk_hash),
        )
        space = self._by_prefix.get(prefix)
        if space is None:
            name = lmcache_keys.name_of(*prefix)
            if name is None:
                return self.place(lmcache_keys.text_of(Name(*prefix), chunk_hash))
            space = self._by_prefix[prefix] = self._space(name)
        return space, lmcache_keys.key(chunk_hash)

    def _space(self, name: Name | None) -> Space:
        space = self._by_name.get(name)
        if space is not None:
            return space
        texts = self._texts
        fields = lmcache_keys.whole(*texts) if name is None else name.fields(*texts)
        with self._lock:
            if name not in self._by_name:
                space = Space(self.depot.namespace(**fields), name)
                self._by_digest[space.digest] = space
                self._by_name[name] = space
            return self._by_name[name]

    def _keep_name(self, space: Space) -> None:
        """Store a namespace's name beside its blocks, so that they can be listed again."""
        now = time.monotonic()
        if space.name is not None and now - space.named_at > NAME_AGAIN_S:
            space.named_at = now
            # A depot that closes meanwhile has nothing left to be listed.
            with contextlib.suppress(kvdepot.Error):
                self._names.put([lmcache_keys.key(space.digest)], [space.name.encode()])

    def spaces(self) -> list[Space]:
        """Every namespace that has a name, also from before a restart; in the digests' order."""
        new = lmcache_small.read(self._names, lambda key: key[:16] not in self._by_digest)
        for key, text in new:
            try:
                space = self._space(Name.decode(text))
            except (ValueError, TypeError, KeyError):
                continue
            if lmcache_keys.key(space.digest) == key:
                # It is there already; nothing to keep before its next store.
                space.named_at = time.monotonic()
        return self.known_spaces()

    def known_spaces(self) -> list[Space]:
        """Those of them that were used or listed before."""
        with self._lock:
            named = [space for space in self._by_digest.values() if space.name is not None]
        return sorted(named, key=lambda space: space.digest)

    def held(self) -> list[tuple[Space, int]]:
        """The namespaces that have a name, with the bytes of their blocks."""
        if self.counts:
            rows = {digest: size for digest, _, _, size in self.depot.namespaces()}
            return [(space, rows.get(space.digest, 0)) for space in self.spaces()]
        with self._listing.over() as is_over, contextlib.suppress(kvdepot.Error):
            if is_over:
                self._listed = [
                    (space, sum(size for _, size in space.namespace.blocks()))
                    for space in self.spaces()
                ]
        return self._listed

    def spaces_of(self, digests: Iterable[bytes]) -> Mapping[bytes, Space]:
        """The namespaces by digest; the stored names are read when one of `digests` is new."""
        if not all(digest in self._by_digest for digest in digests):
            self.spaces()
        return self._by_digest

    def submit(
        self,
        batch: Batch,
        places: Sequence[Place],
        buffers: Sequence[Any],
        done: kvdepot.Completions,
        put: bool,
    ) -> None:
        """Start a put or get of all places; `done` answers (batch, part) for each part.

        What cannot be started is false. Nothing is raised once a part was started: LMCache would
        use its buffers again.
        """
        if len(places) != len(buffers):
            allowed = f"one buffer per key, {len(places)} in total"
            raise kvdepot.InputError(f"buffers: {len(buffers)} is not allowed; allowed: {allowed}")
        started: list[Part] = []
        for space, keys, positions in by_space(places):
            verb = space.namespace.put if put else space.namespace.get
            try:
                task = verb(keys, [buffers[position] for position in positions])
            except kvdepot.Error as error:
                if not started:
                    raise
                batch.reasons.add(str(error))
            else:
                started.append((task, positions))
                if put:
                    self._keep_name(space)
        batch.parts = max(len(started), 1)
        for part in started:
            done.add(part[0], (batch, part))
        if not started:
            done.post((batch, None), [])

    def contains(self, places: Sequence[Place]) -> list[bool]:
        """Whether each chunk is stored."""
        return self._each(places, lambda space, keys: space.namespace.contains(keys), False)

    def pin(self, places: Sequence[Place]) -> list[kvdepot.Pin | None]:
        """Pin what is stored of the chunks."""
        return self._each(places, lambda space, keys: space.namespace.pin(keys), None)

    def remove(self, places: Sequence[Place]) -> None:
        """Remove chunks; those that are not there are none the less, and so are all where nobody
        serves the depot: there they are found no more."""
        for space, keys, _ in by_space(places):
            try:
                space.namespace.remove(keys)
            except kvdepot.ClosedError:
                raise
            except kvdepot.Error as error:
                logger.warning("cannot delete %d chunks, which stay stored: %s", len(keys), error)

    def _each(
        self,
        places: Sequence[Place],
        ask: Callable[[Space, list[bytes]], list[K]],
        absent: K,
    ) -> list[K]:
        answers = [absent] * len(places)
        for space, keys, positions in by_space(places):
            for position, answer in zip(positions, ask(space, keys), strict=True):
                answers[position] = answer
        return answers

    def close(self) -> None:
        """Wait for what is under way, refuse the rest, and let the next owner in."""
        self.depot.close()


def by_space(places: Sequence[Place]) -> list[tuple[Space, list[bytes], Sequence[int]]]:
    """Places by namespace, each in the order given: LMCache's is the prompt's."""
    groups: dict[Space, list[int]] = {}
    for position, (space, _) in enumerate(places):
        groups.setdefault(space, []).append(position)
    return [
        (space, [places[position][1] for position in positions], positions)
        for space, positions in groups.items()
    ]


def ended(done: kvdepot.Completions, clear: bool) -> list[Batch]:
    """The batches whose last part has ended. For one thread at a time."""
    complete = []
    for (batch, part), answers in done.drain(clear):
        if part is None or batch.end(part, answers):
            complete.append(batch)
    return complete
