"""Measures the Python API on this machine: `python -m kvdepot.bench index [--json]`.

Prints a table, or with `--json` one JSON object per line in the form of `kvdepot bench`. These
rates have no limit to compare with, because no simpler program returns the same answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import kvdepot

KEY_BYTES = 32
BATCH = 256
"""Keys per call, as for a prompt of some thousand tokens."""
BLOCK_BYTES = 4096
"""Smallest block. Its memory is reserved and stays unused here."""
FILL = 8192
"""Keys per call while the index is filled."""
CALLS = 2000
"""Calls per round: half a million keys, much more than fits into a processor's cache."""


class Row(TypedDict):
    """One line of the result."""

    bench: str
    case: dict[str, object]
    metric: str
    unit: str
    value: float
    limit: None
    ratio: None
    rounds: int


def filled(depot: kvdepot.Depot, keys: bytes) -> kvdepot.Namespace:
    """Creates a namespace in which all these keys are published, without writing their bytes.

    Args:
        depot: An open depot with space for the keys.
        keys: 32-byte keys, concatenated.

    Returns:
        The namespace.
    """
    namespace = depot.namespace("bench", "none", 1)
    for start in range(0, len(keys), FILL * KEY_BYTES):
        reserved = namespace.reserve(keys[start : start + FILL * KEY_BYTES], BLOCK_BYTES)
        reservations = [one for one in reserved if one is not None]
        namespace.commit(reservations, [[bytes(16)]] * len(reservations))
    return namespace


def rate(call: Callable[..., object], batches: Sequence[bytes | list[bytes]]) -> float:
    """Measures a lookup.

    Args:
        call: Function of one batch of keys.
        batches: Batches of `BATCH` keys.

    Returns:
        Keys per second.
    """
    start = time.perf_counter()
    for batch in batches:
        call(batch)
    return len(batches) * BATCH / (time.perf_counter() - start)


def index(blocks: int, rounds: int) -> list[Row]:
    """Measures lookups in an index, of keys in one buffer and in a list.

    Args:
        blocks: Number of blocks in the index, at least `BATCH`.
        rounds: Number of rounds, of which the median counts.

    Returns:
        One row per operation and form of the keys.
    """
    source = random.Random(1)
    keys = source.randbytes(blocks * KEY_BYTES)
    settings = {"cache": {"capacity": blocks * BLOCK_BYTES}, "socket": "off"}
    with kvdepot.open("Cache", settings) as depot:
        print(f"filling an index with {blocks} blocks", file=sys.stderr, flush=True)
        namespace = filled(depot, keys)
        starts = [source.randrange(blocks - BATCH + 1) * KEY_BYTES for _ in range(CALLS)]
        buffers = [keys[start : start + BATCH * KEY_BYTES] for start in starts]
        lists = [
            [batch[at : at + KEY_BYTES] for at in range(0, len(batch), KEY_BYTES)]
            for batch in buffers
        ]
        if namespace.prefix(keys) != blocks:
            raise RuntimeError("the depot has fewer blocks than --blocks after filling")
        cases = [
            (op, form, call, batches)
            for op, call in (("contains", namespace.contains), ("prefix", namespace.prefix))
            for form, batches in (("buffer", buffers), ("list", lists))
        ]
        rates: list[list[float]] = [[] for _ in cases]
        # Interleaved, so that a noisy second does not hit one case alone; the first warms up.
        for round_number in range(rounds + 1):
            for number, (_, _, call, batches) in enumerate(cases):
                measured = rate(call, batches)
                if round_number > 0:
                    rates[number].append(measured)
        namespace.clear()
    return [
        {
            "bench": "index",
            "case": {
                "surface": "python",
                "op": op,
                "blocks": blocks,
                "batch": BATCH,
                "keys": form,
            },
            "metric": "lookups",
            "unit": "keys/s",
            "value": round(statistics.median(measured)),
            "limit": None,
            "ratio": None,
            "rounds": rounds,
        }
        for (op, form, _, _), measured in zip(cases, rates, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the command line names.

    Args:
        arguments: Arguments after the program's name. Default: those of this process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m kvdepot.bench", description=__doc__)
    parser.add_argument("what", choices=["index"], help="benchmark to run")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=1_000_000,
        help="number of blocks in the index, at least 256 (default: 1000000)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="number of rounds, at least 1; the result is the median (default: 9)",
    )
    options = parser.parse_args(arguments)
    if options.blocks < BATCH or options.rounds < 1:
        parser.error(f"--blocks must be at least {BATCH}, and --rounds at least 1")
    rows = index(options.blocks, options.rounds)
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"{'op':<10}{'blocks':>12}{'batch':>8}  {'keys':<8}{'M keys/s':>10}")
    for row in rows:
        case = row["case"]
        print(
            f"{case['op']!s:<10}{case['blocks']!s:>12}{case['batch']!s:>8}  {case['keys']!s:<8}"
            f"{row['value'] / 1e6:>10.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
