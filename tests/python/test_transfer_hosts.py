"""The transfer engine between hosts: cables that are pulled, slow, lossy and resetting, and peers
that stop and die. Each request is over in its time, and no byte is wrong.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hosts import Host, Hosts, until, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SIZE = 8 << 20
EACH = 16 << 10
PORT = 7000

COMMON = """
import json, sys, threading, time
import numpy as np
from kvdepot.transfer import STATUSES, Engine

def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

def strange(memory, *allowed):
    wrong = np.ones(len(memory), dtype=bool)
    for one in allowed:
        wrong &= memory != one
    return int(wrong.sum())
"""

# What it has is of seed 0, until all of another seed is written.
HOME = (
    COMMON
    + """
size, address = int(sys.argv[1]), sys.argv[2]
memory = pattern(size, 0)
with Engine(address, token="shared", local=False) as engine:
    with engine.publish("home", [memory], "both"):
        print("ready", flush=True)
        for line in sys.stdin:
            before, seed = json.loads(line)
            print(strange(memory, pattern(size, before), pattern(size, seed)), flush=True)
"""
)

NEAR = (
    COMMON
    + """
size, each, address, checksum = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
memory = np.zeros(size, dtype=np.uint8)
# What continues another piece on both sides is one range with it: from the end, none does.
offset = np.arange(0, size, each, dtype=np.uint64)
local = offset[::-1] + np.uint64(memory.ctypes.data)
lag = 0.0

def here(seed):
    return pattern(size, seed).reshape(-1, each)[::-1].ravel()

def watch():
    # How late this machine lets a thread run that wants to: no fault of the engine.
    global lag
    while True:
        begun = time.monotonic()
        time.sleep(0.005)
        lag = max(lag, time.monotonic() - begun - 0.005)

threading.Thread(target=watch, daemon=True).start()
with Engine(listen=None, token="shared", timeout="500ms", local=False, slice_size="64KiB",
            tail_merge="4KiB", checksum=checksum == "on") as engine, engine.register([memory]):
    remote = None
    for line in sys.stdin:
        told = json.loads(line)
        op, seed, timeout = told["op"], told["seed"], told["timeout"]
        if remote is None or told["open"]:
            try:
                remote = engine.open(address, "home")
            except Exception as error:
                print(json.dumps({"statuses": {type(error).__name__: 1}}), flush=True)
                continue
        memory[:] = here(seed) if op == "write" else 0
        lag = 0.0
        ended = []
        begun = time.monotonic()
        task = engine.submit(op=op, local=local, remote=remote, offset=offset, length=each,
                             timeout=timeout, callback=lambda _: ended.append(time.monotonic()))
        print("begun", flush=True)
        task.wait()
        took = time.monotonic() - begun
        all = np.frombuffer(task.statuses, dtype=np.uint8)
        wrong = 0
        if op == "read":
            want, known = here(seed), here(told["before"])
            done = np.repeat(all[::-1] == STATUSES.index("done"), each)
            # What has failed has its bytes, or none yet.
            wrong = strange(memory[done], want[done], known[done])
            wrong += strange(memory[~done], want[~done], known[~done], np.uint8(0))
        names, counts = np.unique(all, return_counts=True)
        statuses = {STATUSES[name]: int(count) for name, count in zip(names, counts)}
        print(json.dumps({"statuses": statuses, "took": took, "lag": lag, "wrong": wrong}),
              flush=True)
"""
)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Pair:
    """A home on one host, and who reads and writes it from another one."""

    def __init__(self, near: Host, home: Host, checksum: str) -> None:
        self.hosts = (near, home)
        self.home: subprocess.Popen[str]
        self.start_home()
        address = f"{home.address}:{PORT}"
        arguments = (str(SIZE), str(EACH), address, checksum)
        self.near = self._start(near, NEAR, *arguments)
        self.before = self.seed = 0
        self.opens = False
        self.late: list[float] = []

    @staticmethod
    def _start(host: Host, code: str, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return host.start(sys.executable, "-c", code, *arguments, **pipes)

    def start_home(self) -> None:
        _, home = self.hosts
        self.home = self._start(home, HOME, str(SIZE), f"{home.address}:{PORT}")
        assert line_of(self.home) == "ready"
        self.before = self.seed = 0
        self.opens = True

    @staticmethod
    def _tell(process: subprocess.Popen[str], what: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def begin(self, op: str, timeout: float) -> bool:
        """Begins a batch; False where it could not be opened."""
        if op == "write":
            self.seed += 1
        told = {"op": op, "seed": self.seed, "before": self.before}
        self._tell(self.near, told | {"timeout": timeout, "open": self.opens})
        line = line_of(self.near)
        self._refused = None if line == "begun" else json.loads(line)
        self.opens = self._refused is not None
        return self._refused is None

    def end(self, timeout: float) -> dict[str, int]:
        """Statuses of a batch, which has ended in its time, without a wrong byte."""
        if self._refused is not None:
            statuses: dict[str, int] = self._refused["statuses"]
            return statuses
        said = json.loads(line_of(self.near))
        assert said["wrong"] == 0, said
        statuses = said["statuses"]
        if statuses.keys() - {"done"}:
            self.late.append(said["took"] - timeout - said["lag"])
        assert sum(statuses.values()) == SIZE // EACH
        return statuses

    def batch(self, op: str, timeout: float = 10.0) -> dict[str, int]:
        self.begin(op, timeout)
        return self.end(timeout)

    def in_the_middle(
        self, op: str, timeout: float, disturb: Callable[[], None], mend: Callable[[], None]
    ) -> dict[str, int]:
        """Statuses of a batch in whose middle something is done to the hosts."""
        for _ in range(10):
            self.hosts[1].slow("100mbit")
            self.begin(op, timeout)
            time.sleep(0.15)
            disturb()
            statuses = self.end(timeout)
            if 0 < statuses.get("done", 0) < SIZE // EACH:
                assert set(statuses) <= {"done", "timed_out", "lost"}, statuses
                return statuses
            # On a busy machine it may not have begun, or be over.
            mend()
            self.works_again()
        raise AssertionError(f"never in the middle of a batch: {statuses}")

    def is_sound(self) -> bool:
        """Whether home has nothing but what was written; all of the last, if it ended well."""
        self._tell(self.home, [self.before, self.seed])
        return line_of(self.home) == "0"

    def works_again(self) -> None:
        """All of it is written and read, in the end."""
        all_done = {"done": SIZE // EACH}
        until("a write", lambda: self.batch("write") == all_done)
        self.before = self.seed
        assert self.is_sound()
        assert self.batch("read") == all_done

    def close(self) -> None:
        for process in (self.near, self.home):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module", params=["on", "off"], ids=["checksum", "bare"])
def one_pair(hosts: list[Host], request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(hosts[0], hosts[1], request.param)
    yield pair
    pair.close()
    # On a busy machine most may be later; without the engine's clock all would be, by minutes.
    assert min(pair.late, default=0.0) <= 0.1, pair.late
    assert max(pair.late, default=0.0) <= 20, pair.late


@pytest.fixture
def pair(one_pair: Pair) -> Iterator[Pair]:
    """As it is when all is well."""
    one_pair.works_again()
    yield one_pair
    for host in one_pair.hosts:
        host.heal()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_cable_that_is_pulled_costs_a_batch_its_time(pair: Pair, op: str) -> None:
    near, home = pair.hosts
    pair.in_the_middle(op, 0.5, home.cut, home.heal)
    # Nobody is there.
    statuses = pair.batch(op, 0.3)
    assert set(statuses) <= {"timed_out", "lost"}, statuses
    home.heal()
    pair.works_again()
    near.cut()
    assert "done" not in pair.batch(op, 0.3)
    near.join()
    pair.works_again()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_cable_that_is_back_in_time_costs_no_request(pair: Pair, op: str) -> None:
    _, home = pair.hosts
    home.slow("100mbit")
    pair.begin(op, 20)
    time.sleep(0.15)
    home.cut()
    time.sleep(0.2)
    home.heal()
    assert pair.end(20) == {"done": SIZE // EACH}


@pytest.mark.skipif(shutil.which("nft") is None, reason="there is no nft (Debian: nftables)")
@pytest.mark.parametrize("rule", ["drop", "reject with tcp reset"])
def test_packets_that_are_lost_or_reset_cost_at_most_requests(pair: Pair, rule: str) -> None:
    for host in pair.hosts:
        host.on_arrival(f"numgen random mod 100 < 1 counter {rule}")
        for op in ("read", "write"):
            statuses = pair.batch(op, 3)
            assert set(statuses) <= {"done", "lost", "timed_out", "Error"}, statuses
        host.heal()
        pair.works_again()


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_peer_that_ends_in_a_batch_costs_it_its_time(pair: Pair, op: str, kind: int) -> None:
    _, home = pair.hosts

    def mend() -> None:
        home.heal()
        if kind == signal.SIGSTOP:
            pair.home.send_signal(signal.SIGCONT)
        else:
            pair.home.wait()
            pair.start_home()

    pair.in_the_middle(op, 0.6, lambda: pair.home.send_signal(kind), mend)
    mend()
    pair.works_again()
