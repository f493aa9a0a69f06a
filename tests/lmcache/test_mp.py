"""Both surfaces of the multi-process mode, through the classes that LMCache makes of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvdepot
import pytest
import torch

from . import mp, pipelines
from .mp import CHUNK_BYTES, Caller, Host


@pytest.fixture(params=list(mp.SURFACES))
def host(request: pytest.FixtureRequest, tmp_path: Path, pipeline: str) -> Iterator[Host]:
    host = Host(request.param, tmp_path, pipeline)
    yield host
    host.close()


@pytest.fixture
def caller(host: Host) -> Caller:
    return host.adapter()


def test_lmcache_makes_it_with_three_descriptors(caller: Caller):
    adapter = caller.adapter
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert adapter.report_status()["is_healthy"]


def test_chunks_come_back_where_they_were_asked(caller: Caller):
    names = mp.keys(range(8))
    result = caller.store([name for at, name in enumerate(names) if at not in (0, 3, 7)])
    assert result.is_successful()
    assert result.bytes_transferred() == 5 * CHUNK_BYTES
    holes = [at not in (0, 3, 7) for at in range(8)]
    assert caller.has(names) == holes
    assert caller.load(names) == holes


def test_a_result_is_given_once(caller: Caller):
    names = mp.keys(range(2))
    adapter = caller.adapter
    number = adapter.submit_store_task(names, mp.chunks(names))
    assert caller.stored(number).is_successful()
    assert adapter.pop_completed_store_tasks() == {}
    number = adapter.submit_lookup_and_lock_task(names, {})
    assert caller.looked_up(number, 2) == [True, True]
    assert adapter.query_lookup_and_lock_result(number) is None
    number = adapter.submit_load_task(names, [mp.blank() for _ in names])
    assert caller.loaded(number, 2) == [True, True]
    assert adapter.query_load_result(number) is None


def test_several_lookups_and_loads_in_flight_are_all_answered(caller: Caller):
    names = mp.keys(range(40))
    assert caller.store(names).is_successful()
    adapter = caller.adapter
    targets = [mp.blank() for _ in names]
    kinds = [
        (
            adapter.get_lookup_and_lock_event_fd(),
            adapter.query_lookup_and_lock_result,
            [adapter.submit_lookup_and_lock_task(names[at : at + 4], {}) for at in range(0, 40, 4)],
        ),
        (
            adapter.get_load_event_fd(),
            adapter.query_load_result,
            [
                adapter.submit_load_task(names[at : at + 4], targets[at : at + 4])
                for at in range(0, 40, 4)
            ],
        ),
    ]
    for fd, query, numbers in kinds:
        left = set(numbers)

        def ask(query: Any = query, left: set[int] = left) -> bool | None:
            for number in list(left):
                if (bitmap := query(number)) is not None:
                    assert bitmap.popcount() == 4
                    left.remove(number)
            return None if left else True

        assert caller.until(fd, ask)
    for name, target in zip(names, targets, strict=True):
        assert torch.equal(target.raw_data, mp.content(name))


def test_every_field_of_a_key_is_part_of_the_identity(caller: Caller):
    base = mp.key(1)
    others = [
        mp.key(1, model_name="org/other"),
        mp.key(1, kv_rank=0x02000200),
        mp.key(1, object_group_id=3),
        mp.key(1, cache_salt="tenant"),
        mp.key(1, chunk_hash=base.chunk_hash[:16]),
        mp.key(1, chunk_hash=base.chunk_hash + b"\0"),
        mp.key(1, chunk_hash=b""),
        mp.key(1, model_name=""),
        mp.key(1, model_name="modèle/模型"),
    ]
    assert caller.store([base]).is_successful()
    assert not any(caller.has(others))
    # One batch of all of them: nine namespaces, and the answers in the order of the keys.
    assert caller.store(others).is_successful()
    assert all(caller.load([*others, base]))


@pytest.mark.parametrize("size", [1, 17, 4096, CHUNK_BYTES - 3, (1 << 20) + 1])
def test_tails_of_any_length_share_a_batch_with_full_chunks(caller: Caller, size: int):
    full, tail = mp.keys(range(2))
    assert caller.store([full, tail], [mp.chunk(full), mp.chunk(tail, size)]).is_successful()
    assert caller.load([tail, full], [mp.blank(size), mp.blank()]) == [True, True]


def test_another_length_is_a_miss(caller: Caller):
    names = mp.keys(range(3))
    assert caller.store(names).is_successful()
    targets = [mp.blank(), mp.blank(CHUNK_BYTES * 2), mp.blank(CHUNK_BYTES // 2)]
    assert caller.load(names, targets) == [True, False, False]


def test_a_chunk_larger_than_the_arena_is_refused_and_leaves_no_key(caller: Caller):
    small, large = mp.keys(range(2))
    assert not caller.store([large], [mp.blank(2 * mp.ARENA_BYTES)]).is_successful()
    assert caller.has([large]) == [False]
    assert caller.store([small]).is_successful()
    assert caller.load([small]) == [True]


def test_a_full_arena_makes_room_and_what_it_serves_is_right(caller: Caller):
    # Each call stores less than an eighth of the arena.
    for begin in range(0, 1000, 50):
        assert caller.store(mp.keys(range(begin, begin + 50))).is_successful()
    # Alone: a call for all has used the older blocks too, and later.
    newest = caller.load(mp.keys(range(900, 1000)))
    assert [number for number, loaded in enumerate(newest, 900) if not loaded] == []
    there = caller.load(mp.keys(range(1000)))
    assert any(there)
    assert not all(there)


def test_a_store_while_another_stores_the_same_shares_its_outcome(caller: Caller):
    names = mp.keys(range(32))
    sources = [mp.chunks(names) for _ in range(4)]
    numbers = [caller.adapter.submit_store_task(names, source) for source in sources]
    done: dict[int, bool] = {}
    while len(done) < 4:
        caller.until(
            caller.adapter.get_store_event_fd(),
            lambda: (done.update(caller.adapter.pop_completed_store_tasks()), True)[1],
        )
    assert sorted(done) == sorted(numbers)
    assert all(result.is_successful() for result in done.values())
    assert all(caller.load(names))


def test_threads_store_look_up_load_and_delete_at_once(caller: Caller):
    # As in LMCache: one thread a kind of call, each with its descriptor.
    names = mp.keys(range(200))
    steps = [names[at : at + 20] for at in range(0, 200, 20)]
    stored = threading.Semaphore(0)

    def store() -> None:
        for step in steps:
            assert caller.store(step).is_successful()
            stored.release()

    def prefetch() -> None:
        for step in steps:
            assert stored.acquire(timeout=60)
            assert all(caller.lookup(step))
            assert all(caller.load(step))
            caller.unlock(step)

    def delete() -> None:
        for number in range(1000, 1100):
            caller.adapter.delete([mp.key(number)])

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work) for work in (store, prefetch, delete)]:
            future.result(timeout=120)


def test_delete_forgets_and_the_room_is_used_again(caller: Caller):
    names = mp.keys(range(10))
    for _ in range(3):
        assert caller.store(names).is_successful()
        caller.adapter.delete(names)
        assert not any(caller.has(names))
    caller.adapter.delete(names)
    assert caller.adapter.get_usage().bytes_by_cache_salt == {}


def test_a_delete_during_a_load_takes_its_room_only_afterwards(caller: Caller):
    names = mp.keys(range(400))
    for begin in range(0, 400, 40):
        assert caller.store(names[begin : begin + 40]).is_successful()
    for begin in range(0, 400, 40):
        some, targets = names[begin : begin + 40], [mp.blank() for _ in range(40)]
        number = caller.adapter.submit_load_task(some, targets)
        caller.adapter.delete(some)
        # Into the room of those that went, if it were free too early.
        caller.store(mp.keys(range(1000 + begin, 1040 + begin)))
        found = caller.loaded(number, 40)
        for name, target, ok in zip(some, targets, found, strict=True):
            assert not ok or torch.equal(target.raw_data, mp.content(name))
    assert not any(caller.has(names))


def test_everything_is_there_after_a_restart(host: Host, caller: Caller):
    names = [*mp.keys(range(20)), *mp.keys(range(20), cache_salt="tenant")]
    assert caller.store(names).is_successful()
    host.close(caller)
    again = host.adapter()
    assert all(again.has(names))
    assert all(again.load(names))


def test_both_surfaces_serve_each_others_chunks(tmp_path: Path, pipeline: str):
    names = [*mp.keys(range(5)), *mp.keys(range(5), cache_salt="s", object_group_id=17)]
    native, adapter = (Host(surface, tmp_path, pipeline) for surface in ("native", "adapter"))
    for writer, reader in ((native, adapter), (adapter, native)):
        caller = writer.adapter()
        assert caller.store(names).is_successful()
        writer.close(caller)
        caller = reader.adapter()
        assert all(caller.load(names))
        caller.adapter.delete(names)
        reader.close(caller)


@pytest.mark.pipelines(*pipelines.ARENAS)  # any number may open a directory
def test_a_second_opener_of_the_same_arena_is_refused(host: Host, caller: Caller):
    # LMCache's own backend lets it in, and it reads the other's bytes as its own.
    with pytest.raises(kvdepot.LockedError, match=str(os.getpid())):
        host.adapter(socket=str(host.folder / "other"))
    assert caller.store([mp.key(1)]).is_successful()
    assert caller.load([mp.key(1)]) == [True]


def test_a_failed_init_leaks_no_descriptor(host: Host, descriptors: Any):
    with pytest.raises(kvdepot.ConfigError):
        host.adapter(max_dax_size=-1)
    before = descriptors()
    for _ in range(5):
        with pytest.raises(kvdepot.ConfigError):
            host.adapter(max_dax_size=-1)
        with pytest.raises(kvdepot.ConfigError):
            host.adapter(device_path="/nowhere/at/all")
    assert not descriptors() - before


def test_corrupt_chunks_are_misses_and_harm_no_other_buffer(host: Host, caller: Caller):
    # LMCache's own backend gives all buffers of a batch back when one region fails, while others
    # still write into them.
    names = mp.keys(range(64))
    assert caller.store(names).is_successful()
    host.close(caller)  # with what it has in memory
    rotten = [7, 8, 40]
    for at in rotten:
        content = mp.content(names[at]).numpy().tobytes()
        pipelines.damage(host.folder, content, CHUNK_BYTES // 2, b"rot")
    caller = host.adapter()
    bystander = torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8)
    targets = [mp.blank() for _ in names]
    assert caller.load(names, targets) == [at not in rotten for at in range(64)]
    assert bool((bystander == 7).all())
    # Rot is unpublished: the next store writes it again.
    assert caller.has([names[7]]) == [False]
    assert caller.store([names[at] for at in rotten]).is_successful()
    assert all(caller.load(names))


def test_close_waits_for_what_is_under_way_and_refuses_the_rest(host: Host, caller: Caller):
    names = mp.keys(range(100))
    assert caller.store(names).is_successful()
    more = mp.keys(range(100, 200))
    sources, targets = mp.chunks(more), [mp.blank() for _ in names]
    adapter = caller.adapter
    adapter.submit_store_task(more, sources)
    adapter.submit_load_task(names, targets)
    host.close(caller)
    after = [target.raw_data.clone() for target in targets]
    for source in sources:
        source.raw_data.zero_()
    with pytest.raises(kvdepot.ClosedError):
        adapter.submit_store_task(more, sources)
    with pytest.raises(kvdepot.ClosedError):
        adapter.submit_load_task(names, targets)
    # No lane writes after the close, and no lane read what was zeroed since.
    assert all(torch.equal(a, b.raw_data) for a, b in zip(after, targets, strict=True))
    again = host.adapter()
    assert all(again.load(names + more))


@pytest.mark.pipelines(pipelines.DEFAULT)  # the service has its own
def test_two_servers_share_the_depot_of_a_service(host: Host, tmp_path: Path):
    names = mp.keys(range(20))
    settings = {
        "dax": {"path": str(tmp_path / "shared"), "capacity": mp.ARENA_BYTES},
        "socket": str(tmp_path / "service"),
    }
    with kvdepot.open("Dax", settings):
        params = {"path": f"unix:{tmp_path / 'service'}", "device_path": None}
        params |= {"max_dax_size": None, "socket": None, "lock_wait": None}
        one, other = host.adapter(**params), host.adapter(**params)
        assert one.store(names).is_successful()
        assert all(other.load(names))
        other.adapter.delete(names[:5])
        assert one.load(names) == [False] * 5 + [True] * 15
        host.close(one)
        assert all(other.load(names[5:]))
        host.close(other)
