"""A depot under vLLM's own CPU tier: an entry of `secondary_tiers` of its `TieringOffloadingSpec`.

vLLM asks in the scheduler's thread, so nothing here waits but a reset and the end: a tier that
answers late is asked again in a later step, and puts and gets are looked at when vLLM polls. Bytes
go between the rows of vLLM's CPU tier and the depot, with no copy in between. A chunk that does not
arrive whole is reported as failed; vLLM then frees its row, and the request computes it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import settings as vllm_settings
from kvdepot.vllm.compat import (
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    SecondaryTierManager,
    TransferJob,
    get_offload_block_hash,
    get_offload_group_idx,
    versions,
)
from kvdepot.vllm.faults import ERRORS, Faults, SafeDepot, SafeNamespace
from kvdepot.vllm.metrics import DEFINITIONS, Collector
from kvdepot.vllm.rows import Rows
from kvdepot.vllm.spec import open_own, open_service

logger = init_logger("vllm.kvdepot.tier")

# What is still moving when the depot is closed is a thread that hangs in the kernel.
CLOSE_SECONDS = 1.0


@dataclass
class _Question:
    """Which of these chunks are stored; the answer may be late."""

    keys: list[OffloadKey]
    task: kvdepot.Task
    since: float


@dataclass
class _Request:
    """What is known for a request that vLLM serves."""

    answers: dict[OffloadKey, _Question | bool] = field(default_factory=dict)
    beside: vllm_beside.Beside = vllm_beside.NOTHING
    """What its blocks depend on beside their tokens."""
    stores: bool = True
    """Not what it had before a reset."""
    rows: Rows | None = None

    def rows_of(self, context: ReqContext) -> Rows:
        """Its blocks by KV group."""
        if self.rows is None or self.rows.context is not context:
            self.rows = Rows(context, self.beside)
        return self.rows


@dataclass
class _Job:
    """A job of vLLM's under way, with the task of each run of keys of one KV group."""

    metadata: TransferJob
    moves: list[tuple[list[OffloadKey], kvdepot.Task | None]]
    names: list[tuple[SafeNamespace, list[bytes]]] = field(default_factory=list)
    """Of a store: what is put under which names."""
    withdrawn: bool = False
    """Whether what it stores is removed: the weights have changed since."""

    def ended(self) -> bool:
        """Whether no row of vLLM's is read or written for it any more."""
        return all(task is None or self._ended(task) for _, task in self.moves)

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended; `kvdepot.TimeoutError` after so many seconds."""
        for _, task in self.moves:
            if task is not None and self.metadata.is_promotion:
                task.wait(seconds)
            elif task is not None:
                task.wait_released(seconds)

    def reasons(self) -> Iterator[tuple[OffloadKey, str | None]]:
        """Why each key failed; None for those that have not."""
        for keys, task in self.moves:
            yield from zip(keys, task.errors if task else ["refused"] * len(keys), strict=True)

    def _ended(self, task: kvdepot.Task) -> bool:
        if task.done or self.metadata.is_promotion:
            return task.done
        try:
            # What the near tier has is written on from there.
            task.wait_released(0)
        except kvdepot.TimeoutError:
            return False
        return True


class KvdepotTier(SecondaryTierManager):
    """Secondary tier of vLLM over a depot (docs/engines/vllm.md).

    Raises:
        kvdepot.ConfigError: An option is unknown, or its value is not allowed.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Returns the metrics that the tier may report."""
        return dict(DEFINITIONS)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """Opens the depot that `config` describes."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.settings = vllm_settings.read_tier(config)
        versions.check(untested_allowed=self.settings.untested_vllm)
        versions.say(logger)
        if self.settings.locality is not None:
            self.locality = Locality(self.settings.locality)
        self.faults = Faults(logger)
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, _Job] = {}
        self._epoch: str | None = None
        self._memory = ""
        self.paused = False
        """Whether vLLM waits for its work to end: metrics are brought up to date afterwards."""
        self.withheld = False
        """Whether nothing is looked up or stored: vLLM holds KV of other weights."""
        self.stored: Callable[[SafeNamespace, list[bytes]], None] = lambda namespace, keys: None
        """Called with what was stored."""
        self.verifies = False
        """Whether a connector tells of weights that change in memory."""
        self._depot = _open(self.settings, offloading_spec.config)
        self.depot = SafeDepot(self._depot, self.faults)
        # Nobody waits for a service's figures, which it has itself.
        self.collector = Collector(None if self.settings.shared else self.depot)
        try:
            self._namespaces = self._named(None)
        except Exception:
            self._depot.close()
            raise
        # While this is there vLLM cannot unmap the rows.
        self._rows: Any = np.asarray(primary_kv_view)

    def set_beside(self, request: str, beside: vllm_beside.Beside) -> None:
        """Records the properties of a request, other than tokens, that its blocks depend on."""
        self._request(request).beside = beside

    def set_memory(self, name: str | None, begun: Collection[str], *, withheld: bool) -> None:
        """Records that the weights in memory have changed.

        `name` identifies the weights: empty for those of the start, None if they are unknown.
        Requests in `begun` are no longer stored.
        """
        self.withheld = withheld
        for request_id, request in self._requests.items():
            request.answers.clear()
            request.stores = request.stores and request_id not in begun
        for job in self._jobs.values():
            job.withdrawn = not job.metadata.is_promotion
        self._memory, self._namespaces = name or "", {}
        if name is not None:
            try:
                self._namespaces = self._named(self._epoch)
            except ERRORS as error:
                self.faults.note("namespace", error)

    # ---- reading ---------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Looks up a chunk.

        The result is RETRY while the lookup is in progress and the request may wait.
        """
        if self.withheld:
            return LookupResult.MISS
        request = self._requests[req_context.req_id]
        answer = request.answers.get(key)
        if answer is None:
            answer = self._ask(key, req_context, request)
        if isinstance(answer, _Question):
            if not answer.task.done:
                waited = time.monotonic() - answer.since
                late = waited >= self.settings.lookup_wait_seconds
                return LookupResult.MISS if late else LookupResult.RETRY
            stored = answer.task.wait(0)
            request.answers.update(zip(answer.keys, stored, strict=True))
            answer = request.answers[key]
        return LookupResult.HIT if answer else LookupResult.MISS

    def _ask(self, key: OffloadKey, req_context: ReqContext, request: _Request) -> _Question | None:
        """Ask for the chunk and those that vLLM asks for next: one call is faster, and tells the
        depot their order."""
        namespace = self._namespaces.get(get_offload_group_idx(key))
        if namespace is None:
            return None
        row, at = request.rows_of(req_context).find(key)
        # In a KV group with a sliding window it asks backwards.
        window = 1 if at == row.first - 1 else None
        blocks: Iterable[int] = row.range_to_ask(at, window, whole=False)
        if window is None:
            blocks = takewhile(lambda index: row.keys[index] not in request.answers, blocks)
        indexes = [index for index in blocks if row.keys[index] not in request.answers]
        task = namespace.lookup([row.names[index] for index in indexes])
        if task is None:
            return None
        row.first, row.count = indexes[0], len(indexes)
        keys = [row.keys[index] for index in indexes]
        question = _Question(keys, task, time.monotonic())
        request.answers.update(dict.fromkeys(keys, question))
        return question

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Starts to fill rows. `get_finished_jobs` reports the complete ones."""
        self._submit(job_metadata)

    # ---- writing ---------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Starts to store rows that the depot does not have."""
        self._submit(job_metadata)

    def _submit(self, job: TransferJob) -> None:
        # vLLM may have ended it in the step that found its chunks: under what names they are is not
        # known any more.
        request = self._requests.get(job.req_context.req_id)
        moves: list[tuple[list[OffloadKey], kvdepot.Task | None]] = []
        names: list[tuple[SafeNamespace, list[bytes]]] = []
        # Rows are moved in prefix order, whatever group comes first.
        pairs = zip(job.keys, map(int, job.chunk_ids), strict=True)
        for group, run in groupby(pairs, lambda pair: get_offload_group_idx(pair[0])):
            keys, rows = map(list, zip(*run, strict=True))
            namespace = self._namespaces.get(group)
            task = None
            stores = request is not None and request.stores and not self.withheld
            if namespace and request and (job.is_promotion or stores):
                move = namespace.get if job.is_promotion else namespace.put
                named = [_key(key, job.req_context, request) for key in keys]
                task = move(named, self._spans(rows))
                names.append((namespace, named))
            moves.append((keys, task))
        self._jobs[job.job_id] = _Job(job, moves, [] if job.is_promotion else names)

    def _spans(self, rows: Sequence[int]) -> kvdepot.Spans:
        """Rows of vLLM's CPU tier, where they are."""
        size = self.block_size_bytes
        return kvdepot.Spans(
            ranges=[(self._rows.ctypes.data, size, size)],
            rows=[[row] for row in rows],
            owner=self._rows,
        )

    # ---- jobs ------------------------------------------------------------------------------

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns loads whose rows are filled, and stores whose rows may be reused.

        The first tier then has the blocks of a store; the depot writes them back from there.
        """
        ended = [job for job in self._jobs.values() if job.ended()]
        for job in ended:
            del self._jobs[job.metadata.job_id]
        return [self._result(job) for job in ended]

    def _result(self, job: _Job) -> JobResult:
        metadata = job.metadata
        for namespace, keys in job.names:
            if job.withdrawn:
                namespace.remove(keys)
            else:
                self.stored(namespace, keys)
        failed: dict[OffloadKey, str] = {}
        for key, reason in job.reasons():
            # A store whose row is free may still be on its way to the last tier.
            if reason is not None and (metadata.is_promotion or reason != "pending"):
                failed[key] = reason
        moved = tuple(key for key in metadata.keys if key not in failed)
        request = self._requests.get(metadata.req_context.req_id)
        if request is not None and metadata.is_promotion:
            # Looked up again, they would be loaded again, and fail without end.
            request.answers.update(dict.fromkeys(failed, False))
        elif request is not None:
            for key in moved:
                request.answers.pop(key, None)
        if failed and set(failed.values()) != {"declined"}:
            operation = "load" if metadata.is_promotion else "store"
            self.collector.failed(operation, len(failed))
            logger.warning(
                "request %s: of %d chunks to %s, %d failed (%s)%s",
                metadata.req_context.req_id, len(metadata.keys), operation, len(failed),
                ", ".join(f"{reason} {n}" for reason, n in Counter(failed.values()).items()),
                "; vLLM computes these chunks" if metadata.is_promotion else "",
            )  # fmt: skip
        return JobResult(
            metadata.job_id,
            success=not failed,
            successful_keys=moved if metadata.is_promotion and failed else None,
            transfer_time=time.monotonic() - metadata.submit_time,
            transfer_bytes=len(moved) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Waits until all rows are unused, then resets. vLLM calls it only for a reset."""
        for job in self._jobs.values():
            job.wait()
        self._reset()

    def _reset(self) -> None:
        """As `on_reset` says, what was stored before is not served again, or is."""
        on_reset = self.settings.on_reset
        logger.info("kvdepot: the cache was reset; on_reset is %r", on_reset)
        if on_reset == vllm_settings.VERIFY:
            if self.verifies:
                return
            # Nobody tells whether the weights are the same.
            on_reset = "epoch"
        for request in self._requests.values():
            request.answers.clear()
            # It may go on with what was computed before, and vLLM offers all of that again.
            request.stores = False
        before, of_an_epoch = self._namespaces, self._epoch is not None
        if on_reset == "epoch":
            self._epoch = secrets.token_hex(16)
            self._namespaces = {}
            try:
                self._namespaces = self._named(self._epoch)
            except ERRORS as error:
                self.faults.note("namespace", error)
        if on_reset == "clear" or of_an_epoch:
            # Nobody else knows an epoch that has ended: its chunks would only take up room.
            for namespace in before.values():
                namespace.clear()

    # ---- the life of requests and of the tier -------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Requests new chunks as they are computed."""
        self._request(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drops the lookups of a request. Its jobs may still be in progress."""
        self._requests.pop(req_context.req_id, None)

    def has_pending_work(self) -> bool:
        """Returns true if the engine must keep stepping, to update a metric."""
        return not self.paused and self.collector.outdated(self._queued_bytes())

    def get_stats(self) -> Any:
        """Returns the statistics since the last call."""
        self.collector.failed_calls("scheduler", self.faults.take())
        queued = self._queued_bytes()
        return self.collector.take(queued, idle=not self._jobs and not queued)

    def shutdown(self) -> None:
        """Closes the depot, which first writes back its queue.

        Raises:
            kvdepot.Error: Rows are still in use; vLLM then leaves them mapped.
        """
        self._requests.clear()
        self._depot.close()
        try:
            for job in self._jobs.values():
                job.wait(CLOSE_SECONDS)
        except kvdepot.TimeoutError as error:
            raise kvdepot.Error(
                "a kvdepot tier has not finished a copy from or to vLLM's CPU tier; the CPU "
                "tier's memory stays mapped until the process exits"
            ) from error
        self._jobs.clear()
        # vLLM unmaps them now.
        self._rows = None

    # ---- helpers -----------------------------------------------------------------------------

    def _request(self, name: str) -> _Request:
        return self._requests.setdefault(name, _Request())

    def _queued_bytes(self) -> int:
        return 0 if self.settings.shared else int(self.depot.pending_bytes())

    def _named(self, epoch: str | None) -> dict[int, SafeNamespace]:
        """The namespace of each KV group, by vLLM's number of it."""
        config = self._offloading_spec.config
        fields = vllm_namespace.fields_of_chunks(config, self.settings)
        fields["weights"] = vllm_namespace.with_memory(fields["weights"], self._memory)
        fields["salt"] = vllm_namespace.with_epoch(fields["salt"], epoch)
        computed_by = versions.of_blocks(shared=self.settings.share_versions)
        layout = vllm_namespace.layout_of_chunks(config, self.block_size_bytes, computed_by)
        return {
            group.group_id: self.depot.namespace(
                **fields,
                block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
                layout=layout,
                group=f"{group.group_id}: {' '.join(group.layer_names)}",
            )
            for group in config.groups
        }


def _key(key: OffloadKey, req_context: ReqContext, request: _Request) -> bytes:
    position = req_context.get_offload_key_position(key)
    return request.beside.key(get_offload_block_hash(key), position)


def _open(settings: vllm_settings.TierSettings, config: Any) -> kvdepot.Depot:
    if settings.shared:
        return open_service(settings.pipeline, settings.depot)
    return open_own(settings, config)
