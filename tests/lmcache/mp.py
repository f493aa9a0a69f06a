"""The multi-process mode's L2 adapters over kvdepot, made by LMCache and used as its loops do."""

from __future__ import annotations

import argparse
import hashlib
import json
import select
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import (
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from . import pipelines

CHUNK_BYTES = 64 << 10
ARENA_BYTES = 32 << 20
PATIENCE_MS = 60_000
SURFACES = {
    "native": {"type": "native_plugin", "class_name": "KvdepotNative"},
    "adapter": {"type": "plugin", "class_name": "KvdepotAdapter"},
}
T = TypeVar("T")

# Chunks are small: threads of torch's would do nothing but wait for each other.
torch.set_num_threads(1)


def spec(
    surface: str,
    folder: Path,
    outer: dict[str, Any] | None = None,
    pipeline: str = pipelines.DEFAULT,
    **params: Any,
) -> str:
    """What `--l2-adapter` is given: for the default by the names of LMCache's own adapter."""
    tiers: dict[str, Any] = {
        "device_path": str(folder / "arena"),
        "max_dax_size": ARENA_BYTES / (1 << 30),
    }
    if pipeline != pipelines.DEFAULT:
        tiers = pipelines.settings(pipeline, folder, ARENA_BYTES)
    given = {**tiers, "socket": str(folder / "socket"), "lock_wait": 0}
    given = {name: value for name, value in (given | params).items() if value is not None}
    adapter = SURFACES[surface] | {"module_path": "kvdepot.lmcache", "adapter_params": given}
    return json.dumps(adapter | (outer or {}))


def configs(*specs: str) -> Any:
    """The configuration that LMCache's command line makes of it."""
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    arguments = [word for one in specs for word in ("--l2-adapter", one)]
    return parse_args_to_l2_adapters_config(parser.parse_args(arguments))


def key(number: int, **fields: Any) -> ObjectKey:
    """The key of a chunk: 32 bytes of hash, as LMCache's default algorithm has them."""
    chunk_hash = fields.pop("chunk_hash", zlib.crc32(str(number).encode()).to_bytes(32, "big"))
    return ObjectKey(chunk_hash, **{"model_name": "org/model", "kv_rank": 0x01000100, **fields})


def keys(numbers: range, **fields: Any) -> list[ObjectKey]:
    return [key(number, **fields) for number in numbers]


def content(name: ObjectKey, size: int = CHUNK_BYTES) -> torch.Tensor:
    digest = hashlib.sha256(repr(name).encode()).digest()
    return torch.frombuffer(bytearray(digest * (size // 32 + 1)), dtype=torch.uint8)[:size]


def blank(size: int = CHUNK_BYTES) -> TensorMemoryObj:
    """A chunk of memory as LMCache hands it over."""
    shape = torch.Size([size])
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=torch.uint8,
        address=0,
        phy_size=size,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[torch.uint8],
    )
    return TensorMemoryObj(torch.zeros(size, dtype=torch.uint8), metadata, None)


def chunk(name: ObjectKey, size: int = CHUNK_BYTES) -> TensorMemoryObj:
    """A chunk whose bytes follow from its key."""
    made = blank(size)
    made.raw_data.copy_(content(name, size))
    return made


def chunks(names: Sequence[ObjectKey]) -> list[TensorMemoryObj]:
    return [chunk(name) for name in names]


class Heard(L2AdapterListener):
    """What an adapter told its listeners."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


class Caller:
    """An adapter with LMCache's loops around it: submit, poll, reset, ask."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    @staticmethod
    def until(fd: int, ask: Callable[[], T | None]) -> T:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            assert poll.poll(PATIENCE_MS), "no completion"
            consume_fd(fd)
            if (answer := ask()) is not None:
                return answer

    def stored(self, number: int) -> L2StoreResult:
        found: dict[int, L2StoreResult] = {}

        def ask() -> L2StoreResult | None:
            found.update(self.adapter.pop_completed_store_tasks())
            return found.get(number)

        return self.until(self.adapter.get_store_event_fd(), ask)

    def store(self, names: Sequence[ObjectKey], objects: Sequence[Any] | None = None) -> Any:
        objects = chunks(names) if objects is None else objects
        return self.stored(self.adapter.submit_store_task(list(names), list(objects)))

    def looked_up(self, number: int, count: int) -> list[bool]:
        fd = self.adapter.get_lookup_and_lock_event_fd()
        bitmap = self.until(fd, lambda: self.adapter.query_lookup_and_lock_result(number))
        return [bitmap.test(index) for index in range(count)]

    def lookup(self, names: Sequence[ObjectKey]) -> list[bool]:
        """Whether each is there; what is there is locked until `unlock`."""
        number = self.adapter.submit_lookup_and_lock_task(list(names), {})
        return self.looked_up(number, len(names))

    def has(self, names: Sequence[ObjectKey]) -> list[bool]:
        found = self.lookup(names)
        self.unlock([name for name, there in zip(names, found, strict=True) if there])
        return found

    def unlock(self, names: Sequence[ObjectKey]) -> None:
        self.adapter.submit_unlock(list(names))

    def loaded(self, number: int, count: int) -> list[bool]:
        bitmap = self.until(
            self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(number)
        )
        return [bitmap.test(index) for index in range(count)]

    def load(self, names: Sequence[ObjectKey], objects: Sequence[Any] | None = None) -> list[bool]:
        """Loads, and checks the bytes of what it says was loaded."""
        objects = [blank() for _ in names] if objects is None else objects
        number = self.adapter.submit_load_task(list(names), list(objects))
        found = self.loaded(number, len(names))
        for name, made, ok in zip(names, objects, found, strict=True):
            assert not ok or torch.equal(made.raw_data, content(name, made.get_size()))
        return found


class Host:
    """Makes adapters in a folder, and closes them."""

    def __init__(self, surface: str, folder: Path, pipeline: str = pipelines.DEFAULT) -> None:
        self.surface = surface
        self.folder = folder
        self.pipeline = pipeline
        self._open: list[Any] = []

    def adapter(self, **params: Any) -> Caller:
        given = spec(self.surface, self.folder, pipeline=self.pipeline, **params)
        config = configs(given).adapters[0]
        adapter = create_l2_adapter(config)
        self._open.append(adapter)
        return Caller(adapter)

    def close(self, caller: Caller | None = None) -> None:
        """Closes one adapter, or those that are still open."""
        for adapter in [caller.adapter] if caller else list(self._open):
            self._open.remove(adapter)
            adapter.close()
