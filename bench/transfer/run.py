"""Compares kvdepot's transfer engine with Mooncake and NIXL over TCP: `make bench-transfer`.

In each round, each engine moves the same batch once, one engine after the other, between its own
two processes on this host. The memory has huge pages, is resident, and is registered as a whole.
The requests of a batch are in random order on both sides, so that no request continues another one.
kvdepot runs once without checksums, as the other engines, and once with checksums. Values are
medians over the rounds, and ratios are medians over the ratios of the rounds. The received bytes of
each engine are compared with the sent bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

TABLE = "200/5000,200/10000,300/8000,400/10000,500/15000,600/12000,700/20000,700/10000"
QUICK = "200/10000,400/10000"
PEERS = {"mooncake": "batch_over_mooncake", "nixl": "batch_over_nixl"}
OPS = ("write", "read")
HERE = Path(__file__).parent


class Driver:
    """A process that moves batches as lines tell it, with its target.

    Both stand still while others have their turn: some engines' threads never rest.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._expect("ready")
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def _expect(self, word: str) -> None:
        # Libraries print what they like to.
        for line in self._pipes[1]:
            if line.strip() == word:
                return
        raise RuntimeError(f"{self.process.args!r} has ended early")

    def run(self, op: str, chunk: int, chunks: int, checksum: str) -> tuple[float, float]:
        """Seconds, and processor seconds of both of its processes."""
        tell, hear = self._pipes
        self._signal(signal.SIGCONT)
        print(op, chunk, chunks, checksum, file=tell, flush=True)
        for line in hear:
            with contextlib.suppress(ValueError):
                seconds, spent = map(float, line.split())
                self._signal(signal.SIGSTOP)
                return seconds, spent
        raise RuntimeError(f"{self.process.args!r} has ended early")

    def close(self) -> None:
        """The end of its input ends it."""
        self._signal(signal.SIGCONT)
        self._pipes[0].close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()


def batch(text: str) -> tuple[int, int]:
    """Bytes of a piece, and how many, of a text such as 200/5000."""
    megabytes, chunks = map(int, text.split("/"))
    return megabytes * 1_000_000 // chunks, chunks


def measure(
    drivers: dict[str, Driver], op: str, chunk: int, chunks: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """What each contender takes in each round; they take turns in going first."""
    contenders = [("kvdepot", "off"), ("kvdepot", "on")]
    contenders += [(name, "off") for name in drivers if name != "kvdepot"]
    runs: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        turn = number % len(contenders)
        for name, checksum in contenders[turn:] + contenders[:turn]:
            run = drivers[name].run(op, chunk, chunks, checksum)
            if number > 0:  # the first warms up
                label = name if checksum == "off" else "checksums"
                runs.setdefault(label, []).append(run)
    return runs


def rows(
    op: str, chunk: int, chunks: int, runs: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """What the runs come to."""

    def median(name: str, which: int) -> float:
        return statistics.median(run[which] for run in runs[name])

    def ratio(over: str, under: str, which: int) -> float:
        pairs = zip(runs[over], runs[under], strict=True)
        return statistics.median(a[which] / b[which] for a, b in pairs)

    found = []
    gigabytes = chunk * chunks / 1e9
    case = {"op": op, "bytes": chunk * chunks, "chunks": chunks, "transport": "tcp"}
    for peer, metric in PEERS.items():
        if peer not in runs:
            continue
        for ours, checksum in (("kvdepot", "off"), ("checksums", "on")):
            its = case | {"checksum": checksum, "where": "loopback", "plan": "on"}
            common = {"bench": "transfer", "case": its, "rounds": len(runs[ours])}
            figures = {
                "value": gigabytes / median(ours, 0),
                "limit": gigabytes / median(peer, 0),
                "ratio": ratio(peer, ours, 0),
            }
            found.append(common | {"metric": metric, "unit": "GB/s", "limit_name": peer} | figures)
            figures = {
                "value": median(ours, 1) / gigabytes,
                "limit": median(peer, 1) / gigabytes,
                "ratio": ratio(peer, ours, 1),
            }
            found.append(
                common | {"metric": "cpu_s_per_gb", "unit": "s", "limit_name": peer} | figures
            )
    return found


def show(row: dict[str, Any]) -> None:
    """One line a figure."""
    case = row["case"]
    megabytes = round(case["bytes"] / 10**6)
    print(
        f"{row['metric']:<20}{row['limit_name']:<10}{case['op']:<7}{megabytes:>4} MB /"
        f"{case['chunks']:>6}  {case['checksum']:<4}{row['value']:>8.3f}{row['limit']:>8.3f}"
        f"{row['ratio']:>8.2f}  {row['unit']}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each batch."""
    parser = argparse.ArgumentParser(prog="bench/transfer/run.py", description=__doc__)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    parser.add_argument("--quick", action="store_true", help="quick run: two batches, 3 rounds")
    parser.add_argument(
        "--rounds", type=int, help="number of rounds; the result is the median (default: 5)"
    )
    parser.add_argument(
        "--batches",
        help="megabytes and number of requests of each batch, separated by commas "
        f"(default: {TABLE})",
    )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        help="transfer engines to compare with, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--command",
        default="target/release/kvdepot",
        help="path of the kvdepot command (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 5)
    batches = [
        batch(text) for text in (options.batches or (QUICK if options.quick else TABLE)).split(",")
    ]
    peers = options.peers.split(",")
    if rounds < 1 or not set(peers) <= set(PEERS):
        parser.error(f"--rounds is at least 1, --peers are of {', '.join(PEERS)}")
    size = max(chunk * chunks for chunk, chunks in batches)
    commands = {"kvdepot": [options.command, "bench", "transfer", "--drive", str(size)]}
    for name in peers:
        commands[name] = [sys.executable, str(HERE / "peers.py"), name, str(size)]
    with contextlib.ExitStack() as closing:
        drivers = {}
        for name, command in commands.items():
            drivers[name] = Driver(command)
            closing.callback(drivers[name].close)
        if not options.json:
            print(f"{'':<56}{'kvdepot':>9}{'other':>8}{'ratio':>8}")
        for chunk, chunks in batches:
            for op in OPS:
                runs = measure(drivers, op, chunk, chunks, rounds)
                for row in rows(op, chunk, chunks, runs):
                    if options.json:
                        shown = {
                            key: round(value, 3) if isinstance(value, float) else value
                            for key, value in row.items()
                        }
                        print(json.dumps(shown), flush=True)
                    else:
                        show(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
