"""The moving side, in each of vLLM's worker processes: bytes between vLLM's KV caches, in host
memory or on a CUDA device, and the depot's tiers.

A worker exists before the depot does, so it attaches to the owner's socket when
the first job names it. vLLM asserts that jobs succeed: here they always do, and
what really happened is in the reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm.comparing import Comparer, layers_of
from kvdepot.vllm.compat import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    FullAttentionSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    MLAAttentionSpec,
    OffloadingConnectorMetadata,
    OffloadingConnectorWorker,
    OffloadingWorker,
    TransferResult,
    get_offloading_group_ids,
    iter_layer_specs,
)
from kvdepot.vllm.faults import ERRORS, Faults
from kvdepot.vllm.jobs import (
    SKIP,
    Comparing,
    Difference,
    GroupPlacements,
    Job,
    Moving,
    Part,
    Reports,
    WorkerReport,
)
from kvdepot.vllm.messages import RETRY_SECONDS, KvdepotWorkerMetadata, Placements, RankGeometry

logger = init_logger("vllm.kvdepot.worker")

# Between two lines in the log that say what is waited for.
REST_SECONDS = 10.0

Outcome = TypeVar("Outcome")


def split(
    placements: Placements, spec: GPULoadStoreSpec, blocks_per_chunk: int, *, load: bool
) -> list[Part]:
    """Match vLLM's block ids with the placements.

    With several vLLM blocks to a stored block, a load may start inside the
    first one and end inside the last. A store may not: vLLM leaves out the
    blocks that it no longer has, and does not say which, so none of the others
    is known to be in its place.

    A load has every block that vLLM waits for, also of a KV group without
    placements: what is in no part is in no report, and would pass for loaded.
    """
    parts = []
    offset = first = 0
    by_group = {each.group: each for each in placements.groups}
    for group, size in enumerate(spec.group_sizes):
        of_group = by_group.get(group, GroupPlacements(group, []))
        found = of_group.placements
        ids = spec.block_ids[offset : offset + size]
        offset += size
        skipped = spec.block_indices[group] % blocks_per_chunk
        if load and size and not found:
            found = [None] * -(-(skipped + size) // blocks_per_chunk)
        if not found:
            continue
        room = len(found) * blocks_per_chunk
        if load and skipped + size > room:
            raise RuntimeError(
                f"internal error: {skipped + size} vLLM blocks for {len(found)} blocks"
            )
        complete = not skipped and size == room
        if not complete:
            all_ids = np.full(room, SKIP, dtype=ids.dtype)
            if load:
                all_ids[skipped : skipped + size] = ids
            ids = all_ids
        rows = ids.reshape(-1, blocks_per_chunk)
        parts.append(Part(group, first, found, rows, complete, of_group.compared))
        first += len(found)
    return parts


class KvdepotWorker(OffloadingWorker):
    """Moves blocks between KV caches, in this host's memory or on a CUDA device, and the depot.

    vLLM's thread only submits. On a device, what is moved waits for what the device has been given
    to compute by then: a forward that writes what is stored, or that still reads what is loaded
    over. A page that is loaded is written before its block has verified as a whole; vLLM reads it
    once the load is reported, which says then that the block is not there."""

    def __init__(self, kv_caches: CanonicalKVCaches, rank: int, blocks_per_chunk: int) -> None:
        self.rank = rank
        self.part = rank
        """Which part of a block it moves: its own, unless that of all ranks is the same."""
        self.lanes: int | None = None
        """Threads that move bytes; None for as many as the owner has."""
        self.blocks_per_chunk = blocks_per_chunk
        self.path_seconds = 0.0
        self.comparer: Comparer | None = None
        """What compares blocks; without one they are reported as not compared."""
        self.faults = Faults(logger)
        self._tensors = [canonical.tensor for canonical in kv_caches.tensors]
        self._device = _device_of(self._tensors)
        self._ranges = [self._group_ranges(refs) for refs in kv_caches.group_data_refs]
        self._payload_bytes = [
            blocks_per_chunk * sum(length for _, _, length in ranges) for ranges in self._ranges
        ]
        self._pages = [
            kvdepot.Spans(ranges, [], owner=self._tensors, device=self._device)
            for ranges in self._ranges
        ]
        self._mover: kvdepot.Mover | None = None
        self._attach_after = 0.0
        self._jobs: dict[int, Job] = {}
        self._reports: Reports = {}
        # Jobs that have ended, and whose comparisons have not.
        self._compared: list[tuple[Job, WorkerReport]] = []
        self._invalid: dict[int, set[int]] = {}

    def payload_bytes(self) -> list[int]:
        """For each KV group: bytes that this rank adds to a stored block."""
        return self._payload_bytes

    @property
    def device(self) -> str:
        """Type of the device that the KV caches are on."""
        return str(self._tensors[0].device.type)

    # ---- vLLM's interface ------------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start to copy blocks out of vLLM's memory."""
        self._submit(job_id, dst_spec, src_spec, load=False)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start to copy blocks into vLLM's memory. An `expedited` load (vLLM 0.33) is one that the
        settings do not allow."""
        self._submit(job_id, src_spec, dst_spec, load=True)
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs that no longer touch vLLM's memory and whose outcome is known."""
        if self._compared:
            self._report_comparisons()
        if not self._jobs:
            return []
        start = time.perf_counter()
        finished = [job_id for job_id, job in self._jobs.items() if self._advance(job)]
        results = [self._finish(job_id) for job_id in finished]
        self.path_seconds += time.perf_counter() - start
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until the named jobs no longer touch vLLM's memory."""
        start = time.perf_counter()
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                self._wait(job)
        self.path_seconds += time.perf_counter() - start

    def rest(self) -> None:
        """Wait until nothing of vLLM's memory is touched. Jobs are reported later, as ever."""
        self.wait(set(self._jobs))
        if self.comparer is not None:
            self.comparer.rest()
        # A store that was given up may still read the device, which all pages are on: without a
        # limit, as the memory may be unmapped after this.
        for pages in self._pages[:1]:
            while not pages.synchronize(REST_SECONDS):
                logger.warning("waiting for the device to finish copies of timed-out stores")

    def shutdown(self) -> None:
        """Wait for all jobs and let the depot go."""
        self.wait(set(self._jobs))
        if self.comparer is not None:
            self.comparer.close()
        self._detach()

    # ---- what vLLM's interface has no place for ---------------------------------------------

    def take_reports(self) -> Reports:
        """Outcomes since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    def take_invalid(self) -> dict[int, set[int]]:
        """Failed loads since the last call: job id -> vLLM's block ids without their bytes."""
        invalid, self._invalid = self._invalid, {}
        return invalid

    # ---- how it moves --------------------------------------------------------------------------

    def _group_ranges(self, refs: Sequence[CanonicalKVCacheRef]) -> list[tuple[int, int, int]]:
        """(address, stride, length) of each layer's span of a vLLM block."""
        ranges = []
        for ref in refs:
            tensor = self._tensors[ref.tensor_idx]
            if tensor.dtype != torch.int8:
                raise RuntimeError(f"internal error: KV cache of {tensor.dtype}; allowed: int8")
            ranges.append((tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes))
        return ranges

    def _computing(self) -> int | None:
        """The stream that vLLM computes on, as CUDA knows it; None in host memory."""
        if self._device is None:
            return None
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _start(self, job: Job, mover: kvdepot.Mover) -> None:
        for part in job.parts:
            indexes = part.movable(load=job.load)
            if not indexes:
                continue
            spans = self._pages[part.group].with_rows(part.rows_of(indexes), self._computing())
            move = mover.load if job.load else mover.store
            placements = part.chosen(indexes)
            begun = move(placements, spans, part=self.part, background=True)
            job.moves.append(Moving(part, indexes, begun))

    def _compare(self, job: Job, mover: kvdepot.Mover) -> None:
        """Begin to compare what is stored already."""
        for part in job.parts:
            indexes = part.comparable()
            if not indexes or self.comparer is None:
                continue
            placements, rows = part.chosen(indexes), part.rows_of(indexes)
            try:
                outcomes = self.comparer.begin(mover, part.group, placements, rows)
            except Exception as error:
                # For example without memory for the copies: it costs a probe.
                self.faults.note("compare", error)
            else:
                job.comparisons.append(Comparing(part, indexes, outcomes))

    def _advance(self, job: Job) -> bool:
        """Whether the job has ended."""
        ended = [
            self.faults.attempt("done", None, lambda move: move.done, moving.move)
            for moving in job.moves
        ]
        if None in ended:
            job.failed = True
            self._wait(job)
        return job.failed or all(ended)

    def _wait(self, job: Job) -> None:
        for moving in job.moves:
            self.faults.attempt("wait", None, moving.move.wait)

    def _outcomes(
        self, job: Job, read: Callable[[kvdepot.MoveJob], list[Outcome | None]]
    ) -> list[Outcome | None]:
        """What `read` says of each block; None where nothing was moved."""
        outcomes: list[Outcome | None] = [None] * job.blocks
        if job.failed:
            return outcomes
        for part, indexes, move in job.moves:
            nothing: list[Outcome | None] = [None] * len(indexes)
            values = self.faults.attempt("outcome", nothing, read, move)
            for index, value in zip(indexes, values, strict=True):
                outcomes[part.first + index] = value
            call = "load" if job.load else "store"
            error = self.faults.attempt("error", None, lambda m=move: m.error)
            if error and move.rejected:
                # It would have raised it, had it been begun at once.
                self.faults.note(call, kvdepot.Error(error))
            elif error:
                logger.warning("%s: %s", call, error)
        return outcomes

    def _is_whole(self, job: Job) -> bool:
        """Whether every block was moved."""
        left = job.blocks
        for _, indexes, move in job.moves:
            left -= len(indexes)
            if not self.faults.attempt("outcome", False, _is_whole, move):
                return False
        return left == 0 and not job.failed

    def _whole_report(self, job: Job) -> WorkerReport:
        """Of a job whose every block was moved, as its moves have them one behind the other."""
        if job.load:
            return WorkerReport()
        checksums: list[bytes | None] = []
        for _, indexes, move in job.moves:
            nothing: list[bytes | None] = [None] * len(indexes)
            checksums += self.faults.attempt("outcome", nothing, _checksums, move)
        return WorkerReport(checksums=checksums)

    # ---- jobs ----------------------------------------------------------------------------------

    def _submit(
        self, job_id: int, spec: LoadStoreSpec, gpu_spec: GPULoadStoreSpec, *, load: bool
    ) -> None:
        start = time.perf_counter()
        assert isinstance(spec, Placements)
        parts = split(spec, gpu_spec, self.blocks_per_chunk, load=load)
        job = Job(spec.ticket, load, parts, start)
        self._jobs[job_id] = job
        mover = self._attached(spec)
        if mover is not None:
            # What was started before an error is waited for; the rest counts as failed.
            self.faults.attempt("load" if load else "store", None, self._start, job, mover)
            if not load:
                self._compare(job, mover)
        self.path_seconds += time.perf_counter() - start

    def _detach(self) -> None:
        """Wait for what is being moved, and let the depot go."""
        if self._mover is not None:
            self.faults.attempt("close", None, self._mover.close)
            self._mover = None

    def _attached(self, spec: Placements) -> kvdepot.Mover | None:
        mover = self._mover
        if mover is not None and self.faults.attempt("ended", False, lambda: mover.ended):
            # The service is gone. Placements come of the next one.
            self._detach()
        if self._mover is None and time.monotonic() >= self._attach_after:
            try:
                self._mover = kvdepot.attach(spec.socket, self.lanes, with_owner=True)
            except ERRORS as error:
                self._attach_after = time.monotonic() + RETRY_SECONDS
                logger.error(
                    "rank %d cannot attach to the depot at %s: %s; nothing is stored or loaded "
                    "for %d s", self.rank, spec.socket, error, RETRY_SECONDS,
                )  # fmt: skip
            else:
                self.faults.attempt("populate", None, self._mover.prefault)
        return self._mover

    def _report_comparisons(self) -> None:
        """Report on the jobs whose comparisons have ended since. vLLM does not wait for them."""
        for job, report in list(self._compared):
            if all(comparing.outcomes.done() for comparing in job.comparisons):
                self._compared.remove((job, report))
                self._add_comparisons(job, report)
                self._reports.setdefault(job.ticket, {})[self.rank] = report

    def _add_comparisons(self, job: Job, report: WorkerReport) -> None:
        for part, indexes, outcomes in job.comparisons:
            error = outcomes.exception()
            if error is not None:
                self.faults.note("compare", error)
                continue
            # Those behind them were not compared.
            for index, outcome in zip(indexes, outcomes.result(), strict=False):
                if isinstance(outcome, Difference):
                    report.differences[part.first + index] = outcome
                elif outcome is False:
                    report.corrupt.append(part.first + index)

    def _finish(self, job_id: int) -> TransferResult:
        job = self._jobs.pop(job_id)
        # Mostly all is well, and the model's thread need not look at each block.
        if self._is_whole(job):
            there, report = None, self._whole_report(job)
        elif job.load:
            arrived = self._outcomes(job, _arrived)
            there = [outcome is True for outcome in arrived]
            report = WorkerReport(
                corrupt=[index for index, outcome in enumerate(arrived) if outcome is False],
                undelivered=[index for index, outcome in enumerate(arrived) if outcome is None],
            )
            if not all(there):
                failed = {index for index, is_there in enumerate(there) if not is_there}
                self._invalid[job_id] = job.vllm_blocks(failed)
        else:
            checksums = self._outcomes(job, _checksums)
            there = [checksum is not None for checksum in checksums]
            report = WorkerReport(checksums=checksums)
        if job.comparisons:
            self._compared.append((job, report))
        else:
            self._reports.setdefault(job.ticket, {})[self.rank] = report
        moved = 0
        for part in job.parts:
            count = len(part.rows)
            if there is not None:
                count = sum(there[part.first : part.first + count])
            moved += count * self._payload_bytes[part.group]
        return TransferResult(job_id, True, moved, time.perf_counter() - job.started)


def _device_of(tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of the CUDA device that KV caches are on; None for this host's memory."""
    devices = {(tensor.device.type, tensor.device.index) for tensor in tensors}
    if len(devices) > 1 or not devices <= {("cpu", None)} | {
        ("cuda", index) for _, index in devices if index is not None
    }:
        raise RuntimeError(f"KV caches are on {devices}; allowed: one CUDA device, or the CPU")
    return next((index for _, index in devices), None)


def _arrived(move: kvdepot.MoveJob) -> list[bool | None]:
    """Whether each block verified; None for one that was not moved."""
    pairs = zip(move.results, move.corrupt, strict=True)
    return [True if arrived else (False if corrupt else None) for arrived, corrupt in pairs]


def _is_whole(move: kvdepot.MoveJob) -> bool:
    return move.whole


def _checksums(move: kvdepot.MoveJob) -> list[bytes | None]:
    return list(move.checksums)


def sole_full_attention(kv_cache_config: Any) -> bool:
    """Whether the engine has one KV group, and keeps every block of it for as long as a request.

    Only then can vLLM go on from the block before a failed one. Before a window, a chunk of local
    attention or a Mamba state it holds null blocks, whose bytes are nobody's.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        return False
    specs = iter_layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    # Not their subclasses: some of those drop blocks in the middle of a request.
    return all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in specs)


class KvdepotConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker half, with failures and reports that it has no place for."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._resumes_at_a_block = sole_full_attention(kv_cache_config)
        self._geometry: RankGeometry | None = None
        self._request_of_load: dict[int, str] = {}
        self._invalid_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        super()._init_worker(kv_caches)
        config = self.kv_cache_config
        groups = [config.kv_cache_groups[number] for number in get_offloading_group_ids(config)]
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        layers = layers_of(groups, model.dtype, cache.cache_dtype)
        self.mover.comparer = Comparer(kv_caches, layers, self.mover.part)

    @property
    def mover(self) -> KvdepotWorker:
        """The worker that moves bytes; there is one once the KV caches are registered."""
        assert isinstance(self.worker, KvdepotWorker)
        return self.worker

    def send_geometry(self, geometry: RankGeometry) -> None:
        """Describe this rank's KV caches to the scheduler's half, with the next metadata."""
        self._geometry = geometry

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Remember which request a load is for, then as vLLM does."""
        for job_id, job in metadata.load_jobs.items():
            self._request_of_load[job_id] = job.req_id
        super().start_kv_transfers(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM does; failed loads are kept for the two calls below."""
        finished = super().get_finished(finished_req_ids)
        for job_id, blocks in self.mover.take_invalid().items():
            # Otherwise the whole request is computed again.
            if self._resumes_at_a_block:
                self._invalid_blocks |= blocks
            else:
                self._failed_requests.add(self._request_of_load[job_id])
        for job_id in self._connector_worker_meta.completed_jobs:
            self._request_of_load.pop(job_id, None)
        return finished

    def transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Finished loads, and those of them that failed as a whole."""
        sending, receiving = self.get_finished(finished_req_ids)
        failed, self._failed_requests = self._failed_requests, set()
        return KVConnectorTransferResults(sending, receiving, failed)

    def take_invalid_blocks(self) -> set[int]:
        """vLLM's block ids that loads since the last call did not fill."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> KvdepotWorkerMetadata | None:
        """vLLM's completed jobs and kvdepot's reports on them."""
        base = super().build_connector_worker_meta()
        if self.worker is None:
            return None
        mover = self.mover
        reports = mover.take_reports()
        if base is None and not reports and self._geometry is None:
            return None
        seconds, mover.path_seconds = mover.path_seconds, 0.0
        meta = KvdepotWorkerMetadata(
            reports=reports, path_seconds=seconds, failed_calls=mover.faults.take()
        )
        if self._geometry is not None:
            meta.geometries[mover.rank] = self._geometry
            self._geometry = None
        if base is not None:
            meta.completed_jobs = base.completed_jobs
            meta.transfer_stats = base.transfer_stats
        return meta
