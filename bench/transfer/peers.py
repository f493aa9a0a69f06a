"""Other systems' engines as run.py drives them: `peers.py NAME BYTES`, and a line a batch.

Each line is an op, the bytes of a piece and how many pieces; the answer is seconds, and processor
seconds of both processes. The target is a process of its own, `peers.py NAME BYTES --target`, with
as much memory.
"""

from __future__ import annotations

import os

# Before the libraries are loaded. Mooncake refuses batches of more than some 2,000 pieces without.
os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
os.environ.setdefault("GLOG_minloglevel", "2")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ["UCX_TLS"] = "tcp"
os.environ["UCX_NET_DEVICES"] = "lo"
os.environ.setdefault("UCX_LOG_LEVEL", "error")

import ctypes
import functools
import mmap
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

HOST = "127.0.0.1"


class Memory:
    """Memory of huge pages that has been touched."""

    def __init__(self, size: int, seed: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.bytes = mmap.mmap(-1, size, flags=flags)
        self.bytes.madvise(mmap.MADV_HUGEPAGE)
        piece = random.Random(seed).randbytes(1 << 20)
        for at in range(0, size, len(piece)):
            part = min(len(piece), size - at)
            self.bytes[at : at + part] = piece[:part]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.size = size


@functools.cache
def layout(chunk: int, chunks: int) -> tuple[list[int], list[int]]:
    """Offsets here and there, in random order: no piece continues another."""
    rng = random.Random(chunks)
    sides: list[list[int]] = []
    for _ in range(2):
        offsets = [number * chunk for number in range(chunks)]
        rng.shuffle(offsets)
        sides.append(offsets)
    return sides[0], sides[1]


class Mooncake:
    """Mooncake's transfer engine over TCP, one batch a call."""

    def __init__(self, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self.memory = memory
        self.engine = TransferEngine()
        self._succeeds(self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        self._succeeds(self.engine.register_memory(memory.base, memory.size))
        self.peer = ("", 0)

    def address(self) -> str:
        """What an initiator needs to know."""
        return f"{HOST}:{self.engine.get_rpc_port()} {self.memory.base}"

    def connect(self, address: str) -> None:
        """Take what a target has said."""
        segment, base = address.split()
        self.peer = (segment, int(base))

    @functools.cache  # noqa: B019 - there is one of it in a process
    def _batch(self, chunk: int, chunks: int) -> tuple[list[int], list[int], list[int]]:
        here, there = layout(chunk, chunks)
        base = self.peer[1]
        return [self.memory.base + at for at in here], [base + at for at in there], [chunk] * chunks

    def prepare(self, op: str, chunk: int, chunks: int) -> Any:
        """All that is not timed."""
        return op, self._batch(chunk, chunks)

    def move(self, prepared: Any) -> None:
        """Move a batch."""
        op, batch = prepared
        verb = self.engine.batch_transfer_sync_write
        if op == "read":
            verb = self.engine.batch_transfer_sync_read
        self._succeeds(verb(self.peer[0], *batch))

    @staticmethod
    def _succeeds(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"Mooncake: status {status}")


class Nixl:
    """NIXL's agent with UCX over TCP, with lists that were prepared before."""

    def __init__(self, memory: Memory) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory = memory
        self.agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(memory.base, memory.size, 0, "")], "DRAM")
        self.peer = ("", 0)

    def address(self) -> str:
        """What an initiator needs to know."""
        return f"{self.agent.get_agent_metadata().hex()} {self.memory.base}"

    def connect(self, address: str) -> None:
        """Take what a target has said."""
        metadata, base = address.split()
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        self.peer = (name.decode() if isinstance(name, bytes) else name, int(base))

    @functools.cache  # noqa: B019 - there is one of it in a process
    def _lists(self, chunk: int, chunks: int) -> tuple[Any, Any]:
        here, there = layout(chunk, chunks)
        ours = [(self.memory.base + at, chunk, 0) for at in here]
        theirs = [(self.peer[1] + at, chunk, 0) for at in there]
        return (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
            self.agent.prep_xfer_dlist(self.peer[0], theirs, "DRAM"),
        )

    def prepare(self, op: str, chunk: int, chunks: int) -> Any:
        """All that is not timed."""
        return op, self._lists(chunk, chunks), list(range(chunks))

    def move(self, prepared: Any) -> None:
        """Move a batch."""
        op, (ours, theirs), numbers = prepared
        handle = self.agent.make_prepped_xfer(op.upper(), ours, numbers, theirs, numbers)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")


PEERS = {"mooncake": Mooncake, "nixl": Nixl}


def processor_seconds(of: str) -> float:
    """Processor time of a process, by its number, or `self`."""
    if of == "self":
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    total = 0
    for thread in os.listdir(f"/proc/{of}/task"):
        with open(f"/proc/{of}/task/{thread}/schedstat") as stat:
            total += int(stat.read().split()[0])
    return total / 1e9


def drive(name: str, size: int) -> None:
    """The initiator: a target, and what the lines say."""
    target = subprocess.Popen(
        [sys.executable, __file__, name, str(size), "--target"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert target.stdin is not None
    assert target.stdout is not None
    try:
        memory = Memory(size, 1)
        peer: Any = PEERS[name](memory)
        peer.connect(wanted(target.stdout))
        print("ready", flush=True)
        for line in sys.stdin:
            op, chunk, chunks = line.split()[:3]
            print(*timed(peer, str(target.pid), op, int(chunk), int(chunks)), flush=True)
    finally:
        target.stdin.close()
        target.wait()


def wanted(lines: Any) -> str:
    """What a target says, among what its libraries print."""
    for line in lines:
        if line.startswith("address "):
            return str(line.removeprefix("address "))
    raise RuntimeError("the target has ended early")


def timed(peer: Any, target: str, op: str, chunk: int, chunks: int) -> tuple[float, float]:
    """Seconds and processor seconds of a batch. A read is checked: what was written comes back."""
    prepared = peer.prepare(op, chunk, chunks)
    here = layout(chunk, chunks)[0]
    looked_at = [(at, peer.memory.bytes[at : at + chunk]) for at in here[:: len(here) // 16 or 1]]
    if op == "read":
        peer.move(peer.prepare("write", chunk, chunks))
        for at, _ in looked_at:
            peer.memory.bytes[at : at + chunk] = bytes(chunk)
    before, start = processor_seconds("self") + processor_seconds(target), time.perf_counter()
    peer.move(prepared)
    seconds = time.perf_counter() - start
    spent = processor_seconds("self") + processor_seconds(target) - before
    if any(peer.memory.bytes[at : at + chunk] != was for at, was in looked_at):
        raise RuntimeError("bytes were not moved as they are")
    return seconds, spent


def serve(name: str, size: int) -> None:
    """The target: memory that others use until the input ends."""
    peer: Any = PEERS[name](Memory(size, 2))
    print(f"address {peer.address()}", flush=True)
    sys.stdin.read()


def main(arguments: Sequence[str]) -> int:
    """One side of an engine."""
    name, size = arguments[0], int(arguments[1])
    if "--target" in arguments:
        serve(name, size)
    else:
        drive(name, size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
