"""What the Python adapter alone can do: locks, notices, accounting, listing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.distributed.api import ObjectKey

from . import mp, pipelines
from .mp import CHUNK_BYTES, Caller, Heard, Host


@pytest.fixture
def host(tmp_path: Path, pipeline: str) -> Iterator[Host]:
    host = Host("adapter", tmp_path, pipeline)
    yield host
    host.close()


@pytest.fixture
def caller(host: Host) -> Caller:
    return host.adapter()


@pytest.fixture
def heard(caller: Caller) -> Heard:
    heard = Heard()
    caller.adapter.register_listener(heard)
    return heard


def fill(caller: Caller, begin: int, count: int = 700) -> None:
    """Stores more than the arena holds, by calls of less than an eighth of it."""
    for at in range(begin, begin + count, 50):
        assert caller.store(mp.keys(range(at, at + 50))).is_successful()


def test_listeners_hear_of_stores_loads_and_deletes(caller: Caller, heard: Heard):
    names = mp.keys(range(4))
    caller.store(names)
    assert heard.stored == [(name, CHUNK_BYTES) for name in names]
    caller.load(names[:2])
    assert heard.accessed == names[:2]
    caller.adapter.delete(names[1:3])
    assert sorted(heard.deleted, key=str) == sorted(names[1:3], key=str)


def test_a_chunk_stored_again_counts_nothing(caller: Caller, heard: Heard):
    names = mp.keys(range(2))
    caller.store(names)
    assert caller.store(names).bytes_transferred() == 0
    assert [size for _, size in heard.stored] == [CHUNK_BYTES, CHUNK_BYTES, 0, 0]
    deadline = time.monotonic() + 60  # A directory is looked through now and then.
    while sum(caller.adapter.get_usage().bytes_by_cache_salt.values()) != 2 * CHUNK_BYTES:
        time.sleep(0.05)
        assert time.monotonic() < deadline


def test_locks_are_counted_and_delete_skips_what_is_locked(caller: Caller, heard: Heard):
    names = mp.keys(range(3))
    caller.store(names)
    assert all(caller.lookup(names[:2]))
    assert all(caller.lookup(names[:1]))
    assert caller.adapter.report_status()["locked_key_count"] == 2
    caller.adapter.delete(names)
    assert heard.deleted == names[2:]
    caller.unlock(names[:2])
    caller.adapter.delete(names)
    assert set(heard.deleted) == set(names[1:])
    assert caller.load(names) == [True, False, False]
    caller.unlock(names[:1])
    caller.adapter.delete(names)
    assert caller.has(names) == [False] * 3


def test_unlock_of_what_is_not_locked_does_nothing(caller: Caller):
    names = mp.keys(range(2))
    caller.unlock(names)
    caller.store(names)
    caller.lookup(names[:1])
    for _ in range(3):
        caller.unlock(names)
    assert caller.adapter.report_status()["locked_key_count"] == 0


@pytest.mark.pipelines(*pipelines.ARENAS)  # a pin is an open file there, whose name may go
def test_what_is_locked_outlives_any_number_of_stores(caller: Caller):
    locked = mp.keys(range(10))
    caller.store(locked)
    assert all(caller.lookup(locked))
    fill(caller, 1000)
    assert all(caller.load(locked))
    caller.unlock(locked)
    fill(caller, 5000)
    assert not any(caller.has(locked))


@pytest.mark.pipelines(*pipelines.ARENAS)  # a pin is an open file there, whose name may go
def test_with_all_locked_a_store_fails_and_old_chunks_are_served(
    caller: Caller, caplog: pytest.LogCaptureFixture
):
    names: list[ObjectKey] = []
    while caller.store(more := mp.keys(range(len(names), len(names) + 50))).is_successful():
        assert all(caller.lookup(more))
        names += more
        assert len(names) < 2000
    with caplog.at_level(logging.WARNING, "kvdepot.lmcache"):
        assert not caller.store(mp.keys(range(9000, 9050))).is_successful()
    assert "not stored: full" in caplog.text
    assert all(caller.load(names))


@pytest.mark.pipelines(*pipelines.ARENAS)  # others evict from a directory, too
def test_evictions_are_told_and_counted(caller: Caller, heard: Heard):
    fill(caller, 0)
    # A thread of the depot goes on to free space for the next store, also during these lookups.
    for _ in range(100):
        usage = caller.adapter.get_usage()
        left = {name for name, _ in heard.stored} - set(heard.deleted)
        there = [name for name in mp.keys(range(700)) if caller.has([name]) == [True]]
        if left == set(there):
            break
    assert left == set(there)
    assert heard.deleted
    assert usage.bytes_by_cache_salt == {"": len(there) * CHUNK_BYTES}
    assert usage.total_bytes_used >= len(there) * CHUNK_BYTES
    assert usage.total_bytes_used <= usage.total_capacity_bytes


def test_usage_by_salt_is_right_also_after_a_restart(host: Host, caller: Caller):
    counts = {"": 3, "alice": 5, "bob": 1}
    for salt, count in counts.items():
        caller.store(mp.keys(range(count), cache_salt=salt))
    caller.adapter.delete([mp.key(0, cache_salt="alice")])
    expected = {"": 3 * CHUNK_BYTES, "alice": 4 * CHUNK_BYTES, "bob": CHUNK_BYTES}

    def holds(adapter: Any) -> None:
        deadline = time.monotonic() + 60  # A directory is looked through now and then.
        while dict(adapter.get_usage().bytes_by_cache_salt) != expected:
            assert host.pipeline not in pipelines.ARENAS
            assert time.monotonic() < deadline
            time.sleep(0.01)

    holds(caller.adapter)
    host.close(caller)
    again = host.adapter().adapter
    holds(again)
    again.delete(mp.keys(range(5), cache_salt="alice"))
    del expected["alice"]
    holds(again)


def test_a_listener_after_a_restart_hears_what_is_there(host: Host, caller: Caller):
    names = [*mp.keys(range(3)), *mp.keys(range(3), cache_salt="s", kv_rank=7)]
    caller.store(names)
    host.close(caller)
    heard = Heard()
    host.adapter().adapter.register_listener(heard)
    assert set(heard.stored) == {(name, CHUNK_BYTES) for name in names}


def listed(adapter: Any, **options: Any) -> list[ObjectKey]:
    found: list[ObjectKey] = []
    cursor = None
    while True:
        page = adapter.list_l2_keys(cursor=cursor, **options)
        assert len(page.entries) <= options.get("page_size", 500)
        assert all(entry.size_bytes == CHUNK_BYTES for entry in page.entries)
        found += [entry.key.to_object_key() for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            return found


@pytest.mark.parametrize("page_size", [1, 4, 11, 12, 500])
def test_keys_are_listed_in_pages_also_after_a_restart(host: Host, caller: Caller, page_size: int):
    names = [
        *mp.keys(range(5)),
        *mp.keys(range(4), model_name="org/other", object_group_id=2),
        *(mp.key(number, chunk_hash=bytes([number] * 4)) for number in range(3)),
    ]
    caller.store(names)
    # A chunk in two tiers may come on two pages.
    assert set(listed(caller.adapter, page_size=page_size)) == set(names)
    host.close(caller)
    adapter = host.adapter().adapter
    assert sorted(listed(adapter, page_size=page_size), key=str) == sorted(names, key=str)
    other = listed(adapter, page_size=page_size, model_name="org/other")
    assert sorted(other, key=str) == sorted(names[5:9], key=str)


@pytest.mark.pipelines(pipelines.DEFAULT)  # a chunk in two tiers comes twice
def test_a_listing_reads_each_chunk_once(caller: Caller):
    names = [*mp.keys(range(40)), *mp.keys(range(30), cache_salt="s")]
    caller.store(names)
    rows = []

    class Counting:
        def __init__(self, namespace: Any) -> None:
            self.namespace = namespace

        def blocks_page(self, *arguments: Any) -> Any:
            page = self.namespace.blocks_page(*arguments)
            rows.extend(page[0])
            return page

    for space in caller.adapter._store.spaces():
        space.namespace = Counting(space.namespace)
    assert sorted(listed(caller.adapter, page_size=3), key=str) == sorted(names, key=str)
    assert len(rows) == len(names)


def test_nonsense_asked_of_a_listing_is_refused(caller: Caller):
    for wrong in ({"page_size": 0}, {"cursor": "zz"}, {"cursor": "00"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            caller.adapter.list_l2_keys(**wrong)


def test_more_salts_than_the_directory_has_entries(
    host: Host, caller: Caller, few_descriptors: None
):
    names = [mp.key(1, cache_salt=f"tenant{number}") for number in range(300)]
    assert caller.store(names).is_successful()
    host.close(caller)
    again = host.adapter()
    assert all(again.load(names))
    assert len(again.adapter.get_usage().bytes_by_cache_salt) == 300
    assert len(listed(again.adapter)) == 300


@pytest.mark.pipelines(*pipelines.ARENAS)  # what leaves a directory is not noted
def test_a_chunk_that_rots_is_told(host: Host, caller: Caller):
    [name] = mp.keys(range(1))
    caller.store([name])
    # With nothing of it in memory.
    host.close(caller)
    caller, heard = host.adapter(), Heard()
    caller.adapter.register_listener(heard)
    pipelines.damage(host.folder, mp.content(name).numpy().tobytes(), 0, b"rot")
    assert caller.lookup([name]) == [True]
    assert caller.load([name]) == [False]
    caller.unlock([name])
    assert caller.adapter.get_usage().bytes_by_cache_salt == {}
    caller.adapter.report_status()
    assert heard.deleted == [name]


def test_unlock_after_the_close_does_nothing(host: Host, caller: Caller):
    names = mp.keys(range(2))
    caller.store(names)
    caller.lookup(names)
    adapter = caller.adapter
    host.close(caller)
    adapter.submit_unlock(names)


@pytest.mark.pipelines(pipelines.DEFAULT)  # the tier behind is not what is read
def test_what_a_reader_still_holds_counts_as_used(caller: Caller):
    names = mp.keys(range(4))
    caller.store(names)
    assert all(caller.lookup(names))
    used = caller.adapter.get_usage().total_bytes_used
    # As rot or another surface of the same depot takes them away.
    store = caller.adapter._store
    store.remove([store.place_object(name) for name in names])
    usage = caller.adapter.get_usage()
    assert (usage.total_bytes_used, usage.bytes_by_cache_salt) == (used, {})
    caller.unlock(names)
    assert caller.adapter.get_usage().total_bytes_used <= used - 4 * CHUNK_BYTES
