"""Compares hits of 1 MiB blocks on another host with plain TCP: `make bench-peer`.

The two hosts are network namespaces, connected by veth pairs and a bridge. All blocks are stored on
the other host. The limit is the better of one and two plain connections that transfer the same
bytes by sends of 1 MiB into resident memory, in the same rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import kvdepot
import numpy as np

BLOCK = 1 << 20
PORT, PLAIN = 7400, 7401


def _depot(own: str, hosts: list[tuple[str, str, str]], capacity: str) -> kvdepot.Depot:
    listed = ", ".join(f"{name} {address}:{PORT} {share}" for name, address, share in hosts)
    peer = {"name": own, "token": "shared", "hosts": listed, "capacity": capacity}
    return kvdepot.open("Peer", {"peer": peer})


def _keys(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(count)]


def _fields() -> dict[str, Any]:
    return {"model": "bench", "dtype": "uint8", "block_tokens": 16}


def home(hosts: list[tuple[str, str, str]], blocks: int) -> None:
    """The host that has them, and a plain server."""
    memory = np.random.default_rng(1).integers(0, 256, (blocks, BLOCK), dtype=np.uint8)
    with _depot("home", hosts, hosts[0][2]) as here:
        space = here.namespace(**_fields())
        stored = space.put(_keys(blocks), list(memory)).wait(timeout=60)
        listener = socket.create_server((hosts[0][1], PLAIN))
        print(sum(stored), flush=True)

        def serve(one: socket.socket) -> None:
            with one:
                while asked := one.recv(8, socket.MSG_WAITALL):
                    for number in range(int.from_bytes(asked, "little")):
                        one.sendall(memory[number % blocks])

        def accept() -> None:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()


def plain(lines: list[socket.socket], into: np.ndarray) -> float:
    """Seconds for all of it over these."""
    shares = np.array_split(np.arange(len(into)), len(lines))

    def receive(line: socket.socket, share: np.ndarray) -> None:
        line.sendall(len(share).to_bytes(8, "little"))
        for number in share:
            view = memoryview(into[number])
            while view:
                view = view[line.recv_into(view, 0, socket.MSG_WAITALL) :]

    threads = [
        threading.Thread(target=receive, args=pair) for pair in zip(lines, shares, strict=True)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def asker(hosts: list[tuple[str, str, str]], blocks: int, rounds: int) -> None:
    """The host that wants them; prints a row."""
    into = np.zeros((blocks, BLOCK), dtype=np.uint8)
    lines = [socket.create_connection((hosts[0][1], PLAIN)) for _ in range(2)]
    times: dict[str, list[float]] = {"one": [], "two": [], "peer": []}
    hits: list[int] = []
    with _depot("asker", hosts, hosts[1][2]) as here:
        space = here.namespace(**_fields())
        for number in range(rounds + 1):
            taken = {"one": plain(lines[:1], into), "two": plain(lines, into)}
            began = time.perf_counter()
            hits.append(sum(space.get(_keys(blocks), list(into)).wait(timeout=60)))
            taken["peer"] = time.perf_counter() - began
            for name, seconds in taken.items() if number else ():
                times[name].append(seconds)
    rates = {name: blocks * BLOCK / statistics.median(all_) / 1e9 for name, all_ in times.items()}
    best = [min(pair) for pair in zip(times["one"], times["two"], strict=True)]
    ratios = [limit / seconds for limit, seconds in zip(best, times["peer"], strict=True)]
    row = {
        "bench": "peer",
        "case": {"op": "read", "bytes": blocks * BLOCK, "chunks": blocks, "where": "veth"},
        "metric": "peer_over_tcp",
        "unit": "GB/s",
        "value": round(rates["peer"], 3),
        "limit": round(max(rates["one"], rates["two"]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "rounds": rounds,
        "hits": min(hits),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """Run it, or be one of its hosts."""
    parser = argparse.ArgumentParser(prog="python -m peer", description=__doc__)
    parser.add_argument(
        "--blocks", type=int, default=128, help="number of blocks of 1 MiB (default: 128)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default: 9)")
    parser.add_argument("--role", choices=("home", "asker"), help=argparse.SUPPRESS)
    parser.add_argument("--hosts", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        hosts = [tuple(one) for one in json.loads(given.hosts)]
        if given.role == "home":
            home(hosts, given.blocks)
        else:
            asker(hosts, given.blocks, given.rounds)
        return
    from hosts import Hosts, why_not

    if reason := why_not():
        sys.exit(f"error: {reason}")
    with Hosts(2) as made:
        share = f"{2 * given.blocks}MiB"
        hosts = [("home", made[0].address, share), ("asker", made[1].address, "1MiB")]
        own = [sys.executable, "-m", "peer", "--blocks", str(given.blocks)]
        own += ["--rounds", str(given.rounds), "--hosts", json.dumps(hosts)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        first = made[0].start(*own, "--role", "home", **pipes)
        assert first.stdout is not None
        print(f"{first.stdout.readline().strip()} blocks stored", file=sys.stderr)
        second = made[1].start(*own, "--role", "asker", stdout=subprocess.PIPE)
        print(second.communicate()[0].strip())
        first.kill()
        first.wait()


if __name__ == "__main__":
    main()
