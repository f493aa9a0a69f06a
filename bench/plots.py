"""Draws the pictures in docs/plots from the results in bench/runs: `make plots`.

Each SVG contains the names of its source files and the SHA-256 of the results that it was drawn
from, so that a test detects later changes of the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_demo import chart

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "bench" / "runs"
PLOTS = ROOT / "docs" / "plots"

Row = Mapping[str, Any]

# The newest complete run of each benchmark. A newer one is named here when it is committed.
DEMO = "2026-11-21-zen3-2cpu-demo.json"
DEVICE_FIRST = "2026-11-26-h100-vllm-8-lanes.jsonl"
DEVICE = "2026-11-26-h100-vllm.jsonl"
MEMORY = "2026-11-21-zen3-2cpu-memory.jsonl"
FILES = "2026-11-23-epyc-2cpu-files-journal.jsonl"
CUDA = "2026-11-26-h100-cuda-512MiB.jsonl"
LMCACHE = "2026-11-22-zen3-2cpu-lmcache.jsonl"
DISK_PEERS = "2026-11-23-epyc-2cpu-files-beside.jsonl"
UCM = "2026-11-25-epyc-2cpu-ucm.jsonl"
MOONCAKE = "2026-11-25-epyc-2cpu-transfer-mooncake.txt"


class Rows:
    """The rows of runs, and the hash of those that were used."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._hash = hashlib.sha256()
        self._files: list[str] = []

    def lines(self, file: str, wanted: Callable[[str], object]) -> list[str]:
        """The lines of `file` that are `wanted`, each of which counts for the hash."""
        lines = (self._runs / file).read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if wanted(line)]
        if not found:
            raise LookupError(f"{file}: no such rows")
        if file not in self._files:
            self._files.append(file)
        for line in found:
            self._hash.update(f"{file}: {line}\n".encode())
        return found

    def select(self, file: str, metric: str, **case: Any) -> list[Row]:
        """The rows of `metric` in `file` whose case has these values."""

        def wanted(line: str) -> bool:
            row = json.loads(line)
            has = row.get("case", {})
            return row.get("metric") == metric and all(has.get(k) == v for k, v in case.items())

        return [json.loads(line) for line in self.lines(file, wanted)]

    def document(self, file: str) -> Row:
        """A file that is one JSON object over several lines."""
        return dict(json.loads("\n".join(self.lines(file, lambda _: True))))

    def metadata(self) -> str:
        """The text that the SVG carries: the files, and the hash of the rows."""
        return f"rows: {', '.join(self._files)}; sha256: {self._hash.hexdigest()}"


def ttft(rows: Rows) -> str:
    """The time to the first token over the length of the prompt."""
    return _panels(
        "Time to the first token",
        "The time to the first token over the length of the prompt, on logarithmic axes of time",
        [_demo(rows), _device(rows)],
        rows,
        gutter=206,
    )


def _demo(rows: Rows) -> chart.Panel:
    figures = rows.document(DEMO)
    suffixes = [key.removeprefix("prompt_tokens") for key in figures if key[:13] == "prompt_tokens"]
    tokens = [figures[f"prompt_tokens{one}"] / figures[f"prompts{one}"] for one in suffixes]
    names = {
        "full_ms": ("full compute", 4),
        "restart_ms": ("kvdepot after restart", 1),
        "hit_ms": ("kvdepot", 0),
        "own_cache_ms": ("vLLM's prefix cache", 2),
    }
    lines = []
    for key, (name, color) in names.items():
        seconds = [figures[f"{key}{one}"] / 1e3 for one in suffixes]
        label = f"{name} {seconds[-1]:.2g} s"
        lines.append(chart.Line(label, tuple(zip(tokens, seconds, strict=True)), color))
    return chart.Panel(
        "vLLM on 2 CPU cores, 25.7M parameters, Cache|Dax",
        f"{_date(DEMO)}, AMD EPYC (Zen 3); make demo DEMO_FLAGS=--full",
        _lengths(tokens),
        chart.decades("seconds", [y for line in lines for _, y in line.points]),
        tuple(lines),
    )


def _device(rows: Rows) -> chart.Panel:
    # The later run had 16 copy threads for 8. It replaces the figures that it has.
    names = {
        "computed": ("full compute", 4, [DEVICE_FIRST]),
        "kvdepot Cache": ("kvdepot", 0, [DEVICE_FIRST, DEVICE]),
        "offload": ("vLLM's offloading", 3, [DEVICE_FIRST, DEVICE]),
        "own": ("vLLM's prefix cache", 2, [DEVICE_FIRST]),
    }
    lines = []
    for way, (name, color, files) in names.items():
        found = [row for file in files for row in rows.select(file, "ttft", way=way, concurrency=1)]
        times = {float(row["case"]["tokens"]): float(row["value"]) for row in found}
        points = tuple(sorted(times.items()))
        lines.append(chart.Line(f"{name} {points[-1][1]:.0f} ms", points, color))
    return chart.Panel(
        "vLLM on an H100, Qwen3-14B's shape, Cache",
        f"{_date(DEVICE)}, bench/vllm_device; 8 copy threads (4,000), 16 (10,000)",
        _lengths([x for x, _ in lines[0].points]),
        chart.decades("ms", [y for line in lines for _, y in line.points]),
        tuple(lines),
    )


def _lengths(tokens: Sequence[float]) -> chart.Axis:
    ticks = ((length, f"{length:,g}") for length in tokens)
    return chart.Axis("tokens in the prompt", ((0.0, "0"), *ticks))


def bandwidth(rows: Rows) -> str:
    """The bandwidth over the size of the blocks, with the limit of each case."""
    disk = f"{_date(FILES)}, 2 CPU cores, ext4, direct I/O, depth 32; bench files"
    charts = [
        (
            MEMORY,
            "Cache: memory",
            f"{_date(MEMORY)}, 2 CPU cores, 2 copy threads; bench memory",
            MEMORY_OPS,
        ),
        (FILES, "Posix: files", disk, _file_ops("Posix")),
        (FILES, "Nvme: an arena in a file", disk, _file_ops("Nvme")),
        (
            CUDA,
            "Cache, from and to an H100",
            f"{_date(CUDA)}, 512 MiB per call, 16 copy threads; bench cuda",
            CUDA_OPS,
        ),
    ]
    return _panels(
        "Bandwidth over block size, and its limit (dashed)",
        "The bandwidth of kvdepot over the size of the blocks, and the limit on the same machine",
        [_over_block(rows, *one) for one in charts],
        rows,
        gutter=122,
    )


# A name, and the metric and the case of its rows.
Op = tuple[str, str, Mapping[str, Any]]

MEMORY_OPS: Sequence[Op] = (
    ("get", "throughput", {"tier": "Cache", "op": "get", "threads": 2}),
    ("put", "throughput", {"tier": "Cache", "op": "put", "threads": 2}),
)
CUDA_OPS: Sequence[Op] = (("get", "get", {"pages": 1}), ("put", "put", {"pages": 1}))


def _file_ops(tier: str) -> Sequence[Op]:
    case = {"tier": tier, "depth": 32}
    return (("load", "load_cold", case), ("store", "dump", case))


def _over_block(rows: Rows, file: str, title: str, note: str, ops: Sequence[Op]) -> chart.Panel:
    lines = []
    for color, (name, metric, case) in enumerate(ops):
        found = rows.select(file, metric, **case)
        for key, label in (("limit", f"limit of {name}"), ("value", name)):
            points = {float(row["case"]["block"]): float(row[key]) for row in found}
            lines.append(chart.Line(label, tuple(sorted(points.items())), color, key == "limit"))
    return chart.Panel(
        title,
        note,
        chart.Axis("block", tuple((x, _size(x)) for x, _ in lines[0].points), is_log=True),
        chart.linear("GB/s", [y for line in lines for _, y in line.points]),
        tuple(lines),
    )


def _panels(
    title: str, about: str, content: Sequence[chart.Panel], rows: Rows, *, gutter: int
) -> str:
    parts = [
        f"{panel.title}, {panel.y.label}: {'; '.join(_points(panel, line) for line in panel.lines)}"
        for panel in content
    ]
    about = ". ".join([about, *parts, ""]).strip()
    return chart.panels(title, about, content, gutter=gutter, metadata=rows.metadata())


def _points(panel: chart.Panel, line: chart.Line) -> str:
    names = dict(panel.x.ticks)
    return f"{line.label} (" + ", ".join(f"{names[x]}: {y:.3g}" for x, y in line.points) + ")"


# The sizes of blocks that have a mark of their own.
BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
REQUEST = len(BLOCKS)


def peers(rows: Rows) -> str:
    """The rate of kvdepot over that of other systems, on the same machine."""

    def at_blocks(file: str, metric: str, **case: Any) -> tuple[tuple[int, float], ...]:
        found = rows.select(file, metric, **case)
        return tuple((BLOCKS.index(row["case"]["block"]), row["ratio"]) for row in found)

    def group(file: str, heading: str, *content: tuple[str, str, Row]) -> chart.DotGroup:
        dots = [
            chart.DotRow(name, at_blocks(file, metric, **case)) for name, metric, case in content
        ]
        return chart.DotGroup(f"{heading} ({_date(file)})", tuple(dots))

    load, store = {"op": "load"}, {"op": "store"}
    groups = [
        group(
            LMCACHE,
            "LMCache's memory tier, make bench-lmcache",
            ("plug-in, load", "over_lmcache", {"surface": "batched_get"}),
            ("MP adapter, native plug-in, load", "over_lmcache", {"surface": "mp"}),
            ("MP adapter, Python adapter, load", "over_lmcache", {"surface": "mp_adapter"}),
            ("plug-in, store", "over_lmcache", {"surface": "put"}),
        ),
        group(
            DISK_PEERS,
            "Files, make bench-files",
            ("LMCache's disk, load", "over_lmcache_disk", load),
            ("LMCache's disk, store", "over_lmcache_disk", store),
            ("vLLM's fs tier, load", "over_vllm_fs", load),
            ("vLLM's fs tier, store", "over_vllm_fs", store),
        ),
        group(
            UCM,
            "Files, make bench-ucm",
            ("UCM's Posix, load", "over_ucm", load),
            ("UCM's Posix, store", "over_ucm", store),
            ("NIXL's POSIX, load", "over_nixl", load),
            ("NIXL's POSIX, store", "over_nixl", store),
        ),
        _batches(rows),
        _offloading(rows),
    ]
    about = " ".join(f"{one.heading}: {'; '.join(map(_range, one.rows))}." for one in groups)
    return chart.dots(
        "Rate of kvdepot over the rate of other systems",
        "Rows of dots, one per operation: the rate of kvdepot divided by the rate of another "
        f"system. Above 1, kvdepot is faster. {about}",
        chart.Axis(
            "rate of kvdepot / rate of the other system, on the same machine",
            tuple((2.0**i, f"{2.0**i:g}") for i in range(-1, 5)),
            is_log=True,
        ),
        [*(_size(block) for block in BLOCKS), "batch or request"],
        groups,
        middle=(1.0, "the other is faster", "kvdepot is faster"),
        metadata=rows.metadata(),
    )


def _range(row: chart.DotRow) -> str:
    ratios = [ratio for _, ratio in row.values]
    return f"{row.label}, {min(ratios):.2f} to {max(ratios):.2f}"


def _batches(rows: Rows) -> chart.DotGroup:
    """The lines of that file have a metric, peer, operation, sizes, checksums, rates and ratio."""
    found = []
    for checksums, words in (("off", "without checksums"), ("on", "with checksums")):
        for op in ("write", "read"):
            row = re.compile(rf"batch_over_mooncake +mooncake +{op} .* {checksums}( +[\d.]+){{3}}")
            lines = rows.lines(MOONCAKE, row.match)
            values = tuple((REQUEST, float(line.split()[-2])) for line in lines)
            found.append(chart.DotRow(f"{op}, {words}", values))
    return chart.DotGroup(
        f"Mooncake's engine, TCP, make bench-transfer ({_date(MOONCAKE)})", tuple(found)
    )


def _offloading(rows: Rows) -> chart.DotGroup:
    """Of times to the first token, the rate is the inverse."""
    found = []
    for count, words in ((1, "one request at a time"), (4, "four requests at a time")):
        ours, theirs = (
            rows.select(DEVICE, "ttft", way=way, tokens=10000, concurrency=count)[0]["value"]
            for way in ("kvdepot Cache", "offload")
        )
        found.append(chart.DotRow(words, ((REQUEST, theirs / ours),)))
    heading = "vLLM's CPU offloading on an H100, hits of 10,000 tokens, bench/vllm_device"
    return chart.DotGroup(f"{heading} ({_date(DEVICE)})", tuple(found))


def _date(file: str) -> str:
    return file[:10]


def _size(block: float) -> str:
    return f"{block / 2**20:g} MiB" if block >= 2**20 else f"{block / 2**10:g} KiB"


DRAWN: Mapping[str, Callable[[Rows], str]] = {
    "ttft.svg": ttft,
    "bandwidth.svg": bandwidth,
    "peers.svg": peers,
}


def drawn(name: str, runs: Path = RUNS) -> str:
    """The text of one SVG, drawn from the rows in `runs`."""
    return DRAWN[name](Rows(runs))


def carried(picture: str) -> str:
    """The files and the hash that an SVG carries."""
    found = re.search(r"<metadata>(.*)</metadata>", picture)
    return found[1] if found else ""


def main() -> None:
    """The command."""
    argparse.ArgumentParser(prog="bench/plots.py", description=__doc__).parse_args()
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name in DRAWN:
        (PLOTS / name).write_text(drawn(name), encoding="utf-8")
        print((PLOTS / name).relative_to(ROOT))


if __name__ == "__main__":
    main()
