"""One depot over three hosts: a cable that is pulled, a host that is killed and comes back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hosts import Host, Hosts, until, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BLOCKS = 48
TIMEOUT = 2.0

# Answers each line of [verb, first, count] with [trues, wrong bytes, seconds].
HOST = """
import hashlib, json, sys, time
import kvdepot
import numpy as np

own, hosts, timeout = sys.argv[1:]
depot = kvdepot.open("Cache|Peer", {
    "cache": {"capacity": "2MiB"},
    "peer": {"name": own, "hosts": hosts, "token": "shared", "capacity": "64MiB",
             "timeout": timeout, "lookup_timeout": timeout},
})
space = depot.namespace(model="m", dtype="uint8", block_tokens=16)

def block(number):
    return np.random.default_rng(number).integers(0, 256, 300_001, dtype=np.uint8)

print("ready", flush=True)
for line in sys.stdin:
    verb, first, count = json.loads(line)
    numbers = range(first, first + count)
    keys = [hashlib.sha256(str(number).encode()).digest() for number in numbers]
    began = time.monotonic()
    if verb == "kept":
        done, wrong = [depot.stats()["tiers"]["Peer"]["blocks"]], 0
    elif verb == "put":
        done, wrong = space.put(keys, [block(one) for one in numbers]).wait(timeout=60), 0
        depot.drain(30)
    else:
        into = [np.zeros(300_001, dtype=np.uint8) for _ in numbers]
        done = space.get(keys, into).wait(timeout=60)
        pairs = zip(numbers, into, done)
        wrong = sum(ok and bool((one != block(number)).any()) for number, one, ok in pairs)
    print(json.dumps([sum(done), wrong, time.monotonic() - began]), flush=True)
"""


class Depot:
    """A depot on a host."""

    def __init__(self, host: Host, listed: str) -> None:
        self.host, self._listed = host, listed
        self.start()

    def start(self) -> None:
        command = (sys.executable, "-c", HOST, self.host.name, self._listed, f"{TIMEOUT}s")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = self.host.start(*command, **pipes)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, verb: str, first: int = 0, count: int = BLOCKS) -> tuple[int, float]:
        """How many keys are true, none of them with a wrong byte, and how long it took."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, first, count]) + "\n")
        self.process.stdin.flush()
        done, wrong, seconds = json.loads(self._line())
        assert wrong == 0
        return done, seconds

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def depots() -> Iterator[list[Depot]]:
    with Hosts(3) as hosts:
        listed = ", ".join(f"{host.name} {host.address}:7400" for host in hosts)
        made = [Depot(host, listed) for host in hosts]
        fresh = itertools.count(1000, 8)

        def are_met() -> bool:
            """Those that were there before the others have met them by now."""
            made[0].ask("put", next(fresh), 8)
            return all(depot.ask("kept")[0] > 0 for depot in made)

        until("all are met", are_met)
        try:
            yield made
        finally:
            for depot in made:
                depot.kill()


def test_hosts_share_what_one_has_stored_whatever_becomes_of_the_others(
    depots: list[Depot],
) -> None:
    first, second, third = depots
    until("stored", lambda: first.ask("put")[0] == BLOCKS)
    until("read by the others", lambda: second.ask("get")[0] == BLOCKS)
    until("read by the others", lambda: third.ask("get")[0] == BLOCKS)

    # A cable that is pulled: in time, and then at once; what is on the others is there.
    third.host.cut()
    left, seconds = second.ask("get")
    assert 0 < left < BLOCKS
    # Each block by itself would take as long.
    assert seconds < (BLOCKS - left) * TIMEOUT
    until("left alone", lambda: second.ask("get")[1] < 0.5)
    assert second.ask("get")[0] >= left
    third.host.join()
    until("back", lambda: second.ask("get")[0] == BLOCKS)

    # A process that is killed: its own blocks are misses, and are put again.
    third.kill()
    lost = BLOCKS - second.ask("get")[0]
    assert lost > 0
    until("stored elsewhere", lambda: first.ask("put")[0] == BLOCKS)
    until("read", lambda: second.ask("get")[0] == BLOCKS)
    third.start()
    until("met again", lambda: third.ask("get")[0] == BLOCKS)
    until("all at once", lambda: first.ask("get")[0] == BLOCKS)
