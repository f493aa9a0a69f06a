"""Many tasks behind one descriptor, and what is there and what left."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

import kvdepot
import pytest
from helpers import is_refused_in_a_child

BLOCK = 8192
Keys = Callable[[int], list[bytes]]


def readable(completions: kvdepot.Completions, timeout_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(completions.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_ms))


def drained(completions: kvdepot.Completions, count: int) -> list[tuple[Any, Any]]:
    ended: list[tuple[Any, Any]] = []
    while len(ended) < count:
        assert readable(completions, 60_000)
        ended += completions.drain()
    return ended


def test_every_task_comes_once_with_its_tag_and_its_outcomes(
    ns: kvdepot.Namespace, keys: Keys
) -> None:
    done = kvdepot.Completions()
    names = [keys(3) for _ in range(20)]
    for index, some in enumerate(names):
        done.add(ns.put(some, [os.urandom(BLOCK) for _ in some]), ("put", index))
    ended = drained(done, 20)
    assert sorted(tag for tag, _ in ended) == [("put", index) for index in range(20)]
    assert all(ok == [True] * 3 for _, ok in ended)
    assert not readable(done)
    target = bytearray(BLOCK)
    done.add(ns.get([names[4][0], b"-" * 32], [target, bytearray(BLOCK)]), "get")
    assert drained(done, 1) == [("get", [True, False])]


def test_a_task_that_has_ended_is_there_at_once(ns: kvdepot.Namespace, keys: Keys) -> None:
    done = kvdepot.Completions()
    task = ns.put(keys(1), [bytes(BLOCK)])
    task.wait()
    done.add(task, None)
    done.post("tag", [True, False])
    assert done.drain() == [(None, [True]), ("tag", [True, False])]


def test_the_descriptor_stays_readable_for_who_resets_it(ns: kvdepot.Namespace) -> None:
    done = kvdepot.Completions()
    done.post(1, [])
    assert done.drain(clear=False) == [(1, [])]
    assert readable(done)
    os.eventfd_read(done.fileno())
    assert not readable(done)


def test_buffers_are_let_go_when_the_task_is_drained(ns: kvdepot.Namespace, keys: Keys) -> None:
    done = kvdepot.Completions()
    source = bytearray(BLOCK)
    done.add(ns.put(keys(1), [source]), None)
    drained(done, 1)
    source.append(0)  # refused while somebody holds the buffer


def test_closed_completions_refuse_and_the_task_goes_on(ns: kvdepot.Namespace, keys: Keys) -> None:
    done = kvdepot.Completions()
    some = keys(1)
    task = ns.put(some, [bytes(BLOCK)])
    done.add(task, None)
    done.close()
    for call in (done.fileno, lambda: done.add(task, None), lambda: done.post(None, [])):
        with pytest.raises(kvdepot.ClosedError):
            call()
    assert done.drain() == []
    done.close()
    assert task.wait(60) == [True]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(ns: kvdepot.Namespace) -> None:
    done = kvdepot.Completions()
    assert is_refused_in_a_child(done.drain)


def test_namespaces_keys_and_what_is_gone(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    assert depot.removed_blocks() == ([], False)
    some = keys(3)
    assert ns.put(some, [bytes(BLOCK)] * 3).wait(60) == [True] * 3
    assert ns.blocks() == sorted((key, BLOCK) for key in some)
    rows = {digest: (text, blocks, size) for digest, text, blocks, size in depot.namespaces()}
    text, blocks, size = rows[ns.digest]
    assert text is not None
    assert text.startswith("model=m ")
    assert (blocks, size) == (3, 3 * BLOCK)
    ns.remove(some[:1])
    assert depot.removed_blocks() == ([(ns.digest, some[0], BLOCK)], False)
    assert depot.removed_blocks() == ([], False)
