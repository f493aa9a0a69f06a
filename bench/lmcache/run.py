"""Compares kvdepot with LMCache's DAX backends: `make bench-lmcache`.

In each round, each program moves the same chunks once, one program after the other: LMCache 0.5.6,
kvdepot through the same interface, and plain copies of the same chunks. Values are medians over the
rounds, and ratios are medians over the ratios of the rounds. The bytes of each program are compared
with the stored bytes, before the first and after the last round.
"""

from __future__ import annotations

import os

# Before LMCache is imported: it reports its usage otherwise.
os.environ["DO_NOT_TRACK"] = "1"
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import argparse
import json
import logging
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SURFACES = {
    "batched_get": "batched_get_blocking of DaxBackend and of the storage plug-in",
    "get": "batched_get_blocking of DaxBackend, and kvdepot's get into given buffers",
    "mp": "load tasks of DaxL2Adapter and of the native plug-in in LMCache's wrapper",
    "mp_adapter": "load tasks of DaxL2Adapter and of the Python adapter",
    "put": "puts of DaxBackend and of the storage plug-in",
}
CASES = "256x1MiB,1024x4KiB,1024x64KiB,256x256KiB,256x4MiB"
UNITS = {"KiB": 10, "MiB": 20}


def case(text: str) -> tuple[int, int]:
    """Blocks and bytes of each, of a text such as 256x1MiB."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(KiB|MiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a case such as 256x1MiB")
    return int(found[1]), int(found[2]) << UNITS[found[3]]


def measure(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round; they take turns in going first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for round_number in range(rounds + 1):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = contenders[name]()
            if round_number > 0:  # the first warms up
                seconds[name].append(taken)
    return seconds


def rows(
    surface: str, blocks: int, block: int, folder: Path, seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """kvdepot over LMCache, and over the best plain copy."""
    rate = {
        name: statistics.median(blocks * block / s / 1e9 for s in seconds[name]) for name in seconds
    }
    copies = [name for name in seconds if name.startswith("copy")]
    limits = {"over_lmcache": "lmcache", "over_copy": max(copies, key=lambda name: rate[name])}
    described = {"surface": surface, "blocks": blocks, "block": block, "folder": str(folder)}
    return [
        {
            "bench": "lmcache",
            "case": described | ({"copy": limit} if metric == "over_copy" else {}),
            "metric": metric,
            "unit": "GB/s",
            "value": round(rate["kvdepot"], 3),
            "limit": round(rate[limit], 3),
            "ratio": round(
                statistics.median(
                    theirs / ours
                    for theirs, ours in zip(seconds[limit], seconds["kvdepot"], strict=True)
                ),
                3,
            ),
            "rounds": len(seconds["kvdepot"]),
        }
        for metric, limit in limits.items()
    ]


def show(found: Sequence[dict[str, Any]]) -> None:
    """One line a surface and case."""
    for over_lmcache, over_copy in zip(found[::2], found[1::2], strict=True):
        of = over_lmcache["case"]
        size = of["block"] >> 20 or of["block"] >> 10
        name = f"{of['blocks']} x {size} {'MiB' if of['block'] >> 20 else 'KiB'}"
        print(
            f"{of['surface']:<13}{name:>15}{over_lmcache['value']:>11.2f}"
            f"{over_lmcache['limit']:>11.2f}{over_copy['limit']:>8.2f}"
            f"{over_lmcache['ratio']:>14.2f}{over_copy['ratio']:>11.2f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each surface in each case."""
    parser = argparse.ArgumentParser(prog="bench/lmcache/run.py", description=__doc__)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="number of rounds; the result is the median (default: 9)",
    )
    parser.add_argument(
        "--cases",
        default=CASES,
        help=f"numbers and sizes of blocks, separated by commas (default: {CASES})",
    )
    parser.add_argument(
        "--surfaces",
        default=",".join(SURFACES),
        help="interfaces to measure, separated by commas (default: all): "
        + "; ".join(f"{name}: {text}" for name, text in SURFACES.items()),
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="folder for the arenas, on tmpfs or on another file system (default: /dev/shm)",
    )
    options = parser.parse_args(arguments)
    surfaces = options.surfaces.split(",")
    unknown = [name for name in surfaces if name not in SURFACES]
    if unknown or options.rounds < 1:
        parser.error(f"--rounds is at least 1; --surfaces are {', '.join(SURFACES)}; not {unknown}")
    cases = [case(text) for text in options.cases.split(",")]
    logging.disable(logging.WARNING)
    from contenders import Contest

    if not options.json:
        print(
            f"{'GB/s':<28}{'kvdepot':>11}{'LMCache':>11}{'copy':>8}"
            f"{'over LMCache':>14}{'over copy':>11}"
        )
    for blocks, block in cases:
        for surface in surfaces:
            with tempfile.TemporaryDirectory(prefix="kvdepot-", dir=options.folder) as folder:
                contest = Contest(Path(folder), blocks, block)
                try:
                    contenders = contest.contenders(surface)
                    contest.check(surface)
                    seconds = measure(contenders, options.rounds)
                    contest.check(surface)
                finally:
                    contest.close()
            found = rows(surface, blocks, block, options.folder, seconds)
            if options.json:
                print("\n".join(json.dumps(row) for row in found), flush=True)
            else:
                show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
