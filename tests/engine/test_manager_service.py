"""The index side beside a service, and answers that come late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_manager import PART, Clock, World, context, end_step, key, soon
from kvdepot.vllm.jobs import Group, WorkerReport
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
)

pytestmark = pytest.mark.integration


class Service:
    """`kvdepot serve`, which other engines use too."""

    def __init__(self, folder: Path, timeout: str = "2s") -> None:
        self.address = f"unix:{folder / 's'}"
        self.command = [sys.executable, "-m", "kvdepot._cli", "serve", "Cache|Dax"]
        for option in (f"dax.path={folder / 'arena'}", "dax.capacity=16MiB", "cache.capacity=4MiB"):
            self.command += ["-o", option]
        self.command += ["-o", "overload=drop", "-o", f"timeout={timeout}"]
        self.command += ["--socket", str(folder / "s")]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("serving")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def engine(self) -> World:
        depot = kvdepot.open(self.address, {"lanes": 1})
        return World(1, depot, shared=True, lookup_wait=60.0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def patient_service(tmp_path: Path) -> Iterator[Service]:
    """For tests that fail after a call without an answer: machines stand still for seconds."""
    made = Service(tmp_path, timeout="60s")
    yield made
    made.kill()


def test_engines_of_a_service_hit_what_each_other_stored_and_store_nothing_twice(
    service: Service,
) -> None:
    one, other = service.engine(), service.engine()
    try:
        a, b = key("a"), key("b")
        assert one.store(a, b, fill=b"q") == 2
        assert other.store(a, b) == 0, "there"
        request = context("r", a, b)
        assert soon(other.manager, a, request) is LookupResult.HIT
        spec = other.manager.prepare_load([a, b], request)
        assert other.read(spec, 0)[1] == b"q" * (2 * PART)
        other.manager.apply({spec.ticket: {0: WorkerReport()}})

        # Both at the same time: one of them stores.
        c = key("c")
        first = one.manager.prepare_store([c], context("r", c))
        assert other.manager.prepare_store([c], context("r", c)).keys_to_store == []
        spec = first.store_spec
        one.manager.apply({spec.ticket: {0: one.write(spec, 0)}})
        assert other.lookup(c) is LookupResult.HIT
        end_step(other.manager)
        # What the service has still to write is no work of an engine's.
        assert not one.manager.has_pending_work()
        assert not other.manager.has_pending_work()
    finally:
        one.close()
        other.close()


def test_an_engine_that_is_reset_clears_nothing_of_the_others(service: Service) -> None:
    one, other = service.engine(), service.engine()
    try:
        a = key("a")
        one.store(a)
        one.manager.reset_cache()
        assert one.lookup(a) is LookupResult.MISS
        assert other.lookup(a) is LookupResult.HIT
    finally:
        one.close()
        other.close()


def test_a_service_that_is_killed_costs_hits_until_the_next_one_serves(service: Service) -> None:
    engine = service.engine()
    try:
        a, b, c = key("a"), key("b"), key("c")
        engine.store(a, fill=b"q")
        service_has = kvdepot.open(service.address)
        assert service_has.drain(10), "it outlives the service"
        service_has.close()
        request = context("r", a)
        assert soon(engine.manager, a, request) is LookupResult.HIT
        load = engine.manager.prepare_load([a], request)
        store = engine.manager.prepare_store([b], context("r", b)).store_spec
        written = engine.write(store, 0)
        service.kill()
        eventually(lambda: engine.mover.ended)
        # What was under way ends, and neither asks nor answers anything more.
        engine.manager.apply({store.ticket: {0: written}})
        engine.manager.apply({load.ticket: {0: WorkerReport()}})
        assert engine.lookup(a) is LookupResult.MISS
        assert engine.store(c) == 0
        assert not engine.manager.has_pending_work()
        engine.manager.get_stats()
        end_step(engine.manager)

        service.start()
        eventually(lambda: hits(engine, a))
        end_step(engine.manager)
        engine.mover = kvdepot.attach(engine.depot.socket or "", with_owner=True)
        # The worker of the first one is alive: nobody waits for it.
        eventually(lambda: engine.store(c, fill=b"n") == 1)
        assert engine.lookup(c) is LookupResult.HIT
        assert engine.lookup(b) is LookupResult.MISS, "it was not acknowledged"
    finally:
        engine.close()


class LateNamespace:
    """A namespace that answers lookups when a test says so."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self.silent = True
        self.asked = 0
        self.waits: list[float] = []

    def lookup(self, keys: list[bytes]) -> Any:
        self.asked += 1
        return LateTask(self, self._namespace.lookup(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)


class LateTask:
    def __init__(self, namespace: LateNamespace, task: kvdepot.Task) -> None:
        self._namespace = namespace
        self._task = task

    @property
    def done(self) -> bool:
        return not self._namespace.silent

    def wait(self, timeout: float) -> list[bool]:
        self._namespace.waits.append(timeout)
        if self._namespace.silent:
            raise kvdepot.TimeoutError("late")
        return self._task.wait(timeout)


def test_a_lookup_whose_answer_is_late_is_tried_again_and_asked_once() -> None:
    world = World(1)
    a, b = key("a"), key("b")
    world.store(a)
    world.manager._questions.late = True
    world.manager._lookup_wait = 60.0
    (group,) = world.manager._groups.values()
    late = LateNamespace(group.namespace)
    world.manager.set_groups({0: Group(0, cast(kvdepot.Namespace, late), group.part_bytes)})
    for _ in range(3):
        assert world.manager.lookup(a, context("lookup", a)) is LookupResult.RETRY
        end_step(world.manager)
    assert late.asked == 1
    assert late.waits[0] > 0
    assert late.waits[1:] == [0, 0], "the engine waits once"
    late.silent = False
    assert world.lookup(a) is LookupResult.HIT
    end_step(world.manager)
    late.silent = True
    assert world.manager.lookup(b, context("lookup", b)) is LookupResult.RETRY
    # Nobody waits for ever, and what is over is forgotten.
    world.manager._lookup_wait = 0.0
    assert world.lookup(b) is LookupResult.MISS
    world.manager.on_request_finished(context("lookup", a, b))
    late.silent = False
    assert world.lookup(b) is LookupResult.MISS
    assert late.asked == 3
    world.close()


def test_a_prompt_whose_lookup_is_late_is_asked_for_and_waited_for_once() -> None:
    world = World(1)
    keys = [key(f"block {number}") for number in range(50)]
    world.store(*keys)
    world.manager._questions.late = True
    world.manager._lookup_wait = 60.0
    (group,) = world.manager._groups.values()
    late = LateNamespace(group.namespace)
    world.manager.set_groups({0: Group(0, cast(kvdepot.Namespace, late), group.part_bytes)})
    request = context("late", *keys)
    # vLLM goes on asking behind a block that is not known yet, until it is told to stop.
    for _ in range(2):
        assert world.manager.lookup(keys[0], request) is LookupResult.RETRY
        assert world.manager.lookup(keys[1], request) is LookupResult.MISS
        end_step(world.manager)
    assert late.asked == 1
    assert sum(late.waits) <= 0.005
    late.silent = False
    for block in keys:
        assert world.manager.lookup(block, request) is LookupResult.HIT
    world.manager.on_request_finished(request)
    world.close()


def test_a_hit_that_waits_for_kv_room_is_asked_for_again_whenever_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM looks a prompt up again in each step until it has room for it."""
    world = World(1)
    a = key("a")
    world.store(a)
    world.manager._questions.late = True
    world.manager._lookup_wait = 60.0
    clock = Clock()
    monkeypatch.setattr("kvdepot.vllm.manager.time", clock)
    (group,) = world.manager._groups.values()
    late = LateNamespace(group.namespace)
    world.manager.set_groups({0: Group(0, cast(kvdepot.Namespace, late), group.part_bytes)})
    for _ in range(4):
        late.silent = True
        assert world.manager.lookup(a, context("lookup", a)) is LookupResult.RETRY
        end_step(world.manager)
        clock.now += 40
        late.silent = False
        assert world.lookup(a) is LookupResult.HIT
        end_step(world.manager)
        clock.now += 40
    # One that is not answered is waited for no longer than before.
    late.silent = True
    assert world.manager.lookup(a, context("lookup", a)) is LookupResult.RETRY
    end_step(world.manager)
    clock.now += 61
    assert world.manager.lookup(a, context("lookup", a)) is LookupResult.MISS
    world.close()


def all_stopped(pid: int) -> bool:
    states = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


def test_a_service_that_hangs_costs_hits_and_holds_the_engine_up_once(service: Service) -> None:
    engine = service.engine()
    try:
        a = key("a")
        engine.store(a)
        os.kill(service.process.pid, signal.SIGSTOP)
        # Each of its threads stops when it notices.
        eventually(lambda: all_stopped(service.process.pid))
        # A request waits, as long as `lookup_wait` says, and the engine does not.
        engine.manager._lookup_wait = 0.3
        assert engine.manager.lookup(a, context("lookup", a)) is LookupResult.RETRY
        eventually(lambda: engine.lookup(a) is LookupResult.MISS)
        # As long as the service's `timeout` says, and never again.
        assert engine.store(key("b")) == 0
        started = time.monotonic()
        for _ in range(100):
            assert engine.lookup(a) is LookupResult.MISS
            assert engine.store(key("b")) == 0
            end_step(engine.manager)
            engine.manager.get_stats()
        assert time.monotonic() - started < 60, "a time-out a turn is more"
        os.kill(service.process.pid, signal.SIGCONT)
        eventually(lambda: hits(engine, a))
        end_step(engine.manager)
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
        engine.close()


def hits(engine: World, each: OffloadKey) -> bool:
    """Whether a block is found, in a step of its own if it is not."""
    if engine.lookup(each) is LookupResult.HIT:
        return True
    end_step(engine.manager)
    return False


def eventually(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
