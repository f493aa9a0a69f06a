"""The plug-in as LMCache's StorageManager loads and drives it, and as a restart finds it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import forks
import kvdepot
import pytest
from lmcache.v1.event_manager import EventManager, EventType
from lmcache.v1.storage_backend.storage_manager import StorageManager

from . import pipelines
from .conftest import Chunks, Engine, pinned


def put(manager: Any, chunks: Chunks, keys: list[Any]) -> None:
    manager.batched_put(keys, [chunks.chunk(manager.allocator_backend, key) for key in keys])
    end = time.monotonic() + 30
    for backend in manager.storage_backends.values():
        while any(backend.exists_in_put_tasks(key) for key in keys):
            assert time.monotonic() < end
            time.sleep(0.001)


def check_all(manager: Any, chunks: Chunks, keys: list[Any], location: str = "dax") -> None:
    most = pinned(len(keys))
    for part in (keys[at : at + most] for at in range(0, len(keys), most)):
        for key, chunk in zip(part, manager.batched_get(part, location=location), strict=True):
            chunks.check(key, chunk)


@pytest.mark.parametrize("name", ["dax", "kv.store"])
def test_the_sample_configuration_works_under_any_name(
    engine: Engine, chunks: Chunks, caplog: pytest.LogCaptureFixture, name: str
):
    manager = engine.manager(
        name=name, store_location=name, retrieve_locations=["LocalCPUBackend", name]
    )
    assert manager.list_backends()[name] == "KvdepotBackend"
    keys = chunks.keys(8)
    put(manager, chunks, keys)
    assert manager.contains(keys[0]) == name
    assert manager.batched_contains([*keys, chunks.key()]) == (8, {name: keys})
    check_all(manager, chunks, keys, name)
    chunks.check(keys[0], manager.get(keys[0]))
    assert manager.memcheck()
    assert not [line for line in caplog.messages if "does not contain the storage plug-in" in line]


@pytest.mark.parametrize(
    ("option", "value", "effect"),
    [
        ("store_location", "LocalCPUBackend", "stores nothing"),
        ("retrieve_locations", ["LocalCPUBackend", "KvdepotBackend"], "finds nothing"),
    ],
)
def test_a_location_that_leaves_the_plug_in_out_is_reported(
    engine: Engine, caplog: pytest.LogCaptureFixture, option: str, value: object, effect: str
):
    engine.manager(name="depot", **{option: value})
    [line] = [line for line in caplog.messages if "does not contain the storage plug-in" in line]
    assert option in line
    assert repr(value) in line
    assert "'depot'" in line
    assert effect in line


def test_a_restore_fills_lmcaches_hot_cache(engine: Engine, chunks: Chunks):
    manager = engine.manager(local_cpu=True)
    keys = chunks.keys(4)
    put(manager, chunks, keys)
    manager.clear(["LocalCPUBackend"])
    assert manager.contains(keys[0]) == "dax"
    check_all(manager, chunks, keys)
    assert manager.contains(keys[0]) == "LocalCPUBackend"


def test_layers_are_restored_one_by_one(engine: Engine, chunks: Chunks):
    from lmcache.v1.memory_management import MemoryFormat

    manager = engine.manager(use_layerwise=True)
    layers = [key.split_layers(2) for key in chunks.keys(3)]
    by_layer = [[split[layer] for split in layers] for layer in range(2)]
    for keys in by_layer:
        made = [
            chunks.chunk(
                manager.allocator_backend, key, fmt=MemoryFormat.KV_T2D, shape=(64, 2, 128)
            )
            for key in keys
        ]
        manager.batched_put(keys, made)
    for keys, task in zip(
        by_layer, manager.layerwise_batched_get(by_layer, location="dax"), strict=True
    ):
        for key, chunk in zip(keys, task.result(timeout=30), strict=True):
            chunks.check(key, chunk)


def test_lookup_and_prefetch_answer_the_prefix(engine: Engine, chunks: Chunks):
    manager = engine.manager(enable_async_loading=True)
    answers: list[tuple[str, int]] = []

    class Server:
        def send_response_to_scheduler(self, lookup: str, tokens: int) -> None:
            answers.append((lookup, tokens))

    manager.async_lookup_server = Server()
    keys = chunks.keys(4)
    put(manager, chunks, [keys[0], keys[1], keys[3]])
    lookup = manager.async_lookup_and_prefetch("id", keys, [0, 64, 128, 192, 256], pin=True)
    asyncio.run_coroutine_threadsafe(lookup, manager.loop).result(timeout=30)
    until = time.monotonic() + 30
    while not answers and time.monotonic() < until:
        time.sleep(0.01)
    [restored] = manager.event_manager.pop_event(EventType.LOADING, "id").result()
    assert [key for key, _ in restored] == keys[:2]
    for key, chunk in restored:
        chunks.check(key, chunk)
    manager.batched_unpin(keys)
    assert answers == [("id", 128)]
    assert manager.storage_backends["dax"].batched_remove(keys, force=False) == 3


@pytest.mark.pipelines(pipelines.DEFAULT)  # of the settings that LMCache's own backend has
def test_wrong_settings_are_in_lmcaches_log(engine: Engine, caplog: pytest.LogCaptureFixture):
    manager = engine.manager(extra={"dax.restore_worker": 2})
    assert "dax" not in manager.list_backends()
    [line] = [line for line in caplog.messages if "Failed to create backend" in line]
    assert "dax.restore_worker" in line
    assert "'restore_workers'" in line


# ---- several processes and restarts ------------------------------------------------------------


def test_everything_is_there_after_a_restart(engine: Engine, chunks: Chunks):
    manager = engine.manager()
    keys = chunks.keys(100)
    put(manager, chunks, keys)
    manager.close()
    check_all(engine.manager(), chunks, keys)


def test_closing_at_once_waits_for_what_is_being_put(engine: Engine, chunks: Chunks):
    # LMCache closes its memory first.
    manager = engine.manager(cpu_mib=64)
    keys = chunks.keys(500)
    manager.batched_put(keys, [chunks.chunk(manager.allocator_backend, key) for key in keys])
    manager.close()
    check_all(engine.manager(cpu_mib=64), chunks, keys)


@pytest.mark.pipelines(pipelines.DEFAULT)  # of the settings that LMCache's own backend has
def test_plug_ins_beside_each_other_have_names_and_settings_of_their_own(
    engine: Engine, chunks: Chunks, tmp_path: Path
):
    extra = {
        "storage_plugin.far.module_path": "kvdepot.lmcache",
        "storage_plugin.far.class_name": "KvdepotBackend",
        "storage_plugin.far.dax.device_path": str(tmp_path / "far"),
        "storage_plugin.far.kvdepot.socket": str(tmp_path / "far.sock"),
    }
    config = engine.config(name="near", extra=extra)
    config.storage_plugins = ["near", "far"]
    for _restart in range(2):
        manager = StorageManager(config, engine.metadata(), EventManager())
        try:
            plugins = {name: manager.storage_backends[name] for name in ("near", "far")}
            assert {name: str(plugin) for name, plugin in plugins.items()} == {
                "near": "near",
                "far": "far",
            }
            paths = {name: plugin._depot.path for name, plugin in plugins.items()}
            assert paths == {"near": str(tmp_path / "arena"), "far": str(tmp_path / "far")}
        finally:
            manager.close()


PUT_AND_DIE = """
    import os, signal, sys
    from pathlib import Path
    from lmcache_tests.conftest import Chunks, Engine

    folder, pipeline, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    manager, chunks = Engine(folder, pipeline).manager(), Chunks()
    keys = chunks.keys(count)
    manager.batched_put(keys, [chunks.chunk(manager.allocator_backend, key) for key in keys])
    while any(map(manager.storage_backends["dax"].exists_in_put_tasks, keys)):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def put_and_die(folder: Path, pipeline: str, count: int) -> None:
    """Another process stores the first chunks and is killed."""
    packages = folder / "packages"
    packages.mkdir()
    (packages / "lmcache_tests").symlink_to(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {str(packages)!r})\n{textwrap.dedent(PUT_AND_DIE)}"
    died = subprocess.run(
        [*forks.command(), "-c", program, str(folder), pipeline, str(count)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr


def test_a_killed_process_loses_no_chunk_that_was_stored(
    engine: Engine, chunks: Chunks, tmp_path: Path
):
    put_and_die(tmp_path, engine.pipeline, 100)
    check_all(engine.manager(), chunks, chunks.keys(100))


@pytest.mark.pipelines(*pipelines.ARENAS)  # any number may open a directory
def test_a_second_opener_is_told_of_the_first(
    engine: Engine, chunks: Chunks, caplog: pytest.LogCaptureFixture
):
    alone = {"kvdepot.socket": "off"}
    first = engine.manager(extra=alone)
    keys = chunks.keys(4)
    put(first, chunks, keys)
    second = engine.manager(extra=alone)
    assert "dax" not in second.list_backends()
    [line] = [line for line in caplog.messages if "Failed to create backend" in line]
    assert str(os.getpid()) in line
    check_all(first, chunks, keys)


@pytest.mark.parametrize("socket", ["named", "auto"])
def test_ranks_share_an_arena_and_have_chunks_of_their_own(
    engine: Engine, chunks: Chunks, socket: str
):
    extra = {} if socket == "named" else {"kvdepot.socket": None}
    keys = [[chunks.key(rank, 2, chunk_hash=hash_) for hash_ in (5, 6, 7)] for rank in (0, 1)]
    for _ in range(2):  # and after a restart
        ranks = [engine.manager(rank, 2, extra=extra) for rank in (0, 1)]
        for manager, own in zip(ranks, keys, strict=True):
            assert manager.list_backends()["dax"] == "KvdepotBackend"
            put(manager, chunks, own)
            check_all(manager, chunks, own)
        for manager in reversed(ranks):
            manager.close()


def test_the_scheduler_finds_what_the_worker_stores(engine: Engine, chunks: Chunks):
    worker, scheduler = engine.manager(), engine.manager(role="scheduler")
    keys = chunks.keys(3)
    assert scheduler.batched_contains(keys) == (0, {})
    put(worker, chunks, keys)
    assert scheduler.batched_contains([*keys, chunks.key()], pin=True) == (3, {"dax": keys})
    assert worker.storage_backends["dax"].batched_remove(keys) == 3  # unpublished, kept
    scheduler.batched_unpin(keys)


def test_another_process_may_die_in_the_middle(engine: Engine, chunks: Chunks, tmp_path: Path):
    first = engine.manager()
    keys = chunks.keys(100)
    put(first, chunks, keys[:50])
    put_and_die(tmp_path, engine.pipeline, 100)
    check_all(first, chunks, keys)


@pytest.mark.pipelines(pipelines.DEFAULT)  # the service has its own
def test_a_running_service_serves_every_rank(engine: Engine, chunks: Chunks, tmp_path: Path):
    socket, dax = str(tmp_path / "service"), {"path": str(tmp_path / "own"), "capacity": "64MiB"}
    # The keys that `Engine.config` has for an arena of its own are the service's here.
    none = dict.fromkeys(["dax.device_path", "dax.max_dax_size", "kvdepot.lock_wait"])
    extra = {**none, "kvdepot.socket": None, "kvdepot.path": f"unix:{socket}"}
    with kvdepot.open("Dax", {"dax": dax, "socket": socket}) as service:
        ranks = [engine.manager(rank, 2, extra=extra) for rank in (0, 1)]
        for rank, manager in enumerate(ranks):
            keys = chunks.keys(8, rank=rank, world=2)
            put(manager, chunks, keys)
            check_all(manager, chunks, keys)
        # The layout, too.
        assert service.stats()["tiers"]["Dax"]["blocks"] == 16 + 1
        for manager in ranks:
            manager.close()


def test_the_scheduler_looks_up_without_memory(engine: Engine, chunks: Chunks):
    keys = chunks.keys(3)
    worker = engine.manager()
    put(worker, chunks, keys)
    worker.close()
    scheduler = engine.manager(role="scheduler")
    assert scheduler.list_backends() == {"dax": "KvdepotBackend"}
    assert scheduler.batched_contains([*keys, chunks.key()], pin=True) == (3, {"dax": keys})
    scheduler.batched_unpin(keys)
    assert scheduler.get(keys[0]) is None


@pytest.mark.pipelines(pipelines.DEFAULT)  # of the settings that LMCache's own backend has
def test_two_devices_are_one_tier_and_both_are_there_again(engine: Engine, chunks: Chunks):
    devices = [
        {"device_path": str(engine.folder / name), "max_dax_size_gb": 0.03125} for name in "ab"
    ]
    both = {"dax.device_path": None, "dax.max_dax_size": None, "dax.devices": devices}
    manager = engine.manager(extra=both, cpu_mib=64)
    keys = chunks.keys(600)  # more than one of them holds
    for at in range(0, 600, 100):
        put(manager, chunks, keys[at : at + 100])
    check_all(manager, chunks, keys)
    manager.close()
    check_all(engine.manager(extra=both, cpu_mib=64), chunks, keys)
