"""Restores, puts, removals and the end at once, and the faults that LMCache's DAX backend has."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from . import pipelines
from .conftest import CHUNK_BYTES, Chunks, Engine, pinned

InUse = Callable[[Any], int]


def damage(engine: Engine, chunks: Chunks, key: Any) -> None:
    content = chunks.content(key, torch.Size((2, 2, 64, 128))).numpy().tobytes()
    pipelines.damage(engine.folder, content, 1000, b"\xff\x00\xff\x00")


def test_blocking_and_asynchronous_restores_run_together(
    backend: Any, chunks: Chunks, in_use: InUse
):
    keys = chunks.keys(pinned(64, calls=8))
    chunks.put(backend, keys)

    def blocking() -> list[Any]:
        return [backend.batched_get_blocking(keys) for _ in range(4)]

    async def both() -> list[Any]:
        asynchronous = [backend.batched_get_non_blocking("lookup", keys) for _ in range(4)]
        threads = [asyncio.to_thread(blocking)]
        *restored, others = await asyncio.gather(*asynchronous, *threads)
        return [*restored, *others]

    for restored in asyncio.run(both()):
        for key, chunk in zip(keys, restored, strict=True):
            chunks.check(key, chunk)
    assert in_use(backend) == 0


class Held:
    """Stops a restore where it allocates, until it is let go."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        cpu = backend.get_allocator_backend()
        allocate = cpu.batched_allocate

        def wait_and_allocate(*arguments: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.go.wait(30)
            return allocate(*arguments, **options)

        monkeypatch.setattr(cpu, "batched_allocate", wait_and_allocate)


def test_everything_else_goes_on_during_a_restore(
    backend: Any, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
):
    keys, others = chunks.keys(4), chunks.keys(2)
    chunks.put(backend, keys)
    held = Held(backend, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        restore = pool.submit(backend.batched_get_blocking, keys)
        assert held.reached.wait(30)
        chunks.put(backend, others)
        assert backend.batched_contains(others) == 2
        chunks.check(others[0], backend.get_blocking(others[0]))
        assert backend.remove(others[0])
        held.go.set()
        for key, chunk in zip(keys, restore.result(30), strict=True):
            chunks.check(key, chunk)


def test_a_removal_during_a_restore_frees_the_space_after_it(
    engine: Engine, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
):
    backend = engine.backend()
    keys = chunks.keys(4)
    chunks.put(backend, keys)

    def in_use() -> int:
        return int(backend._depot.stats()["tiers"][pipelines.last(engine.pipeline)]["used_bytes"])

    used = in_use()
    held = Held(backend, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        restore = pool.submit(backend.batched_get_blocking, keys)
        assert held.reached.wait(30)
        assert backend.batched_remove(keys) == 4
        assert backend.batched_contains(keys) == 0
        if engine.pipeline == pipelines.DEFAULT:
            # Pinned: nothing is written where they are. (Else a copy in memory is, or a file.)
            assert in_use() == used
        chunks.put(backend, chunks.keys(200))
        held.go.set()
        for chunk in restore.result(30):
            # Removed before it was read: right, or a miss.
            if chunk is not None:
                chunk.ref_count_down()
    chunks.put(backend, keys)
    for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
        chunks.check(key, chunk)


def test_a_chunk_that_is_removed_while_it_is_put_is_gone(engine: Engine, chunks: Chunks):
    backend = engine.backend(extra={"dax.async_put": True})
    cpu = backend.get_allocator_backend()
    blocked, key = chunks.keys(2)
    go, called = threading.Event(), []

    def hold(_: Any) -> None:
        assert go.wait(30)

    # Puts end in their order: the first one's callback keeps the second unfinished.
    first = backend.batched_submit_put_task(
        [blocked], [chunks.chunk(cpu, blocked)], on_complete_callback=hold
    )
    made = chunks.chunk(cpu, key)
    second = backend.batched_submit_put_task([key], [made], on_complete_callback=called.append)
    assert backend.exists_in_put_tasks(key)
    # The caller's reference, and the one that keeps the bytes until they are read.
    assert made.get_ref_count() == 2
    assert backend.remove(key)
    go.set()
    for future in [*first, *second]:
        future.result(30)
    assert not backend.contains(key)
    assert called == []


def test_put_get_and_remove_at_once_give_right_bytes_or_misses(
    engine: Engine, chunks: Chunks, in_use: InUse
):
    backend = engine.backend(extra={"dax.async_put": True})
    keys = chunks.keys(24)
    until = time.monotonic() + 1.5

    def churn(step: Callable[[], None]) -> int:
        count = 0
        while time.monotonic() < until:
            step()
            count += 1
        return count

    def get() -> None:
        for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
            if chunk is not None:
                chunks.check(key, chunk)

    steps = [lambda: chunks.put(backend, keys), get, get, lambda: backend.batched_remove(keys)]
    with ThreadPoolExecutor(len(steps)) as pool:
        assert all(pool.map(churn, steps))
    backend.close()
    assert in_use(backend) == 0


# ---- the end ---------------------------------------------------------------------------------


def closing(backend: Any) -> threading.Thread:
    closer = threading.Thread(target=backend.close)
    closer.start()
    while not backend._closing:
        time.sleep(0.001)
    return closer


@pytest.mark.parametrize("way", ["blocking", "asynchronous"])
def test_close_waits_for_a_restore(
    backend: Any, chunks: Chunks, monkeypatch: pytest.MonkeyPatch, in_use: InUse, way: str
):
    keys = chunks.keys(4)
    chunks.put(backend, keys)
    held = Held(backend, monkeypatch)

    def restore() -> Any:
        if way == "blocking":
            return backend.batched_get_blocking(keys)
        return asyncio.run(backend.batched_get_non_blocking("lookup", keys))

    with ThreadPoolExecutor(1) as pool:
        restored = pool.submit(restore)
        assert held.reached.wait(30)
        closer = closing(backend)
        closer.join(0.1)
        assert closer.is_alive()
        held.go.set()
        for key, chunk in zip(keys, restored.result(30), strict=True):
            chunks.check(key, chunk)
        closer.join(30)
        assert not closer.is_alive()
    assert in_use(backend) == 0


@pytest.mark.parametrize("async_put", [False, True])
def test_close_waits_for_a_put(engine: Engine, chunks: Chunks, in_use: InUse, async_put: bool):
    backend = engine.backend(extra={"dax.async_put": async_put})
    [key] = keys = chunks.keys(1)
    reached, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        reached.set()
        assert go.wait(30)

    chunk = chunks.chunk(backend.get_allocator_backend(), key)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(backend.batched_submit_put_task, keys, [chunk], None, hold)
        assert reached.wait(30)
        closer = closing(backend)
        closer.join(0.1)
        assert closer.is_alive()
        go.set()
        put.result(30)
        closer.join(30)
        assert not closer.is_alive()
    chunk.ref_count_down()
    assert in_use(backend) == 0
    again = engine.backend()
    chunks.check(key, again.get_blocking(key))


def test_after_close_everything_is_a_miss_and_nothing_raises(
    backend: Any, chunks: Chunks, caplog: pytest.LogCaptureFixture
):
    [key] = keys = chunks.keys(1)
    chunks.put(backend, keys)
    chunk = chunks.chunk(backend.get_allocator_backend(), key)
    assert backend.pin(key)
    backend.close()
    backend.close()
    assert not backend.contains(key)
    assert not backend.pin(key)
    assert not backend.unpin(key)
    assert not backend.remove(key)
    assert backend.batched_contains(keys) == 0
    assert backend.get_blocking(key) is None
    assert backend.batched_get_blocking(keys) == [None]
    assert asyncio.run(backend.batched_get_non_blocking("lookup", keys)) == []
    assert backend.batched_submit_put_task(keys, [chunk]) is None
    assert any("the depot is closed" in line for line in caplog.messages)
    assert chunk.get_ref_count() == 1


# ---- what goes wrong elsewhere -----------------------------------------------------------------


def test_one_bad_block_touches_no_other_buffer(
    engine: Engine,
    chunks: Chunks,
    in_use: InUse,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    # Several parts of a restore are under way at once.
    monkeypatch.setattr("kvdepot.lmcache.storage.PART_BYTES", 8 * CHUNK_BYTES)
    backend = engine.backend()
    keys = chunks.keys(64)
    chunks.put(backend, keys)
    damage(engine, chunks, keys[20])
    # Chunks of somebody else's, around those that the restore gets and gives back.
    cpu = backend.get_allocator_backend()
    others = chunks.keys(16)
    live = [chunks.chunk(cpu, key) for key in others]
    # LMCache warns of chunks that other tests have left, too.
    gc.collect()
    caplog.clear()
    for _ in range(20):
        restored = backend.batched_get_blocking(keys)
        assert [at for at, chunk in enumerate(restored) if chunk is None] == [20]
        for key, chunk in zip(keys, restored, strict=True):
            if chunk is not None:
                chunks.check(key, chunk)
        assert in_use(backend) == len(live)
    for key, chunk in zip(others, live, strict=True):
        chunks.check(key, chunk)
    gc.collect()
    assert not any("garbage collected" in line for line in caplog.messages)  # freed, not found
    # What did not verify is gone, and stored again by the next put.
    assert not backend.contains(keys[20])
    chunks.put(backend, [keys[20]])
    chunks.check(keys[20], backend.get_blocking(keys[20]))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What the call answers; one that never does fails the test and does not hold it up."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert answers, f"no answer in {seconds} s"
    return answers[0]


def test_full_of_chunks_that_can_go_the_memory_serves_a_batch(engine: Engine, chunks: Chunks):
    # What a put reads cannot go: none is under way when the next one begins.
    manager = engine.manager(local_cpu=True, cpu_mib=4, extra={"dax.async_put": False})
    backend, cpu = manager.storage_backends["dax"], manager.allocator_backend
    room = (4 << 20) // CHUNK_BYTES
    wanted = chunks.keys(2)
    for batch in [wanted, *([key] for key in chunks.keys(2 * room))]:
        manager.batched_put(batch, [chunks.chunk(cpu, key) for key in batch])
    assert len(cpu.get_keys()) == room
    restored = within(20, lambda: backend.batched_get_blocking(wanted))
    for key, chunk in zip(wanted, restored, strict=True):
        chunks.check(key, chunk)


def test_full_of_chunks_that_cannot_go_the_rest_are_misses_and_stay_stored(
    engine: Engine, chunks: Chunks, in_use: InUse
):
    backend = engine.backend(cpu_mib=1)
    room = (1 << 20) // CHUNK_BYTES
    keys = chunks.keys(4)
    chunks.put(backend, keys)
    cpu = backend.get_allocator_backend()
    held = [chunks.chunk(cpu, key) for key in chunks.keys(room - 2)]
    restored = within(20, lambda: backend.batched_get_blocking(keys))
    assert [chunk is None for chunk in restored] == [False, False, True, True]
    assert backend.batched_contains(keys) == 4
    for key, chunk in zip(keys[:2], restored, strict=False):
        chunks.check(key, chunk)
    for chunk in held:
        chunk.ref_count_down()
    assert in_use(backend) == 0
    for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
        chunks.check(key, chunk)


@pytest.mark.pipelines(*pipelines.ARENAS)  # a pin is an open file there, whose name may go
def test_a_full_arena_refuses_without_a_leak_and_keeps_what_it_has(
    engine: Engine, chunks: Chunks, in_use: InUse, caplog: pytest.LogCaptureFixture
):
    # What is pinned below has been stored, and what is refused has been said.
    manager = engine.manager(extra={"dax.async_put": False})
    backend = manager.storage_backends["dax"]
    pinned: list[Any] = []
    while not any("not stored: full" in line for line in caplog.messages):
        keys = chunks.keys(64)
        manager.batched_put(keys, [chunks.chunk(manager.allocator_backend, key) for key in keys])
        pinned += [key for key in keys if backend.pin(key)]
        assert len(pinned) * CHUNK_BYTES < 64 << 20
        if not backend.pin(keys[-1]):
            break
        backend.unpin(keys[-1])
    assert in_use(backend) == 0
    for at in range(0, len(pinned), 64):
        keys = pinned[at : at + 64]
        for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
            chunks.check(key, chunk)
