"""KV caches on a CUDA device: vLLM's own GPU worker over the depot's memory.

The tiers' memory is mapped into this process; vLLM's transfer handlers copy
between it and the device by DMA. No CPU touches the bytes on the way, so they
are hashed in host memory: after a store, and before a load.

A handler addresses host memory as rows of a tensor. Here the rows overlap: each
starts 4 KiB behind the one before, the granule of the depot's allocator, and is
as long as a block. So an extent at offset `o` is row `o // 4096`, wherever it
lies, and the handlers are used as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import (
    MAX_HOST_REGISTER_CHUNK_BYTES,
    SingleDirectionOffloadingHandler,
)
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from kvdepot.vllm_messages import Placements
from kvdepot.vllm_worker import SKIP, Job, KvdepotWorker, Part

logger = init_logger("vllm.kvdepot.cuda")

GRANULE = 4096


class KvdepotCudaWorker(KvdepotWorker):
    """Moves blocks between KV caches on a CUDA device and the depot."""

    def __init__(self, kv_caches: CanonicalKVCaches, rank: int, blocks_per_chunk: int) -> None:
        self._pages = [canonical.page_size_bytes for canonical in kv_caches.tensors]
        self._refs = kv_caches.group_data_refs
        self._media: dict[int, _Medium] = {}
        self._memory: tuple[int, ...] = ()
        super().__init__(kv_caches, rank, blocks_per_chunk)

    def payload_bytes(self) -> list[int]:
        """As in host memory, rounded up so that the next rank's part starts at a granule."""
        return [-(-size // GRANULE) * GRANULE for size in super().payload_bytes()]

    def _detach(self) -> None:
        """Wait for the device, then let the mapped memory go."""
        self.wait(set(self._jobs))
        for job in self._jobs.values():
            # Those that were only copied are hashed while there is a mover.
            self._advance(job)
        for medium in self._media.values():
            medium.close()
        self._media.clear()
        super()._detach()

    def _group_ranges(self, refs: Any) -> list[tuple[int, int, int]]:
        # Lengths only: a host address would mean nothing here. Padding between
        # pages is part of the block, because the handlers' rows have it.
        return [(0, self._pages[ref.tensor_idx], self._pages[ref.tensor_idx]) for ref in refs]

    def _start(self, job: Job, mover: Any) -> None:
        for part in job.parts:
            known = [i for i, placement in enumerate(part.placements) if placement is not None]
            placements = [part.placements[i] for i in known]
            places = mover.locate(placements, part=self.part)
            indexes = [i for i, place in zip(known, places, strict=True) if place is not None]
            found = [place for place in places if place is not None]
            if indexes:
                transfer = _Transfer(self, mover, part, indexes, found, load=job.load)
                job.moves.append((part, indexes, transfer))

    def _attached(self, spec: Placements) -> Any | None:
        self._memory = spec.memory
        return super()._attached(spec)

    def _handlers(self, mover: Any, medium: int) -> _Medium:
        if medium not in self._media:
            tensors = [
                tensor.view(torch.int8).view((-1, page))
                for tensor, page in zip(self._tensors, self._pages, strict=True)
            ]
            self._media[medium] = _Medium(
                mover.media[medium],
                tensors,
                self._refs,
                self.blocks_per_chunk,
                pin=PIN_MEMORY and medium in self._memory,
            )
        return self._media[medium]


class _Transfer:
    """One KV group's blocks of one job; looks like a job of the mover."""

    def __init__(
        self,
        worker: KvdepotCudaWorker,
        mover: Any,
        part: Part,
        indexes: list[int],
        places: list[tuple[int, int, int]],
        *,
        load: bool,
    ) -> None:
        self._worker = worker
        self._mover = mover
        self._part = part
        self._indexes = indexes
        self._places = places
        self._load = load
        self._placements = [part.placements[i] for i in indexes]
        self._copies: list[tuple[_Direction, int]] = []
        self._hash: Any = None
        if load:
            self._hash = mover.verify(self._placements, part=worker.part)
        else:
            self._copy(range(len(indexes)))
        self._copying = not load

    @property
    def done(self) -> bool:
        """Whether both the copy and the hashing have ended; starts what comes second."""
        if self._hash is not None and not self._hash.done:
            return False
        if self._load and not self._copying:
            good = [n for n, fine in enumerate(self._hash.results) if fine]
            self._copy(good)
            self._copying = True
        if not all(direction.finished(copy) for direction, copy in self._copies):
            return False
        if self._hash is None:
            self._hash = self._mover.digest(self._placements, part=self._worker.part)
        return bool(self._hash.done)

    def wait(self) -> None:
        """Until the device's memory is no longer touched."""
        if self._load and not self._copying:
            self._hash.wait()
            _ = self.done
        for direction, copy in self._copies:
            direction.wait(copy)

    @property
    def results(self) -> list[bool]:
        """Of a load: whether each block arrived and verified."""
        return list(self._hash.results)

    @property
    def corrupt(self) -> list[bool]:
        """Of a load: whether each block has another checksum than it should."""
        return list(self._hash.corrupt)

    @property
    def checksums(self) -> list[bytes | None]:
        """Of a store: a checksum a block."""
        return list(self._hash.checksums)

    @property
    def error(self) -> str | None:
        """Why something failed."""
        return None if self._hash.error is None else str(self._hash.error)

    def _copy(self, chosen: Any) -> None:
        by_medium: dict[int, list[int]] = {}
        for n in chosen:
            by_medium.setdefault(self._places[n][0], []).append(n)
        for medium, members in by_medium.items():
            handlers = self._worker._handlers(self._mover, medium)
            rows = [self._part.rows[self._indexes[n]] for n in members]
            device = GPULoadStoreSpec(
                [block for row in rows for block in row if block != SKIP],
                group_sizes=[sum(block != SKIP for row in rows for block in row)],
                # Where the first row is entered; vLLM takes it modulo the row's length.
                block_indices=[_leading_skips(rows[0])],
            )
            host = CPULoadStoreSpec([self._places[n][1] // GRANULE for n in members])
            direction = handlers.direction(self._part.group, load=self._load)
            copy = direction.start(host, device) if self._load else direction.start(device, host)
            self._copies.append((direction, copy))


def _leading_skips(row: list[int]) -> int:
    return next((n for n, block in enumerate(row) if block != SKIP), 0)


class _Direction:
    """One of vLLM's handlers, whose completions come in one list for all jobs."""

    def __init__(self, handler: SingleDirectionOffloadingHandler) -> None:
        self._handler = handler
        self._finished: set[int] = set()
        self._next = 0

    def start(self, source: Any, destination: Any) -> int:
        self._next += 1
        self._handler.transfer_async(self._next, source, destination)
        return self._next

    def finished(self, copy: int) -> bool:
        self._finished.update(result.job_id for result in self._handler.get_finished())
        return copy in self._finished

    def wait(self, copy: int) -> None:
        self._handler.wait({copy})

    def close(self) -> None:
        self._handler.shutdown()


class _Medium:
    """One mapped tier: its memory as tensors, registered for DMA where that works.

    A file is not: the driver would read all of it and keep it in memory, while the model waits.
    """

    def __init__(
        self,
        memory: memoryview,
        device_tensors: list[torch.Tensor],
        groups: list[list[CanonicalKVCacheRef]],
        blocks_per_chunk: int,
        *,
        pin: bool,
    ) -> None:
        self._region = torch.frombuffer(memory, dtype=torch.int8)
        self._tensors = device_tensors
        self._groups = groups
        self._blocks = blocks_per_chunk
        self._registered = self._register() if pin else []
        if not self._registered:
            size = self._region.numel() / 2**30
            logger.info("%.1f GiB of a tier stay pageable: copies are slower", size)
        self._directions: dict[tuple[int, bool], _Direction] = {}

    def direction(self, group: int, *, load: bool) -> _Direction:
        """vLLM's handler for a KV group in one direction."""
        if (group, load) not in self._directions:
            self._directions[group, load] = self._build(group, load=load)
        return self._directions[group, load]

    def close(self) -> None:
        """Wait for the device, then undo the registration."""
        for direction in self._directions.values():
            direction.close()
        self._directions.clear()
        for address in self._registered:
            host_unregister(address)
        self._registered = []

    def _build(self, group: int, *, load: bool) -> _Direction:
        device = [self._tensors[ref.tensor_idx] for ref in self._groups[group]]
        lengths = [tensor.shape[1] * self._blocks for tensor in device]
        rows = (self._region.numel() - sum(lengths)) // GRANULE + 1
        host = []
        offset = 0
        for length in lengths:
            host.append(self._region.as_strided((rows, length), (GRANULE, 1), offset))
            offset += length
        refs = [
            CanonicalKVCacheRef(index, ref.page_size_bytes)
            for index, ref in enumerate(self._groups[group])
        ]
        return _Direction(
            SingleDirectionOffloadingHandler(
                gpu_tensors=device,
                cpu_tensors=host,
                blocks_per_chunk=self._blocks,
                layer_refs_per_group=[refs],
                gpu_to_cpu=not load,
                host_memory_is_pinned=bool(self._registered),
            )
        )

    def _register(self) -> list[int]:
        """Register the memory for DMA; copies work without, but slower."""
        base, size = self._region.data_ptr(), self._region.numel()
        registered: list[int] = []
        for offset in range(0, size, MAX_HOST_REGISTER_CHUNK_BYTES):
            length = min(MAX_HOST_REGISTER_CHUNK_BYTES, size - offset)
            if not host_register(base + offset, length):
                for address in registered:
                    host_unregister(address)
                return []
            registered.append(base + offset)
        return registered
