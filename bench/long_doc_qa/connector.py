"""kvdepot's connector, which writes down its loads, and one that loads one chunk at a time.

vLLM's workers import this module. KVDEPOT_BENCH_RESTORE is `batch` or `chunk`, KVDEPOT_BENCH_LOADS
names the file that gets one line a load, and KVDEPOT_BENCH_LOADERS says how many queries the second
restores at a time. Both restore through the same lanes, into the same memory; the second has begun
and ended one chunk before its loader begins the next, as connectors do that are asked for chunks
one by one.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvdepot
from kvdepot.vllm import KvdepotConnector
from kvdepot.vllm.jobs import Job, Moving
from kvdepot.vllm.worker import KvdepotWorker
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.logger import init_logger

logger = init_logger("vllm.kvdepot.bench")


class Recorder(KvdepotWorker):
    """Writes down how long each load took, from its begin to the end of the last lane."""

    def _seconds(self, job: Job) -> float:
        return max((move.seconds for _, _, move in job.moves), default=0.0)

    def _finish(self, job_id: int) -> Any:
        job = self._jobs[job_id]
        if job.load:
            line = {
                "seconds": self._seconds(job),
                "bytes": sum(move.bytes for _, _, move in job.moves),
                "chunks": job.blocks,
            }
            with Path(os.environ["KVDEPOT_BENCH_LOADS"]).open("a") as record:
                record.write(json.dumps(line) + "\n")
        return super()._finish(job_id)


class OneByOne(Recorder):
    """Loads one chunk after the other; stores as always."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loaders = ThreadPoolExecutor(int(os.environ["KVDEPOT_BENCH_LOADERS"]))
        self._loading: dict[int, Future[float]] = {}

    def _start(self, job: Job, mover: Any) -> None:
        if not job.load:
            super()._start(job, mover)
            return
        start = time.perf_counter()
        self._loading[job.ticket] = self._loaders.submit(self._load, job, mover, start)

    def _load(self, job: Job, mover: Any, start: float) -> float:
        for part in job.parts:
            for index, placement in enumerate(part.placements):
                if placement is None:
                    continue
                spans = kvdepot.Spans(
                    ranges=self._ranges[part.group],
                    rows=[part.rows[index]],
                    owner=self._tensors,
                    device=self._device,
                )
                move = mover.load([placement], spans, part=self.rank)
                move.wait()
                job.moves.append(Moving(part, [index], move))
        return time.perf_counter() - start

    def _advance(self, job: Job) -> bool:
        loading = self._loading.get(job.ticket)
        return (loading is None or loading.done()) and super()._advance(job)

    def _wait(self, job: Job) -> None:
        if job.ticket in self._loading:
            self._loading[job.ticket].result()
        super()._wait(job)

    def _seconds(self, job: Job) -> float:
        return self._loading[job.ticket].result()


class LongDocConnector(KvdepotConnector):
    """KvdepotConnector with one of the workers above."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            kinds = {"batch": Recorder, "chunk": OneByOne}
            worker = kinds[os.environ["KVDEPOT_BENCH_RESTORE"]]
            spec = self.connector_worker.spec
            rank = spec.config.parallel.rank
            spec.get_worker = lambda caches: worker(caches, rank, spec.blocks_per_chunk)
            logger.info("kvdepot: the benchmark's worker is %s", worker.__name__)
