"""The storage plug-in alone, over LMCache's CPU memory: what its own DAX backend's tests ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat

from . import pipelines
from .conftest import Chunks, Engine

InUse = Callable[[Any], int]


def test_chunks_come_back_as_they_were(backend: Any, chunks: Chunks, in_use: InUse):
    keys = chunks.keys(16)
    chunks.put(backend, keys)
    assert all(backend.contains(key) for key in keys)
    chunks.check(keys[3], backend.get_blocking(keys[3]))
    for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
        chunks.check(key, chunk)
    assert in_use(backend) == 0


def test_a_miss_is_a_hole_where_it_was_asked(backend: Any, chunks: Chunks, in_use: InUse):
    keys = chunks.keys(6)
    stored = [key for at, key in enumerate(keys) if at not in (0, 3, 5)]
    chunks.put(backend, stored)
    restored = backend.batched_get_blocking(keys)
    assert [chunk is None for chunk in restored] == [True, False, False, True, False, True]
    for key, chunk in zip(keys, restored, strict=True):
        if chunk is not None:
            chunks.check(key, chunk)
    assert backend.get_blocking(keys[0]) is None
    assert in_use(backend) == 0


def test_an_asynchronous_get_stops_at_the_first_miss(backend: Any, chunks: Chunks, in_use: InUse):
    keys = chunks.keys(5)
    chunks.put(backend, [key for key in keys if key is not keys[2]])
    assert backend.batched_contains(keys) == 2
    assert asyncio.run(backend.batched_async_contains("lookup", keys)) == 2
    restored = asyncio.run(backend.batched_get_non_blocking("lookup", keys))
    assert len(restored) == 2
    for key, chunk in zip(keys, restored, strict=False):
        chunks.check(key, chunk)
    assert in_use(backend) == 0


def test_full_chunks_and_tails_share_a_batch(backend: Any, chunks: Chunks):
    keys = chunks.keys(7)
    tokens = [64, 64, 17, 64, 1, 64, 63]
    for key, count in zip(keys, tokens, strict=True):
        chunks.put(backend, [key], tokens=count)
    restored = backend.batched_get_blocking(keys)
    assert [chunk.get_num_tokens() for chunk in restored] == tokens
    for key, chunk in zip(keys, restored, strict=True):
        chunks.check(key, chunk)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (MemoryFormat.KV_T2D, (17, 2, 128)),
        (MemoryFormat.KV_2TD, (2, 17, 128)),
        (MemoryFormat.KV_MLA_FMT, (1, 3, 17, 96)),
    ],
)
def test_the_stored_format_reaches_the_allocator(
    backend: Any, chunks: Chunks, fmt: MemoryFormat, shape: tuple[int, ...]
):
    usual, other = chunks.keys(2)
    chunks.put(backend, [usual])
    chunks.put(backend, [other], fmt=fmt, shape=shape)
    first, second = backend.batched_get_blocking([usual, other])
    assert (first.get_memory_format(), tuple(first.get_shape())) == (
        MemoryFormat.KV_2LTD,
        (2, 2, 64, 128),
    )
    assert (second.get_memory_format(), tuple(second.get_shape())) == (fmt, shape)
    chunks.check(usual, first)
    chunks.check(other, second)
    assert backend.batched_contains([usual, other]) == 2
    assert backend.batched_remove([usual, other]) == 2


@pytest.mark.parametrize(
    ("options", "fmt", "shape"),
    [
        ({"use_layerwise": True}, MemoryFormat.KV_T2D, (17, 2, 128)),
        (
            {"use_layerwise": True, "enable_blending": True},
            MemoryFormat.KV_2TD,
            (2, 17, 128),
        ),
    ],
    ids=["layerwise", "blending"],
)
def test_each_configured_format_is_there_after_a_restart(
    engine: Engine,
    chunks: Chunks,
    options: dict[str, Any],
    fmt: MemoryFormat,
    shape: tuple[int, ...],
):
    layers = chunks.key().split_layers(2)
    first = engine.backend(**options)
    chunks.put(first, layers, fmt=fmt, shape=shape)
    first.close()
    second = engine.backend(**options)
    for key, chunk in zip(layers, second.batched_get_blocking(layers), strict=True):
        assert (chunk.get_memory_format(), tuple(chunk.get_shape())) == (fmt, shape)
        chunks.check(key, chunk)


def test_four_threads_put_and_get(backend: Any, chunks: Chunks, in_use: InUse):
    def work(keys: list[Any]) -> None:
        chunks.put(backend, keys)
        for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
            chunks.check(key, chunk)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [chunks.keys(12) for _ in range(8)]))
    assert in_use(backend) == 0


# ---- keys ------------------------------------------------------------------------------------


def test_all_that_a_key_says_tells_chunks_apart(backend: Any, chunks: Chunks):
    from lmcache.utils import CacheEngineKey

    def key(**other: Any) -> CacheEngineKey:
        fields = {
            "model_name": "model",
            "world_size": 2,
            "worker_id": 0,
            "chunk_hash": 7,
            "dtype": torch.float16,
        }
        return CacheEngineKey(**(fields | other))

    others = [
        key(model_name="other"),
        key(world_size=4),
        key(worker_id=1),
        key(chunk_hash=8),
        key(chunk_hash=-7),
        key(chunk_hash=7 << 60),
        key(dtype=torch.bfloat16),
        key(request_configs={"lmcache.tag.user": "u"}),
        *key().split_layers(2),
    ]
    chunks.put(backend, [key()])
    assert backend.contains(key())
    assert not any(backend.contains(other) for other in others)


def test_a_salt_keeps_tenants_apart(engine: Engine, chunks: Chunks):
    key = chunks.key()
    first = engine.backend(extra={"kvdepot.salt": "one"})
    chunks.put(first, [key])
    first.close()
    second = engine.backend(extra={"kvdepot.salt": "two"})
    assert not second.contains(key)


def test_other_files_of_the_model_find_nothing(
    engine: Engine, chunks: Chunks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """LMCache's key has the model's name, which is the path."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / engine.metadata().model_name
    model.mkdir(parents=True)
    key = chunks.key()
    for content, there in ((b"x", False), (b"x", True), (b"y", False), (b"x", True)):
        (model / "pytorch_model.bin").write_bytes(content * 5000)
        backend = engine.backend()
        assert backend.contains(key) == there
        chunks.put(backend, [key])
        backend.close()
    (model / "config.json").write_text('{"rope_theta": 1}')
    backend = engine.backend()
    assert not backend.contains(key)
    backend.close()
    named = engine.backend(extra={"kvdepot.weights": "w"})
    assert not named.contains(key)


# ---- construction ----------------------------------------------------------------------------


def test_what_it_cannot_work_without_is_named(engine: Engine):
    from kvdepot.lmcache import KvdepotBackend

    config, metadata = engine.config(), engine.metadata()
    with pytest.raises(kvdepot.ConfigError, match="max_local_cpu_size"):
        KvdepotBackend(config=config, metadata=metadata)
    with pytest.raises(kvdepot.ConfigError, match="metadata"):
        KvdepotBackend(config=config)
    metadata.kv_layer_groups_manager = SimpleNamespace(kernel_groups=[1, 2], num_kernel_groups=2)
    with pytest.raises(kvdepot.ConfigError, match="KV groups: 2 "):
        KvdepotBackend(config=config, metadata=metadata, local_cpu_backend=object())


@pytest.mark.pipelines(*pipelines.ARENAS)  # a directory is open while its depot is an object
def test_a_failed_construction_keeps_no_descriptor(
    engine: Engine, monkeypatch: Any, descriptors: Any
):
    from kvdepot.lmcache import storage as lmcache_storage

    engine.backend().close()
    before = descriptors()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no threads")

    monkeypatch.setattr(lmcache_storage, "ThreadPoolExecutor", fail)
    with pytest.raises(OSError, match="no threads") as failed:
        engine.backend()
    kept = [target for _, target in descriptors() - before]
    assert not [target for target in kept if target.startswith(str(engine.folder))]
    monkeypatch.undo()
    engine.backend()  # the arena is free again
    assert failed.tb is not None, "which has the depot: it was closed, not collected"


@pytest.mark.pipelines(pipelines.DEFAULT)  # of the settings that LMCache's own backend has
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"dax.max_dax_size": 1}, "dax.max_dax_size|arena"),
        ({"dax.max_dax_size": "64GiB"}, "dax.max_dax_size: '64GiB'"),
        ({"dax.restore_worker": 2}, "restore_workers"),
        ({"kvdepot.overlaod": "drop"}, "overload"),
        ({"kvdepot": {"lanes": 0}}, "lanes"),
        ({"kvdepot": "fast"}, "kvdepot: 'fast'"),
    ],
)
def test_wrong_settings_are_refused_by_their_names(
    engine: Engine, extra: dict[str, Any], named: str
):
    engine.backend().close()  # an arena of 64 MiB
    with pytest.raises(kvdepot.ConfigError, match=named):
        engine.backend(extra=extra)


# ---- puts ------------------------------------------------------------------------------------


def test_a_callback_for_each_chunk_that_was_stored(engine: Engine, chunks: Chunks):
    backend = engine.backend(extra={"dax.async_put": False})
    cpu = backend.get_allocator_backend()
    keys = chunks.keys(3)
    chunks.put(backend, keys[:1])
    called: list[Any] = []

    def stored(key: Any) -> None:
        called.append(key)
        raise ValueError("of the caller")

    objects = [chunks.chunk(cpu, key) for key in keys]
    assert backend.batched_submit_put_task(keys, objects, on_complete_callback=stored) is None
    assert called == keys[1:]
    # Borrowed: each has the caller's reference and no other.
    assert [chunk.get_ref_count() for chunk in objects] == [1, 1, 1]


def test_an_asynchronous_put_borrows_until_it_is_released(
    engine: Engine, chunks: Chunks, in_use: InUse
):
    backend = engine.backend()
    cpu = backend.get_allocator_backend()
    keys = chunks.keys(32)
    objects = [chunks.chunk(cpu, key) for key in keys]
    called: list[Any] = []
    futures = backend.batched_submit_put_task(keys, objects, on_complete_callback=called.append)
    for chunk in objects:
        chunk.ref_count_down()
    for future in futures:
        future.result(timeout=30)
    assert called == keys
    assert not any(backend.exists_in_put_tasks(key) for key in keys)
    assert in_use(backend) == 0
    for key, chunk in zip(keys, backend.batched_get_blocking(keys), strict=True):
        chunks.check(key, chunk)


def test_a_chunk_larger_than_the_arena_is_refused(
    engine: Engine, chunks: Chunks, in_use: InUse, caplog: pytest.LogCaptureFixture
):
    backend = engine.backend(cpu_mib=128)
    small, large = chunks.keys(2)
    chunks.put(backend, [small])
    chunks.put(backend, [large], tokens=64 * 1100)
    assert not backend.contains(large)
    assert backend.contains(small)
    assert any("1 of 1 chunks were not stored: full" in line for line in caplog.messages)
    chunks.put(backend, [large], tokens=10)
    chunks.check(large, backend.get_blocking(large))
    assert in_use(backend) == 0


def test_lists_of_different_lengths_store_nothing(
    backend: Any, chunks: Chunks, caplog: pytest.LogCaptureFixture
):
    keys = chunks.keys(2)
    chunk = chunks.chunk(backend.get_allocator_backend(), keys[0])
    assert backend.batched_submit_put_task(keys, [chunk]) is None
    assert not any(backend.contains(key) for key in keys)
    assert any("2 chunks were not stored" in line for line in caplog.messages)
    assert chunk.get_ref_count() == 1


def test_a_chunk_of_several_tensors_is_left_out(
    backend: Any, chunks: Chunks, caplog: pytest.LogCaptureFixture
):
    cpu = backend.get_allocator_backend()
    one, several = chunks.keys(2)
    shapes = [torch.Size((2, 1, 64, 128)), torch.Size((2, 1, 64, 64))]
    objects = [
        cpu.allocate(shapes, [torch.float16] * 2, MemoryFormat.KV_2LTD),
        chunks.chunk(cpu, one),
    ]
    for future in backend.batched_submit_put_task([several, one], objects):
        future.result(timeout=30)
    assert backend.contains(one)
    assert not backend.contains(several)
    assert not backend.exists_in_put_tasks(several)
    assert any("has 2 tensors" in line for line in caplog.messages)
    assert [chunk.get_ref_count() for chunk in objects] == [1, 1]
    chunks.check(one, backend.get_blocking(one))


def test_positions_that_would_be_lost_are_not_stored(
    backend: Any, chunks: Chunks, caplog: pytest.LogCaptureFixture
):
    key = chunks.key()
    chunk = chunks.chunk(backend.get_allocator_backend(), key)
    chunk.metadata.cached_positions = torch.arange(64)
    backend.batched_submit_put_task([key], [chunk])
    assert not backend.contains(key)
    assert any("blended chunks" in line for line in caplog.messages)


# ---- removal and pins ------------------------------------------------------------------------


def test_what_is_removed_is_a_miss_and_its_space_is_used_again(
    engine: Engine, backend: Any, chunks: Chunks
):
    keys = chunks.keys(8)
    last = pipelines.last(engine.pipeline)
    chunks.put(backend, keys)
    tier = backend._depot.stats()["tiers"][last]
    # A directory counts what its processes have set aside, a part of 1/512 of its capacity.
    aside = tier["capacity_bytes"] // 512 if last == "Posix" else 0
    assert backend.remove(keys[0])
    assert not backend.remove(keys[0])
    assert backend.batched_remove(keys) == 7
    assert backend.batched_get_blocking(keys) == [None] * 8
    chunks.put(backend, keys)
    used = backend._depot.stats()["tiers"][last]["used_bytes"]
    assert abs(used - tier["used_bytes"]) <= aside


@pytest.mark.pipelines(*pipelines.ARENAS)  # a pin is an open file there, whose name may go
def test_pins_are_counted_and_outlive_a_flood(engine: Engine, chunks: Chunks):
    backend = engine.backend()
    pinned, plain = chunks.keys(2)
    chunks.put(backend, [pinned, plain])
    assert backend.pin(pinned)
    assert backend.contains(pinned, pin=True)
    assert not backend.pin(chunks.key())
    assert not backend.remove(pinned, force=False)

    def flood() -> None:
        # Each call stores less than an eighth of the arena.
        for _ in range(40):
            chunks.put(backend, chunks.keys(32))

    flood()
    assert not backend.contains(plain)  # evicted, least recently used
    assert backend.unpin(pinned)
    flood()
    chunks.check(pinned, backend.get_blocking(pinned))  # one of two pins is left
    assert backend.unpin(pinned)
    flood()
    assert not backend.contains(pinned)
    assert not backend.unpin(pinned)  # without a pin it only answers


def test_a_pinned_lookup_pins_the_hits_before_the_first_miss(backend: Any, chunks: Chunks):
    keys = chunks.keys(4)
    chunks.put(backend, [keys[0], keys[1], keys[3]])
    assert backend.batched_contains(keys, pin=True) == 2
    assert backend.batched_remove(keys, force=False) == 1  # the one behind the miss
    for key in keys:
        backend.unpin(key)
    assert backend.batched_remove(keys, force=False) == 2


def test_a_prefix_ends_at_the_first_miss_whatever_the_formats(backend: Any, chunks: Chunks):
    usual, missing, other = keys = chunks.keys(3)
    chunks.put(backend, [usual])
    chunks.put(backend, [other], fmt=MemoryFormat.KV_T2D, shape=(64, 2, 128))
    assert backend.batched_contains([usual, other, missing]) == 2
    assert backend.batched_contains(keys, pin=True) == 1
    [chunk] = asyncio.run(backend.batched_get_non_blocking("lookup", keys))
    chunks.check(usual, chunk)
    assert backend.batched_remove(keys, force=False) == 1  # the other is not pinned


ODD = {"fmt": MemoryFormat.KV_T2D, "shape": (64, 2, 128)}
"""What LMCache's configuration here does not make one think of."""


def test_the_layout_of_stored_chunks_is_known_after_a_restart(engine: Engine, chunks: Chunks):
    keys = chunks.keys(4)
    first = engine.backend()
    chunks.put(first, keys, **ODD)
    first.close()
    second = engine.backend()
    assert second.batched_contains(keys) == 4
    for key, chunk in zip(keys, second.batched_get_blocking(keys), strict=True):
        assert chunk.get_memory_format() is MemoryFormat.KV_T2D
        chunks.check(key, chunk)
    assert second.remove(keys[0])


def test_a_layout_that_another_process_begins_to_store_with_is_found(
    engine: Engine, chunks: Chunks
):
    keys = chunks.keys(3)
    # The second one uses the first one's depot, as another rank would.
    storing, asking = engine.backend(), engine.backend()
    assert asking.batched_contains(keys) == 0
    chunks.put(storing, keys, **ODD)
    end = time.monotonic() + 60
    while asking.batched_contains(keys) == 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert asking.batched_contains(keys) == 3
    for key, chunk in zip(keys, asking.batched_get_blocking(keys), strict=True):
        chunks.check(key, chunk)


def test_chunks_whose_layout_was_not_kept_are_found_by_lmcaches_configuration(
    engine: Engine, chunks: Chunks
):
    keys = chunks.keys(3)
    first = engine.backend()
    chunks.put(first, keys)
    # As a release did it that kept none, or where it was evicted.
    assert first._spaces._layouts.clear() == 1
    first.close()
    second = engine.backend()
    assert second.batched_contains(keys) == 3
    # A use of them notes it again.
    assert second.pin(keys[0])
    assert second.unpin(keys[0])
    second.close()
    assert engine.backend()._spaces._layouts.blocks()
