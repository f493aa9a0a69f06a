"""A depot that fails costs hits, never the engine: none of vLLM's hooks raises its errors."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

import test_manager
import test_worker
from kvdepot.vllm import faults as vllm_faults
from kvdepot.vllm import manager as vllm_manager
from kvdepot.vllm.jobs import WorkerReport
from kvdepot.vllm.metrics import FAILED_CALLS
from test_manager import context, end_step, key
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager

pytestmark = pytest.mark.integration


class Breakable:
    """Stands before an object of kvdepot: calls and properties in `broken` raise its errors."""

    def __init__(self, inner: Any, broken: set[str]) -> None:
        self.inner = inner
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self.inner), name)
        if not callable(found):
            self.fail_if_broken(name)
            return getattr(self.inner, name)
        return self.called(name)

    def called(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.fail_if_broken(name)
            answer = getattr(self.inner, name)(*args, **kwargs)
            wrapped = isinstance(answer, kvdepot.Namespace | kvdepot.MoveJob)
            return Breakable(answer, self.broken) if wrapped else answer

        return call

    def fail_if_broken(self, name: str) -> None:
        if name in self.broken or "everything" in self.broken:
            raise kvdepot.ClosedError(f"{name}: the depot is gone")


class World(test_manager.World):
    """A manager over a depot that can be broken while it is used."""

    def __init__(self) -> None:
        super().__init__(1)
        self.broken: set[str] = set()
        breakable: Any = Breakable(self.depot, self.broken)
        self.manager = vllm_manager.KvdepotManager(breakable, 1, 0.3, "epoch")
        self.manager.set_groups(self.groups(None), self.groups)

    def failed_calls(self) -> Counter[str]:
        self.broken.clear()
        stats = self.manager.get_stats()
        return failed_calls(stats)


def failed_calls(stats: Any) -> Counter[str]:
    counted = stats.data["data"].get(FAILED_CALLS, {}) if stats else {}
    return Counter({call: count for (_, call), count in counted.items()})


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_faults, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(vllm_faults, "LONGEST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.broken.clear()
    made.close()


def test_no_hook_of_the_scheduler_raises(world: World) -> None:
    """All of them, with pins held and jobs under way, on a depot that fails on every call."""
    a, b, c = key("a"), key("b"), key("c")
    world.store(a, b)
    request = context("r", a, b, c)
    world.manager.lookup(a, request)
    load = world.manager.prepare_load([a], request)
    store = world.manager.prepare_store([c], request).store_spec
    world.manager.lookup(b, request)
    report = world.write(store, 0)
    world.broken.add("everything")

    manager = world.manager
    hooks: dict[str, Callable[[], Any]] = {
        "lookup": lambda: manager.lookup(key("d"), context("s", key("d"))),
        "get_load_source": lambda: manager.get_load_source(a, request),
        "prepare_load": lambda: manager.prepare_load([a], request),
        "touch": lambda: manager.touch([a], request),
        "complete_load": lambda: manager.complete_load([a], request),
        "prepare_store": lambda: manager.prepare_store([key("d")], request),
        "complete_store": lambda: manager.complete_store([a], request),
        "on_new_request": lambda: manager.on_new_request(request),
        "on_request_finished": lambda: manager.on_request_finished(request),
        "take_events": lambda: list(manager.take_events()),
        "on_schedule_end": lambda: end_step(manager),
        "has_pending_work": lambda: manager.has_pending_work(),
        "reset_cache": lambda: manager.reset_cache(),
        "get_stats": lambda: manager.get_stats(),
        "shutdown": lambda: manager.shutdown(),
        # From 0.33 on.
        "config_info": lambda: manager.config_info(),
        "on_reset_flushed": lambda: manager.on_reset_flushed(),
    }
    offered = {name for name, _ in inspect.getmembers(OffloadingManager, inspect.isfunction)}
    assert not offered - set(hooks), "a hook that this test does not know"
    hooks = {name: hook for name, hook in hooks.items() if name in offered}
    answers = {name: hook() for name, hook in hooks.items() if name != "shutdown"}
    assert answers["lookup"] is LookupResult.MISS
    assert [group.placements for group in answers["prepare_load"].groups] == [[None]]
    assert answers["prepare_store"].keys_to_store == []
    manager.apply({load.ticket: {0: WorkerReport(corrupt=[0])}, store.ticket: {0: report}})
    manager.apply({answers["prepare_load"].ticket: {0: WorkerReport(undelivered=[0])}})
    failed = failed_calls(answers["get_stats"]) + world.failed_calls()
    for call in ("lookup", "pin", "reserve", "unpin", "discard", "abort", "namespace"):
        assert failed[call] >= 1, call
    assert world.depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 0, "pins end by themselves"
    world.broken.add("everything")
    hooks["shutdown"]()


def test_a_depot_that_works_again_is_used_again(world: World) -> None:
    a, b = key("a"), key("b")
    world.store(a)
    world.broken.add("everything")
    assert world.lookup(a) is LookupResult.MISS
    assert world.store(b) == 0
    assert world.failed_calls() == {"lookup": 1, "reserve": 1}
    assert world.lookup(a) is LookupResult.HIT
    assert world.store(b) == 0, "behind a block of the same request that is not stored"
    assert world.store(b, request="another") == 1


def test_blocks_that_could_not_be_committed_are_given_back(world: World) -> None:
    a = key("a")
    spec = world.manager.prepare_store([a], context("r", a)).store_spec
    report = world.write(spec, 0)
    world.broken.add("commit")
    world.manager.apply({spec.ticket: {0: report}})
    assert world.failed_calls() == {"commit": 1}
    assert world.lookup(a) is LookupResult.MISS
    assert not world.manager.has_pending_work()
    assert world.store(a) == 1


def test_a_corrupt_block_that_stays_in_the_index_is_not_looked_up_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_manager, "RETRY_SECONDS", 60)
    a = key("a")
    world.store(a)
    request = context("r", a)
    world.manager.lookup(a, request)
    spec = world.manager.prepare_load([a], request)
    world.broken.add("discard")
    world.manager.apply({spec.ticket: {0: WorkerReport(corrupt=[0])}})
    assert world.lookup(a) is LookupResult.MISS
    assert world.lookup(a, "another") is LookupResult.MISS


def test_while_a_depot_fails_it_is_asked_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(vllm_faults, "PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(vllm_faults, "LONGEST_PAUSE_SECONDS", 30.0)
    monkeypatch.setattr(vllm_faults.time, "monotonic", lambda: now[0])
    lines: list[str] = []

    class Logger:
        def error(self, line: str, *args: object) -> None:
            lines.append(line % args)

    faults = vllm_faults.Faults(Logger())
    calls: list[float] = []

    def fails(keys: list[bytes]) -> int:
        calls.append(now[0])
        raise kvdepot.TimeoutError("no response within 2 s")

    for _ in range(100 * 60):
        assert faults.attempt_unless_paused("prefix", 0, fails, []) == 0
        now[0] += 0.01
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(calls)]
    assert gaps == [1, 2, 4, 8, 16]
    assert faults.take() == {"prefix": len(calls)}
    line = "depot call prefix failed: TimeoutError: no response within 2 s; treated as a cache miss"
    assert lines == [line]
    now[0] += 40
    faults.attempt_unless_paused("prefix", 0, fails, [])
    assert lines[1].startswith("depot call prefix failed (and 5 times since the last such line): ")
    now[0] += 40
    assert faults.attempt_unless_paused("prefix", 0, lambda keys: 3, []) == 3
    assert faults.attempt_unless_paused("prefix", 0, fails, []) == 0
    now[0] += 1.1
    assert faults.attempt_unless_paused("prefix", 0, lambda keys: 3, []) == 3, "a second again"


MOVES = ("prefault", "store", "load")
JOB = ("ended", "done", "wait", "whole", "results", "corrupt", "checksums", "error")


@pytest.mark.parametrize("worker", ["host", "double"])
@pytest.mark.parametrize("call", [*MOVES, *JOB, "close", "everything"])
def test_no_hook_of_a_worker_raises(
    worker: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: set[str] = set()
    attach = kvdepot.attach

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return Breakable(attach(*args, **kwargs), broken)

    monkeypatch.setattr(kvdepot, "attach", wrapped)
    monkeypatch.setattr(vllm_manager, "RETRY_SECONDS", 0.0)
    world = test_worker.made_of(worker)
    a, b = test_worker.key("a"), test_worker.key("b")
    # Broken from the start, then in the middle of a store, of a load, and at the end.
    broken.add(call)
    world.store([a], [0, 1])
    broken.clear()
    if world.lookup(a) is LookupResult.MISS:
        world.store([a], [0, 1])
    stored = world.content(0, 1)
    broken.add(call)
    missing = world.load([a], [4, 5])
    assert missing in (set(), {4, 5}), "all of a block, or nothing"
    if not missing:
        for found, expected in zip(world.content(4, 5), stored, strict=True):
            assert (found == expected).all()
    world.store([b], [2, 3])
    broken.clear()
    assert world.lookup(a) is LookupResult.HIT, "an error says nothing about its bytes"
    assert world.load([a], [6, 7]) == set()
    for found, expected in zip(world.content(6, 7), stored, strict=True):
        assert (found == expected).all()
    failed = Counter(world.worker.faults.take())
    used = {"store", "load", "checksums", "done", "wait", "whole", "prefault", "everything"}
    if call in used:
        assert failed.total() > 0, call
    broken.add(call)
    world.worker.shutdown()
    broken.clear()
    world.manager.shutdown()
