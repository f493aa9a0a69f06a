"""The namespaces of LMCache's in-process chunks: one a layout, as a rule a single one.

Which layouts there are is kept beside the chunks, so that another process, or this
one after a restart, finds them whatever LMCache's configuration makes one think.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcache.logging import init_logger

import kvdepot
from kvdepot.engine import weights as engine_weights
from kvdepot.lmcache import small as lmcache_small
from kvdepot.lmcache.keys import warn_of_names
from kvdepot.lmcache.layout import Layout

logger: logging.Logger = init_logger(__name__)

# A layout is stored again with a use of its chunks that comes so much later: used, it is not
# evicted before them.
KEEP_AGAIN_SECONDS = 10.0

# Pause before layouts are looked for again, which another process may have begun to store with.
LEARN_SECONDS = 0.2


def weights_of(model: str) -> str | None:
    """The fingerprint of a model's files, if its name is their directory; else None.

    A hub's name says nothing about the revision. Warns of what is not covered.
    """
    is_known = Path(model).is_dir()
    warn_of_names(logger, "" if is_known else "the weights, ")
    return engine_weights.of_directory(Path(model), config=True) if is_known else None


class Spaces:
    """What is stored of one model, under one world and salt."""

    def __init__(
        self,
        depot: kvdepot.Depot,
        config: Any,
        metadata: Any,
        salt: str | None,
        weights: str | None,
    ) -> None:
        self._depot = depot
        self._fields = {
            "model": metadata.model_name,
            "block_tokens": metadata.chunk_size,
            "world": metadata.world_size,
            "hash": config.pre_caching_hash_algorithm,
            "salt": salt,
            "weights": weights_of(metadata.model_name) if weights is None else weights,
        }
        self._lock = threading.Lock()
        self._layouts = depot.namespace(dtype="opaque", layout="lmcache layouts", **self._fields)
        self._spaces: dict[Layout, kvdepot.Namespace] = {}
        self._kept: dict[Layout, tuple[float, kvdepot.Task]] = {}
        self._learning = lmcache_small.Pause(LEARN_SECONDS)
        if not self._learn():
            self._guess(config, metadata)

    def of(self, layout: Layout) -> kvdepot.Namespace:
        """The namespace of chunks with this layout."""
        with self._lock:
            space = self._spaces.get(layout)
            if space is None:
                dtype = str(layout.dtype).removeprefix("torch.")
                space = self._depot.namespace(dtype=dtype, layout=layout.describe(), **self._fields)
                self._spaces[layout] = space
        return space

    def keep(self, layout: Layout) -> None:
        """Note that there are chunks of this layout; in the background."""
        now = time.monotonic()
        with self._lock:
            if layout in self._kept and now - self._kept[layout][0] < KEEP_AGAIN_SECONDS:
                return
            # A depot that closes meanwhile has nothing left to be found.
            with suppress(kvdepot.Error):
                task = self._layouts.put([layout.key()], [layout.describe().encode()])
                self._kept[layout] = (now, task)

    def wait_kept(self, layout: Layout) -> None:
        """Until it is noted: before that, the chunks would not be found after a restart."""
        kept = self._kept.get(layout)
        if kept is not None:
            kept[1].wait()

    def prefix(self, ids: list[bytes]) -> int:
        """How many of the first blocks are stored without a gap."""
        found = self._prefix(ids)
        if found < len(ids) and self._learn():
            found = self._prefix(ids)
        return found

    def pin(self, ids: list[bytes], prefix: bool) -> list[tuple[Layout | None, kvdepot.Pin | None]]:
        """A pin for each stored block, with its layout; with `prefix` up to the first miss."""
        found = self._pin(ids, prefix)
        if any(pin is None for _, pin in found) and self._learn():
            found = self._pin(ids, prefix)
        for layout in {layout for layout, pin in found if pin is not None}:
            if layout is not None:
                self.keep(layout)
        return found

    def unpin(self, pins: list[kvdepot.Pin | None]) -> None:
        """End pins of any of the namespaces."""
        self._layouts.unpin(pins)

    def remove(self, ids: list[bytes]) -> int:
        """Remove blocks; how many were there. Without the service of a served depot none is."""
        self._learn()
        try:
            return sum(space.remove(ids) for _, space in self._all())
        except kvdepot.ClosedError:
            raise
        except kvdepot.Error as error:
            logger.warning("cannot delete %d blocks, which stay stored: %s", len(ids), error)
            return 0

    def _all(self) -> list[tuple[Layout, kvdepot.Namespace]]:
        with self._lock:
            return list(self._spaces.items())

    def _guess(self, config: Any, metadata: Any) -> None:
        """Nobody has stored yet, or with a release that kept no layouts."""
        try:
            layout = Layout.of_engine(config, metadata)
        except Exception:
            logger.debug("no layout follows from LMCache's configuration", exc_info=True)
        else:
            self.of(layout)

    def _learn(self) -> bool:
        """Read the layouts that were noted; whether there are new ones."""
        with self._learning.over() as is_over:
            if not is_over:
                return False
            with self._lock:
                known = {layout.key() for layout in self._spaces}
            try:
                found = lmcache_small.read(self._layouts, lambda key: key not in known)
            except kvdepot.ClosedError:
                raise
            except kvdepot.Error as error:
                logger.debug("the layouts cannot be read: %s", error)
                return False
        new = False
        for _, text in found:
            try:
                layout = Layout.parse(text)
            except (ValueError, TypeError, KeyError, AttributeError):
                logger.warning("stored chunk layout %r is not valid; its chunks are misses", text)
                continue
            self.of(layout)
            new = True
        return new

    def _prefix(self, ids: list[bytes]) -> int:
        spaces = self._all()
        found = 0
        while found < len(ids):
            more = max((space.prefix(ids[found:]) for _, space in spaces), default=0)
            if not more:
                break
            found += more
        return found

    def _pin(
        self, ids: list[bytes], prefix: bool
    ) -> list[tuple[Layout | None, kvdepot.Pin | None]]:
        spaces = self._all()
        if len(spaces) == 1:
            [(only, space)] = spaces
            return [(only, pin) for pin in space.pin(ids, prefix=prefix)]
        found: list[tuple[Layout | None, kvdepot.Pin | None]] = [(None, None)] * len(ids)
        for layout, space in spaces:
            open_at = [at for at, (_, pin) in enumerate(found) if pin is None]
            for at, pin in zip(open_at, space.pin([ids[at] for at in open_at]), strict=True):
                found[at] = (layout, pin)
        if prefix:
            end = next((at for at, (_, pin) in enumerate(found) if pin is None), len(found))
            found[end:] = [(None, None)] * (len(found) - end)  # dropped pins are ended
        return found
