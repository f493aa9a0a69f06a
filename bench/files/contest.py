"""Contenders that store and load the same blocks in turns, of which kvdepot's `Posix` is one."""

from __future__ import annotations

import contextlib
import mmap
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kvdepot
import numpy as np
import xxhash
from typing_extensions import override

TOKENS = 16
PATIENCE = 120.0
"""Seconds after which something is wrong."""
OPS = ("store", "load")


def processor_seconds() -> float:
    """Of all threads of this process, those of the kernel that work for it too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Contest:
    """Contenders that store and load blocks of one size."""

    def __init__(
        self, folder: Path, count: int, block: int, jobs: int, others: Mapping[str, Kind]
    ) -> None:
        self.count, self.block = count, block
        self._closing = contextlib.ExitStack()
        share = -(-count // jobs)
        self.jobs = [range(at, min(at + share, count)) for at in range(0, count, share)]
        content = np.random.default_rng(1).integers(0, 256, count * block, dtype=np.uint8)
        self.content = content.reshape(count, block)
        self.contenders: dict[str, Contender] = {}
        for name, kind in ({"kvdepot": Kvdepot} | dict(others)).items():
            (folder / name).mkdir()
            self.contenders[name] = contender = kind(self, folder / name)
            self._closing.callback(contender.close)

    def close(self) -> None:
        """Close what was opened, the last first."""
        self._closing.close()

    def measure(self, rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """Seconds and processor seconds of each; contenders take turns in going first."""
        names = list(self.contenders)
        runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(rounds + 1):
            turn = number % len(names)
            for op in OPS:
                for name in names[turn:] + names[:turn]:
                    run = self._run(self.contenders[name], op, number)
                    if number > 0:  # the first warms up
                        runs.setdefault((name, op), []).append(run)
            if number > 0:
                runs.setdefault(("hashing", "load"), []).append(self._hashing())
        return runs

    def _run(self, contender: Contender, op: str, number: int) -> tuple[float, float]:
        if op == "load":
            contender.wipe()
        before, start = processor_seconds(), time.perf_counter()
        getattr(contender, op)(number)
        taken = time.perf_counter() - start, processor_seconds() - before
        if op == "load" and not contender.is_right():
            raise RuntimeError(f"{type(contender).__name__} has not loaded what was stored")
        contender.settle()
        return taken

    def _hashing(self) -> tuple[float, float]:
        before, start = processor_seconds(), time.perf_counter()
        for row in self.content:
            xxhash.xxh3_128_digest(row)
        return time.perf_counter() - start, processor_seconds() - before


class Contender:
    """What stores a round's blocks and loads them."""

    def store(self, number: int) -> None:
        """All blocks, as new ones."""
        raise NotImplementedError

    def load(self, number: int) -> None:
        """What that round has stored."""
        raise NotImplementedError

    def wipe(self) -> None:
        """Makes sure that what is loaded is seen."""
        raise NotImplementedError

    def is_right(self) -> bool:
        """Whether all was loaded."""
        raise NotImplementedError

    def setting(self, op: str) -> str:
        """What was chosen for `op`, where something was."""
        return ""

    def settle(self) -> None:
        """What is not timed and has to follow a run."""

    def close(self) -> None:
        """Give back what it has."""


Kind = Callable[[Contest, Path], Contender]


class InMemory(Contender):
    """One that moves blocks from and to memory of huge pages which it is given."""

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        # Private: shared memory has no huge pages in most systems.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, contest.count * contest.block, flags=flags)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self.memory, dtype=np.uint8).reshape(contest.content.shape)
        self.array[:] = contest.content

    @override
    def wipe(self) -> None:
        """One byte of each page is enough to tell."""
        self.array[:, ::4096] += 1

    @override
    def is_right(self) -> bool:
        """Byte by byte."""
        return bool(np.array_equal(self.array, self.contest.content))

    def keys(self, number: int, job: range) -> list[bytes]:
        """32 bytes each, as a hash would give them."""
        return [xxhash.xxh3_128_digest(f"{number}/{at}".encode()) * 2 for at in job]


class Kvdepot(InMemory):
    """The tier Posix, with checksums."""

    def __init__(self, contest: Contest, folder: Path) -> None:
        super().__init__(contest)
        posix = {"path": str(folder / "tier"), "capacity": "1TiB"}
        self.depot = kvdepot.open("Posix", {"posix": posix, "socket": "off"})
        self.ns = self.depot.namespace(model="bench", dtype="uint8", block_tokens=TOKENS)
        self.base = self.array.ctypes.data

    def _all(self, verb: Callable[[bytes, Any], Any], number: int) -> None:
        block = self.contest.block
        tasks = [
            verb(b"".join(self.keys(number, job)), [(self.base + at * block, block) for at in job])
            for job in self.contest.jobs
        ]
        if not all(all(task.wait(timeout=PATIENCE)) for task in tasks):
            raise RuntimeError("kvdepot: not every block was moved")

    @override
    def store(self, number: int) -> None:
        self._all(self.ns.put, number)

    @override
    def load(self, number: int) -> None:
        self._all(self.ns.get, number)

    @override
    def close(self) -> None:
        self.depot.close()
