"""KV events after errors in the middle of a listing, and after the end of their thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_events import (
    DEADLINE_SECONDS,
    GROUP,
    Engine,
    History,
    Published,
    engine,
    keys,
    settle,
    unpaced,
)
from kvdepot.vllm import events as kvdepot_events
from kvdepot.vllm.beside import Hashes
from kvdepot.vllm.events import Events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

__all__ = ["engine", "unpaced"]

pytestmark = pytest.mark.integration


class Listed:
    """An indexer that has missed events of ten blocks. One has left since, and another engine has
    stored one behind them; neither was noticed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        history = History("a listing", monkeypatch)
        monkeypatch.setattr(kvdepot_events, "PAGE", 3)
        monkeypatch.setattr(kvdepot_events, "BATCH", 20)
        history.depot.others, history.uses = lambda: None, {0: 0}
        ((_, self.namespace),) = history.used()
        self.history, self.events, self.keys = history, history.events, history.keys
        for each in self.keys[:10]:
            self.namespace.put(each, "Cache")
        settle(self.events)
        assert self.there() == self.named(*self.keys[:10])
        self.namespace.blocks[self.keys[5]].clear()
        self.namespace.put(self.keys[10], "Cache")
        self.events._lost.set()

    def there(self) -> set[tuple[int, str, Any]]:
        return self.history.publisher.indexer.there()

    def repeated(self, since: int) -> set[tuple[int, str, Any]]:
        return self.history.publisher.stored_since(since)

    @property
    def batches(self) -> int:
        return self.history.publisher.indexer.batches

    def named(self, *some: bytes) -> set[tuple[int, str, Any]]:
        return {(0, "kvdepot:Cache", maybe_convert_block_hash(each)) for each in some}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Listed:
    return Listed(monkeypatch)


@pytest.mark.parametrize("call", ["blocks_page", "where"])
def test_a_listing_goes_on_after_an_error(
    listed: Listed, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of the second page, which is listed at the third attempt."""
    calls = itertools.count(1)
    cursors: list[bytes | None] = []

    def fails(*args: Any) -> Any:
        if next(calls) in (2, 3):
            raise kvdepot.Error("no answer")
        return answer(*args)

    def read(cursor: bytes | None, limit: int) -> Any:
        cursors.append(cursor)
        return page(cursor, limit)

    answer = getattr(listed.namespace, call)
    monkeypatch.setattr(listed.namespace, call, fails)
    page = listed.namespace.blocks_page
    monkeypatch.setattr(listed.namespace, "blocks_page", read)
    since = listed.batches
    settle(listed.events)
    assert cursors[:2] == [None, cursors[1]]
    assert cursors[1:4] == [cursors[1]] * 3
    assert cursors.count(None) == 2, "another listing finds what the failed rounds have lost"
    wanted = listed.named(*listed.keys[:5], *listed.keys[6:11])
    assert listed.there() == wanted
    assert listed.repeated(since) == wanted


def test_a_listing_does_without_pages_that_fail_for_long(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = True

    def fails(cursor: bytes | None, limit: int) -> Any:
        if silent and cursor is not None:
            raise kvdepot.Error("no answer")
        return page(cursor, limit)

    page = listed.namespace.blocks_page
    monkeypatch.setattr(listed.namespace, "blocks_page", fails)
    monkeypatch.setattr(kvdepot_events, "TRIES", 4)
    # The first page, attempts to read the next one, and the seven announced blocks of the others.
    listed.history.rounds(1 + 4 + 3)
    assert listed.there() == listed.named(*listed.keys[:5], *listed.keys[6:10])
    silent, since = False, listed.batches
    listed.history.clock.now += kvdepot_events.SHARED_SECONDS
    settle(listed.events)
    wanted = listed.named(*listed.keys[:5], *listed.keys[6:11])
    assert listed.there() == wanted
    assert listed.repeated(since) == wanted


def test_a_tier_that_answers_late_is_asked_for_few_blocks(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_up(some: list[bytes]) -> Any:
        asked.append(len(some))
        return where(some)

    asked: list[int] = []
    where = listed.namespace.where
    monkeypatch.setattr(listed.namespace, "where", looks_up)
    monkeypatch.setattr(kvdepot_events, "LATE_BATCH", 2)
    # The block that has left is not listed, and looked up once more.
    for late, most, blocks in ((False, 3, 11), (True, 2, 10)):
        listed.events._late = late
        listed.events._list_again = True
        asked.clear()
        settle(listed.events)
        assert (max(asked), sum(asked)) == (most, blocks)
    for tier, late in (("Nvme", False), ("S3", True)):
        depot: Any = SimpleNamespace(tiers=["Cache", tier])
        assert Events(depot, dict, [], Hashes(), shared=False)._late is late


# ---- the thread --------------------------------------------------------------------------------


class Heard(Published):
    """Says when something is published."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def publish(self, batch: Any) -> None:
        super().publish(batch)
        self.heard.set()


def test_the_thread_ends_with_the_engine(engine: Engine) -> None:
    publisher = Heard()
    events = engine.follow(publisher, thread=True)
    assert engine.store(*keys("a", 8)) == 8
    assert publisher.heard.wait(DEADLINE_SECONDS)
    events.stop()
    # `stop` does not wait for a machine that stands still.
    events._thread.join(DEADLINE_SECONDS)
    assert not events._thread.is_alive()
    assert engine.store(*keys("b", 8)) == 8
    assert not events._stores


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        raise error

    return fails


def test_a_connection_that_cannot_be_closed_does_not_keep_the_engine_from_its_end() -> None:
    depot: Any = SimpleNamespace(tiers=["Cache"], close=raises(kvdepot.Error("no answer")))
    Events(depot, dict, [], Hashes(), shared=True).stop()


def test_nothing_is_kept_for_a_thread_that_has_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    say = SimpleNamespace(info=lambda text, error: lines.append(str(error)), exception=lines.append)
    monkeypatch.setattr(kvdepot_events, "logger", say)
    # As vLLM's publisher, once it is closed.
    closed = Published()
    monkeypatch.setattr(closed, "publish", raises(RuntimeError("publisher")))
    mistakes = [RuntimeError("mistake"), KeyError("mistake")]
    for number, error in enumerate([kvdepot.ClosedError("depot"), None, *mistakes]):
        events = engine.follow(closed if error is None else Published())
        assert engine.store(*keys(f"before {number}", 2)) == 2
        assert events._stores
        if error is not None:
            monkeypatch.setattr(events, "_round", raises(error))
        events._run()
        assert engine.store(*keys(f"after {number}", 2)) == 2
        assert not events._stores
    ends, said = lines[:2], lines[2:]
    assert ends == ["depot", "publisher"]
    assert ["internal error" in line for line in said] == [True, True]
    # Nor for one that was not started.
    events = Events(engine.client, dict, [GROUP], engine.hashes, shared=False)
    events.stored(engine.namespace.digest, [bytes(32)])
    assert not events._stores
