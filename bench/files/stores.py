"""The contenders of run_ucm.py beside kvdepot: UCM's store `Posix`, and NIXL's plug-in POSIX."""

from __future__ import annotations

import logging
import os
import resource
import statistics
import sys
import time
from abc import abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from contest import OPS, PATIENCE, Contest, InMemory
from typing_extensions import override

if "torch" not in sys.modules:
    # Both name its tensors in their types, and take addresses: a gigabyte less to install.
    sys.modules["torch"] = torch = ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]

from nixl_cu12 import nixl_agent, nixl_agent_config
from ucm.store.pipeline.connector import UcmPipelineStore

TRIALS = 3
"""Times that a setting is tried, the first to warm up."""


class Tuned(InMemory):
    """One that is opened with several settings, and keeps for each op the fastest here."""

    settings: tuple[tuple[str, Any], ...]
    """What is tried, by what it is called."""

    def __init__(self, contest: Contest, folder: Path) -> None:
        super().__init__(contest)
        self.folder = folder
        self.best: dict[str, tuple[float, str, Any]] = {}
        for at, (called, setting) in enumerate(self.settings):
            opened = self.open(setting)
            taken = self._try(opened, range(-1 - at * TRIALS, -1 - (at + 1) * TRIALS, -1))
            for op in OPS:
                if op not in self.best or taken[op] < self.best[op][0]:
                    self.best[op] = (taken[op], called, opened)
        self.array[:] = contest.content

    def _try(self, opened: Any, numbers: range) -> dict[str, float]:
        runs: dict[str, list[float]] = {op: [] for op in OPS}
        for number in numbers:
            for op in OPS:
                start = time.perf_counter()
                self.move(opened, op, number)
                runs[op].append(time.perf_counter() - start)
        return {op: statistics.mean(run[1:]) for op, run in runs.items()}

    @abstractmethod
    def open(self, setting: Any) -> Any:
        """What moves blocks with `setting`."""

    @abstractmethod
    def move(self, opened: Any, op: str, number: int) -> None:
        """All blocks of a round."""

    @override
    def store(self, number: int) -> None:
        self.move(self.best["store"][2], "store", number)

    @override
    def load(self, number: int) -> None:
        self.move(self.best["load"][2], "load", number)

    @override
    def setting(self, op: str) -> str:
        return self.best[op][1]

    @override
    def close(self) -> None:
        self.best.clear()


class Ucm(Tuned):
    """UCM's pipeline `Posix`, past the page cache, as its connector drives it: addresses."""

    # The last of each engine is what it comes with.
    settings = (
        ("psync, 8 threads", {"posix_data_trans_concurrency": 8}),
        ("psync, 32 threads", {"posix_data_trans_concurrency": 32}),
        ("psync, 128 threads", {"posix_data_trans_concurrency": 128}),
        ("aio, 2 openers", {"posix_open_concurrency": 2, "posix_commit_concurrency": 2}),
        ("aio, 8 openers", {"posix_open_concurrency": 8, "posix_commit_concurrency": 8}),
        ("aio, 32 openers", {}),
    )

    @override
    def open(self, setting: Any) -> Any:
        block = self.contest.block
        engine = "psync" if "posix_data_trans_concurrency" in setting else "aio"
        return UcmPipelineStore(
            {
                "store_pipeline": "Posix",
                "storage_backends": [str(self.folder)],
                "unique_id": f"bench-{os.getpid()}",
                "device_id": 0,
                "tensor_size": block,
                "shard_size": block,
                "block_size": block,
                "io_direct": True,
                "posix_io_engine": engine,
                "timeout_ms": int(PATIENCE * 1000),
            }
            | setting
        )

    @override
    def move(self, opened: Any, op: str, number: int) -> None:
        verb = opened.dump_data if op == "store" else opened.load_data
        addresses = self.array.ctypes.data + self.contest.block * np.arange(
            self.contest.count, dtype=np.uint64
        )
        ids, tasks = [], []
        for job in self.contest.jobs:
            ids.append([key[:16] for key in self.keys(number, job)])
            rows = addresses[job.start : job.stop].reshape(-1, 1)
            tasks.append(verb(ids[-1], [0] * len(job), rows))
        for task in tasks:
            opened.wait(task)
        # With `aio` a dump has ended before its last blocks are named: a load would not find them.
        while op == "store" and not all(opened.lookup(of_job).all() for of_job in ids):
            pass


class Nixl(Tuned):
    """NIXL's plug-in POSIX: files that are opened, registered, moved and closed, job by job."""

    settings = (("libaio", "use_aio"), ("io_uring", "use_uring"), ("POSIX aio", "use_posix_aio"))

    def __init__(self, contest: Contest, folder: Path) -> None:
        # All of a round's files are open at a time.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        super().__init__(contest, folder)

    @override
    def open(self, setting: Any) -> Any:
        logging.getLogger("nixl_cu12").setLevel(logging.WARNING)
        agent = nixl_agent(setting, nixl_agent_config(backends=[]))
        agent.create_backend("POSIX", {setting: "true"})
        agent.register_memory([(self.array.ctypes.data, self.array.nbytes, 0, "")], "DRAM")
        return agent

    @override
    def move(self, opened: Any, op: str, number: int) -> None:
        under_way = [self._begin(opened, op, number, job) for job in self.contest.jobs]
        for transfer, files, descriptors in under_way:
            state = "PROC"
            while state == "PROC":
                state = opened.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"NIXL: a {op} ended as {state}")
            opened.release_xfer_handle(transfer)
            opened.deregister_memory(files)
            for descriptor in descriptors:
                os.close(descriptor)

    def _begin(self, agent: Any, op: str, number: int, job: range) -> tuple[Any, Any, list[int]]:
        flags = os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if op == "store" else os.O_RDONLY)
        block, base = self.contest.block, self.array.ctypes.data
        descriptors = [
            os.open(self.folder / key[:16].hex(), flags, 0o600) for key in self.keys(number, job)
        ]
        files = agent.register_memory([(0, block, file, "") for file in descriptors], "FILE")
        memory = agent.get_xfer_descs([(base + at * block, block, 0) for at in job], "DRAM")
        pieces = agent.get_xfer_descs([(0, block, file) for file in descriptors], "FILE")
        verb = "WRITE" if op == "store" else "READ"
        transfer = agent.initialize_xfer(verb, memory, pieces, agent.name)
        agent.transfer(transfer)
        return transfer, files, descriptors


BATCHES_TRIED = TRIALS * (len(Ucm.settings) + len(Nixl.settings))
