"""KV caches on a CUDA device: vLLM's own GPU worker over the depot's memory.

The tiers' memory is mapped into this process; vLLM's transfer handlers copy
between it and the device by DMA. No CPU touches the bytes on the way, so they
are hashed in host memory: after a store, and before a load.

A handler addresses host memory as rows of a tensor. Here the rows overlap: each
starts 4 KiB behind the one before, the granule of the depot's allocator, and is
as long as a block. So an extent at offset `o` is row `o // 4096`, wherever it
lies, and the handlers are used as they are.

None of this has run on a device yet: the tests put a stand-in for vLLM's handlers
in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

import kvdepot
from kvdepot.vllm.faults import ERRORS
from kvdepot.vllm.jobs import SKIP, Job, Move, Moving, Part
from kvdepot.vllm.messages import Placements
from kvdepot.vllm.worker import KvdepotWorker

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
            for moving in job.moves:
                _transfer(moving.move).let_go()
        for medium in self._media.values():
            medium.close()
        self._media.clear()
        super()._detach()

    def _group_ranges(self, refs: Any) -> list[tuple[int, int, int]]:
        # Lengths only: a host address would mean nothing here. Padding between
        # pages is part of the block, because the handlers' rows have it.
        return [(0, self._pages[ref.tensor_idx], self._pages[ref.tensor_idx]) for ref in refs]

    def _start(self, job: Job, mover: kvdepot.Mover) -> None:
        for part in job.parts:
            known = part.movable(load=job.load)
            places = mover.locate(part.chosen(known), part=self.part)
            indexes = [i for i, place in zip(known, places, strict=True) if place is not None]
            found = [place for place in places if place is not None]
            if indexes:
                transfer = _Transfer(self, mover, part, indexes, found, load=job.load)
                job.moves.append(Moving(part, indexes, transfer))

    def _ended(self, move: Move) -> bool:
        transfer = _transfer(move)
        transfer.step()
        return transfer.done

    def _attached(self, spec: Placements) -> kvdepot.Mover | None:
        self._memory = spec.memory
        return super()._attached(spec)

    def _handlers(self, mover: kvdepot.Mover, medium: int) -> _Medium:
        if medium not in self._media:
            tensors = [
                tensor.view(torch.int8).view((-1, page))
                for tensor, page in zip(self._tensors, self._pages, strict=True)
            ]
            mapped = mover.media
            if medium >= len(mapped):
                # Since its owner said where the blocks are, it has gone.
                raise kvdepot.ClosedError("the depot's owner is gone")
            self._media[medium] = _Medium(
                mapped[medium],
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
        mover: kvdepot.Mover,
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
        self._placements = part.chosen(indexes)
        self._copies: list[tuple[_Direction, int]] = []
        self._hash: kvdepot.MoveJob | None = None
        self._second_phase = False
        self._broken = False
        if load:
            self._attempt("verify", self._start_verify)
        else:
            self._attempt("copy", self._copy, range(len(indexes)))

    def step(self) -> None:
        """Begin what comes second, once the first has ended: the hashing of what was copied, or the
        copying of what verified."""
        if self._second_phase or self._broken or not self._first_done():
            return
        self._second_phase = True
        if self._load:
            good = [n for n, fine in enumerate(self.results) if fine]
            self._attempt("copy", self._copy, good)
        else:
            self._attempt("digest", self._start_digest)

    @property
    def done(self) -> bool:
        """Whether both the copy and the hashing have ended."""
        if not self._second_phase and not self._broken:
            return False
        return self._copied() and (self._hash is None or self._hash.done)

    def wait(self) -> None:
        """Until the device's memory is no longer touched."""
        if self._load and self._hash is not None:
            self._hash.wait()
            self.step()
        for direction, copy in self._copies:
            direction.wait(copy)

    def let_go(self) -> None:
        """Once nothing is being copied: what comes second begins while there is a mover, and the
        tier's memory is held no longer, for which its next owner would wait."""
        self.step()
        self._copies.clear()

    def _first_done(self) -> bool:
        if self._load:
            return self._hash is not None and self._hash.done
        return self._copied()

    def _copied(self) -> bool:
        return all(direction.finished(copy) for direction, copy in self._copies)

    def _start_verify(self) -> None:
        self._hash = self._mover.verify(self._placements, part=self._worker.part)

    def _start_digest(self) -> None:
        self._hash = self._mover.digest(self._placements, part=self._worker.part)

    def _attempt(self, call: str, method: Callable[..., None], *args: Any) -> None:
        """Run a phase; after one of the depot's errors nothing has arrived, and copies that the
        device has begun are still waited for."""
        try:
            method(*args)
        except ERRORS as error:
            self._worker.faults.note(call, error)
            self._broken = True

    def _hashed(self) -> kvdepot.MoveJob | None:
        """What says how it went; nothing does once a step failed."""
        return None if self._broken else self._hash

    @property
    def results(self) -> list[bool]:
        """Of a load: whether each block arrived and verified."""
        hashed = self._hashed()
        return [False] * len(self._indexes) if hashed is None else hashed.results

    @property
    def corrupt(self) -> list[bool]:
        """Of a load: whether each block has another checksum than it should."""
        hashed = self._hashed()
        return [False] * len(self._indexes) if hashed is None else hashed.corrupt

    @property
    def checksums(self) -> list[bytes | None]:
        """Of a store: a checksum a block."""
        hashed = self._hashed()
        return [None] * len(self._indexes) if hashed is None else hashed.checksums

    @property
    def error(self) -> str | None:
        """Why something failed."""
        return None if self._hash is None else self._hash.error

    def _copy(self, chosen: Iterable[int]) -> None:
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


def _transfer(move: Move) -> _Transfer:
    assert isinstance(move, _Transfer)
    return move


def _leading_skips(row: list[int]) -> int:
    return next((n for n, block in enumerate(row) if block != SKIP), 0)


class _Direction:
    """One of vLLM's handlers, whose completions come in one list for all jobs."""

    def __init__(self, handler: SingleDirectionOffloadingHandler) -> None:
        self._handler = handler
        self._pending: set[int] = set()
        self._next = 0

    def start(self, source: Any, destination: Any) -> int:
        self._next += 1
        self._pending.add(self._next)
        self._handler.transfer_async(self._next, source, destination)
        return self._next

    def finished(self, copy: int) -> bool:
        if self._pending:
            self._pending.difference_update(done.job_id for done in self._handler.get_finished())
        return copy not in self._pending

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
        self._directions: dict[tuple[int, bool, bool], _Direction] = {}
        self._pinned = False
        self._pinning: threading.Thread | None = None
        if pin:
            # The driver takes seconds for tens of gigabytes, and this is the model's thread.
            # Until then copies are the slower ones of pageable memory.
            self._pinning = threading.Thread(target=self._pin, name="kvdepot-pin", daemon=True)
            self._pinning.start()
        else:
            self._say_pageable()

    def direction(self, group: int, *, load: bool) -> _Direction:
        """vLLM's handler for a KV group in one direction."""
        # Handlers are made for pinned memory or for pageable; copies under way keep theirs.
        kind = (group, load, self._pinned)
        if kind not in self._directions:
            self._directions[kind] = self._build(group, load=load, pinned=self._pinned)
        return self._directions[kind]

    def close(self) -> None:
        """Wait for the device, then undo the registration."""
        for direction in self._directions.values():
            direction.close()
        self._directions.clear()
        if self._pinning is not None:
            self._pinning.join()
        if self._pinned:
            host_unregister(self._region.data_ptr())
            self._pinned = False

    def _build(self, group: int, *, load: bool, pinned: bool) -> _Direction:
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
                host_memory_is_pinned=pinned,
            )
        )

    def _pin(self) -> None:
        """Register the memory for DMA, in one piece: a copy must not straddle two."""
        device = self._tensors[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if host_register(self._region.data_ptr(), self._region.numel()):
            self._pinned = True
        else:
            self._say_pageable()

    def _say_pageable(self) -> None:
        size = self._region.numel() / 2**30
        logger.info("%.1f GiB of a tier stay pageable: copies are slower", size)
