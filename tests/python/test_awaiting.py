"""Tasks are awaited in coroutines."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import kvdepot
import pytest
from helpers import is_refused_in_a_child

Keys = Callable[[int], list[bytes]]
Descriptors = Callable[[], set[tuple[str, str]]]


def test_a_task_is_awaited(ns: kvdepot.Namespace, keys: Keys) -> None:
    async def round_trip() -> tuple[list[bool], list[bool], list[bytearray]]:
        names, out = keys(3), [bytearray(5000) for _ in range(3)]
        put = await ns.put(names, [b"x" * 5000] * 3)
        return put, await ns.get([*names[:2], *keys(1)], out), out

    put, got, out = asyncio.run(round_trip())
    assert put == [True] * 3
    assert got == [True, True, False]
    assert out[:2] == [b"x" * 5000] * 2
    # Its buffers were let go.
    out[0].append(0)


def test_one_that_has_ended_needs_no_loop(ns: kvdepot.Namespace, keys: Keys) -> None:
    task = ns.put(keys(1), [b"x"])
    task.wait(30)
    with pytest.raises(StopIteration) as ended:
        next(task.__await__())
    assert ended.value.value == [True]


def test_many_at_once_share_a_descriptor(
    ns: kvdepot.Namespace, keys: Keys, descriptors: Descriptors
) -> None:
    names = keys(200)
    held = ns.reserve(names, 1)
    # They wait for whoever reserved their keys before.
    tasks = [ns.put([name], [b"x"]) for name in names]

    async def all_of_them() -> list[list[bool]]:
        before = descriptors()
        waits = [asyncio.ensure_future(task) for task in tasks + tasks]
        await asyncio.sleep(0.05)
        assert len(descriptors() - before) <= 1
        assert not any(wait.done() for wait in waits)
        ns.abort([one for one in held if one is not None])
        answers = await asyncio.wait_for(asyncio.gather(*waits), 30)
        assert not descriptors() - before
        return answers

    assert asyncio.run(all_of_them()) == [[True]] * 400


def test_a_cancelled_wait_cancels_no_task(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(2)
    held = [one for one in ns.reserve(names, 1) if one is not None]
    put, other = (ns.put([name], [b"x"]) for name in names)

    async def impatient() -> list[bool]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(put, 0.05)
        ended = asyncio.ensure_future(other)
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(put, 0.05)
        ns.abort(held)
        return await ended

    assert asyncio.run(impatient()) == [True]
    assert put.wait(30) == [True]


@pytest.mark.parametrize("ends", [True, False], ids=["cancelled", "closed meanwhile"])
def test_a_loop_that_was_abandoned_keeps_nothing(
    ns: kvdepot.Namespace, keys: Keys, descriptors: Descriptors, ends: bool
) -> None:
    name = keys(1)
    held = [one for one in ns.reserve(name, 1) if one is not None]
    task = ns.put(name, [b"x"])
    before = descriptors()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(asyncio.wait_for(task, None))
    loop.run_until_complete(asyncio.sleep(0.01))
    if ends:
        waiting.cancel()
        loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    watch = weakref.ref(waiting)
    del waiting, loop
    gc.collect()
    assert watch() is None
    assert not descriptors() - before
    ns.abort(held)
    assert task.wait(30) == [True]


def test_loops_of_several_threads(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(80)
    answers = []

    async def puts(mine: list[bytes]) -> None:
        for name in mine:
            answers.append(await ns.put([name], [b"x" * 1000]))

    threads = [
        threading.Thread(target=lambda part=part: asyncio.run(puts(names[part::4])))
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [[True]] * 80


def test_outside_of_a_loop_it_says_so(ns: kvdepot.Namespace, keys: Keys) -> None:
    name = keys(1)
    held = [one for one in ns.reserve(name, 1) if one is not None]
    task = ns.put(name, [b"x"])
    with pytest.raises(RuntimeError, match="no running event loop"):
        next(task.__await__())
    ns.abort(held)
    task.wait(30)


def test_a_child_does_not_await_its_parents_task(ns: kvdepot.Namespace, keys: Keys) -> None:
    task = ns.put(keys(1), [b"x"])
    task.wait(30)
    assert is_refused_in_a_child(task.__await__)
