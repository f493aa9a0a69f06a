"""The connector's scheduler side with prompts of any length; no tokens are computed.

The depot is real, and so are the connector and vLLM's lookup. Requests have as much of vLLM's as
that needs. A namespace in front of the depot's can answer late, or have blocks where no worker
reaches them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
from engine_double import BLOCK, OURS, EngineDouble, full, window
from engine_double import BYTES as ENGINE_BYTES
from engine_manager import end_step
from kvdepot.vllm.jobs import WorkerReport
from kvdepot.vllm.messages import KvdepotWorkerMetadata
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput

WINDOW_BLOCKS = 64
MODELS = {
    "full": lambda: [full()],
    "window": lambda: [window(WINDOW_BLOCKS * BLOCK)],
    "hybrid": lambda: [full(), window(WINDOW_BLOCKS * BLOCK)],
}
BYTES = 64
"""Of a stored block; nobody reads it."""

EXTENT = 4096
"""What a block takes of a tier, at least."""


def spans(memory: bytearray, blocks: int) -> kvdepot.Spans:
    """Memory in which blocks of the double's size lie one behind the other."""
    size = BLOCK * ENGINE_BYTES
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rows = [[number] for number in range(blocks)]
    return kvdepot.Spans(ranges=[(address, size, size)], rows=rows, owner=memory)


def hashes(name: str, blocks: int) -> list[bytes]:
    """vLLM's hashes of a prompt's blocks."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(blocks)]


class DelayedTask:
    """The outcome of a task, after a number of steps."""

    def __init__(self, namespace: FrontNamespace, outcome: list[bool], steps: int) -> None:
        self._namespace = namespace
        self._outcome = outcome
        self._due = namespace.steps + steps

    @property
    def done(self) -> bool:
        return self._namespace.steps >= self._due

    @property
    def errors(self) -> list[str | None]:
        return [None if came else "dropped" for came in self._outcome]

    def wait(self, timeout: float | None = None) -> list[bool]:
        if not self.done:
            threading.Event().wait(timeout or 0.0)
            raise kvdepot.TimeoutError("late")
        return self._outcome


class FrontNamespace:
    """A namespace that counts the keys it is given."""

    def __init__(self, namespace: Any, *, delay: int = 0, far: bool = False) -> None:
        """Questions are answered after `delay` steps. With `far` a block can be pinned only after
        it was fetched."""
        self._namespace = namespace
        self.delay = delay
        self.far = far
        self.near: set[bytes] = set()
        # Prefetches from now on that find no room on the way.
        self.drops = 0
        self.keys = 0
        self.calls = 0
        self.steps = 0

    def _count(self, keys: Sequence[bytes]) -> None:
        self.calls += 1
        self.keys += len(keys)

    def prefix(self, keys: Sequence[bytes]) -> int:
        self._count(keys)
        return self._namespace.prefix(keys)

    def lookup(self, keys: Sequence[bytes]) -> Any:
        self._count(keys)
        task = self._namespace.lookup(keys)
        return DelayedTask(self, task.wait(60), self.delay) if self.delay else task

    def pin(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[Any]:
        self._count(keys)
        if not self.far:
            return self._namespace.pin(keys, prefix=prefix)
        found = [name in self.near for name in keys]
        count = found.index(False) if prefix and False in found else len(keys)
        there = [name for name in keys[:count] if name in self.near]
        pins = iter(self._namespace.pin(there))
        return [next(pins) if near and at < count else None for at, near in enumerate(found)]

    def prefetch(self, keys: Sequence[bytes]) -> Any:
        self._count(keys)
        came = self.drops == 0
        self.drops -= not came
        if came:
            self.near.update(keys)
        return DelayedTask(self, [came] * len(keys), max(1, self.delay))

    def reserve(self, keys: Sequence[bytes], *args: Any, **kwargs: Any) -> Any:
        self._count(keys)
        return self._namespace.reserve(keys, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._namespace, name)


class Lookups:
    """One engine's connector, as its scheduler calls it."""

    def __init__(
        self,
        directory: Path,
        model: str,
        *,
        capacity: str = "64MiB",
        delay: int = 0,
        far: bool = False,
        **extra: Any,
    ) -> None:
        """`extra` are settings. Questions take `delay` steps, as over an asynchronous tier; with
        `far` blocks have to be fetched from there."""
        settings: dict[str, Any] = {"pipeline": "Cache", "cache": {"capacity": capacity}}
        # A probe would look a request up again.
        settings["probe_every"] = 0
        ours = OURS | {"kv_connector_extra_config": settings | {"lookup_wait": "10m"} | extra}
        self.engine = EngineDouble(directory, MODELS[model](), ours)
        self.connector: Any = self.engine.connector
        self.manager = self.connector.manager
        self.manager._questions.late = delay > 0
        self.fronts: list[FrontNamespace] = []
        for group in self.manager._groups.values():
            front = FrontNamespace(group.namespace, delay=delay, far=far)
            group.namespace = front
            self.fronts.append(front)
        self._memory = bytearray(BYTES)
        self._count = 0

    def close(self) -> None:
        self.engine.close()

    def keys_handed(self) -> int:
        """Keys that the depot was given so far."""
        return sum(front.keys for front in self.fronts)

    def put(self, names: Sequence[bytes], *groups: int) -> None:
        """Store blocks in these KV groups, or in all."""
        for number in groups or range(len(self.fronts)):
            namespace = self.fronts[number]._namespace._namespace
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            same = kvdepot.Spans(
                ranges=[(address, BYTES, BYTES)], rows=[[0]] * len(names), owner=self._memory
            )
            namespace.put(list(names), same).wait_released(60)
            assert all(namespace.contains(list(names)))

    def remove(self, names: Sequence[bytes]) -> None:
        for front in self.fronts:
            front._namespace._namespace.remove(list(names))

    def request(self, blocks: Sequence[bytes], **params: Any) -> Any:
        """A request whose prompt has these blocks and one token more."""
        self._count += 1
        tokens = len(blocks) * BLOCK + 1
        made = SimpleNamespace(
            num_preemptions=0,
            request_id=f"lookup-{self._count}",
            block_hashes=list(blocks),
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            kv_transfer_params=params or None,
            kv_hints=None,
            lora_request=None,
            mm_features=[],
            skip_reading_prefix_cache=False,
            is_finished=lambda: False,
        )
        self.connector.on_new_request(made)
        return made

    def look(self, request: Any, computed_tokens: int = 0) -> int | None:
        """Tokens that can be loaded; None if the scheduler has to ask again."""
        matched, _ = self.connector.get_num_new_matched_tokens(request, computed_tokens)
        return matched

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """In this block vLLM looks blocks up itself, and asks the manager for each of them."""
        scheduler = vars(self.connector.scheduler)
        names = ("_maximal_prefix_lookup", "_sliding_window_lookup")
        ours = {name: scheduler.pop(name) for name in names}
        try:
            yield
        finally:
            scheduler.update(ours)

    def end_step(self) -> None:
        for front in self.fronts:
            front.steps += 1
        end_step(self.manager)

    def wait(self, request: Any, steps: int = 100) -> int:
        """Tokens that can be loaded, after steps in which that is not known."""
        for _ in range(steps):
            matched = self.look(request)
            if matched is not None:
                return matched
            self.end_step()
        raise AssertionError("the request waits without end")

    def admit(self, request: Any, matched: int) -> list[int]:
        """Load what was found, as after the allocation of KV memory; the jobs that does it."""
        groups = []
        for config in self.connector.scheduler.config.kv_group_configs:
            window = config.sliding_window_size_in_chunks
            first = 0 if window is None else max(0, matched // BLOCK - window)
            count = len(request.block_hashes) + 1
            blocks = [SimpleNamespace(block_id=0, is_null=True, block_hash=None)] * first
            for number in range(first, count):
                block = SimpleNamespace(block_id=number + 1, is_null=False, block_hash=None)
                blocks.append(block)
            groups.append(blocks)
        jobs = self.connector.scheduler._current_batch_load_jobs
        before = set(jobs)
        blocks_of_request: Any = SimpleNamespace(blocks=groups)
        self.connector.update_state_after_alloc(request, blocks_of_request, matched)
        return [job for job in jobs if job not in before]

    def loaded(self, job: int, report: WorkerReport | None = None) -> None:
        """The worker reports that a load has ended."""
        spec = self.connector.scheduler._current_batch_load_jobs.pop(job).src_spec
        meta = KvdepotWorkerMetadata(
            completed_jobs={job: 1}, reports={spec.ticket: {0: report or WorkerReport()}}
        )
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def offer(self, request: Any) -> Any:
        """Offer all blocks to be stored, as after their computation."""
        state = self.connector.scheduler._req_status[request.request_id]
        state.update_offload_keys()
        keys = [key for group in state.group_states for key in group.offload_keys]
        return self.manager.prepare_store(keys, state.req_context)

    def store(self, blocks: Sequence[bytes]) -> None:
        """Store blocks as another request that has computed them."""
        request = self.request(blocks)
        spec = self.offer(request).store_spec
        checksums: list[bytes | None] = []
        mover = kvdepot.attach(spec.socket, with_owner=True)
        for _, placements, _ in spec.groups:
            memory = bytearray(BLOCK * ENGINE_BYTES * len(placements))
            job = mover.store(placements, spans(memory, len(placements)))
            assert job.wait(60)
            checksums += job.checksums
        mover.close()
        report = WorkerReport(checksums=checksums)
        meta = KvdepotWorkerMetadata(reports={spec.ticket: {0: report}})
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
        self.finish(request)

    def finish(self, request: Any) -> None:
        state = self.connector.scheduler._req_status[request.request_id]
        self.manager.on_request_finished(state.req_context)

    def pinned(self) -> int:
        """Blocks that are pinned in the first tier."""
        return int(self.manager.depot.stats()["tiers"]["Cache"]["pinned_blocks"])

    def capacity_blocks(self) -> int:
        """Blocks of the smallest size that the first tier holds."""
        tier = self.manager.depot.stats()["tiers"]["Cache"]
        return int(tier["capacity_bytes"]) // EXTENT

    @staticmethod
    def keys(blocks: Sequence[bytes], group: int = 0) -> list[Any]:
        return [make_offload_key(each, group) for each in blocks]
