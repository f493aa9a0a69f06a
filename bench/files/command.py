"""What the commands of this folder share: their options, their rounds, and what those come to."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contest import OPS, Contest, Kind

BLOCKS = "64KiB,256KiB,1MiB,4MiB"
UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}


@dataclass(frozen=True)
class Comparison:
    """Who is beside kvdepot, and by which names its figures go."""

    metrics: Mapping[str, str]
    """The metric of each contender."""
    kinds: Callable[[], Mapping[str, Kind]]
    """Imports the contenders."""
    frugal: tuple[str, str]
    """The contender whose processor time is the limit, and what it is called."""
    trials: int = 0
    """Batches that are stored to find settings, all contenders together."""


def size(text: str) -> int:
    """Bytes of a text such as 256KiB."""
    found = re.fullmatch(r"([1-9]\d*)(KiB|MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 256KiB")
    return int(found[1]) << UNITS[found[2]]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def rows(
    comparison: Comparison,
    contest: Contest,
    rounds: int,
    runs: dict[tuple[str, str], list[tuple[float, float]]],
) -> list[dict[str, Any]]:
    """What `runs`, seconds and processor seconds by contender and op, come to."""
    block, moved = contest.block, contest.count * contest.block

    def column(name: str, op: str, which: int) -> list[float]:
        return [run[which] for run in runs[name, op]]

    def row(metric: str, case: dict[str, Any], unit: str, **figures: float) -> dict[str, Any]:
        shown = {name: round(value, 3) for name, value in figures.items()}
        return {"bench": "files", "case": case, "metric": metric, "unit": unit} | shown

    found = []
    for name, metric in comparison.metrics.items():
        for op in OPS:
            ours, theirs = column("kvdepot", op, 0), column(name, op, 0)
            setting = contest.contenders[name].setting(op)
            found.append(
                row(
                    metric,
                    {"op": op, "block": block} | ({"limit": setting} if setting else {}),
                    "GB/s",
                    value=moved / statistics.median(ours) / 1e9,
                    limit=moved / statistics.median(theirs) / 1e9,
                    ratio=median_ratio(theirs, ours),
                    rounds=rounds,
                )
            )
    frugal, called = comparison.frugal
    ours, theirs = column("kvdepot", "load", 1), column(frugal, "load", 1)
    hashing = column("hashing", "load", 1)
    limit = [one + other for one, other in zip(theirs, hashing, strict=True)]
    gib = moved / (1 << 30)
    found.append(
        row(
            "cpu_s_per_gib",
            {"op": "load", "block": block, "limit": f"{called}, and one pass of hashing"},
            "s",
            value=statistics.median(ours) / gib,
            limit=statistics.median(limit) / gib,
            ratio=median_ratio(limit, ours),
            rounds=rounds,
        )
    )
    return found


def show(row: dict[str, Any]) -> None:
    """One line a figure."""
    case = row["case"]
    print(
        f"{row['metric']:<20}{case['op']:<7}{case['block'] >> 10:>6} KiB"
        f"{row['value']:>9.3f}{row['limit']:>9.3f}{row['ratio']:>8.2f}  {row['unit']}"
        f"  {case.get('limit', '')}".rstrip(),
        flush=True,
    )


def run(
    prog: str, description: str | None, comparison: Comparison, arguments: Sequence[str] | None
) -> int:
    """Measure each size of block."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON Lines (one object per line) instead of a table",
    )
    parser.add_argument("--quick", action="store_true", help="quick run: 64MiB per round, 3 rounds")
    parser.add_argument(
        "--rounds", type=int, help="number of rounds; the result is the median (default: 7)"
    )
    parser.add_argument(
        "--blocks", default=BLOCKS, help=f"block sizes, separated by commas (default: {BLOCKS})"
    )
    parser.add_argument(
        "--batch", type=size, help="bytes per round, at least one block (default: 256MiB)"
    )
    parser.add_argument(
        "--jobs", type=int, default=16, help="calls in flight at a time (default: 16)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("/var/tmp"),
        help="directory on the disk to measure (default: /var/tmp)",
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 7)
    batch = options.batch or (64 << 20 if options.quick else 256 << 20)
    blocks = [size(text) for text in options.blocks.split(",")]
    if rounds < 1 or options.jobs < 1 or batch < max(blocks):
        parser.error("--rounds and --jobs are at least 1, --batch at least a block")
    # Each contender with all that its rounds store.
    batches = (1 + len(comparison.metrics)) * (rounds + 1) + comparison.trials
    needed, free = batches * batch, shutil.disk_usage(options.dir).free
    if needed > free:
        parser.error(f"{options.dir} has {free >> 20} MiB free, {needed >> 20} MiB are needed")
    kinds = comparison.kinds()
    if not options.json:
        print(f"{'':<37}{'kvdepot':>9}{'limit':>9}{'ratio':>8}")
    for block in blocks:
        with tempfile.TemporaryDirectory(prefix="kvdepot-", dir=options.dir) as folder:
            contest = Contest(Path(folder), batch // block, block, options.jobs, kinds)
            try:
                found = rows(comparison, contest, rounds, contest.measure(rounds))
            finally:
                contest.close()
        for row in found:
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                show(row)
    return 0
