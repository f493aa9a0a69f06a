"""Measures the time that vLLM's threads spend in kvdepot per step, with a mock CUDA driver.

    PYTHONPATH=bench:tests/python:tests/engine python -m vllm_step [--json] [--only lookups]

Scheduler (`first_lookup_ms`, `repeat_lookup_ms`, `admit_ms`): a prompt of --prompt stored blocks is
looked up, waits while other requests store and evict blocks, and is admitted. `late_ms` is the
response time of asynchronous tiers; the value is then the time of all steps until the response. The
limit of a first lookup is the same lookup with a manager that finds each block.

Worker (`step_us`): a step submits a load or a store of --blocks blocks of --pages pages, and later
polls for the result; both run in the thread of the worker. A step without copies only polls. The
mock driver completes each operation immediately and copies nothing, so that its threads use little
processor time; kvdepot's copy threads still copy and hash, as with an engine.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import kvdepot
import program
import torch
from cuda_double import double
from engine_device import DeviceWorker
from kvdepot.vllm.jobs import GroupPlacements
from kvdepot.vllm.messages import Placements
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from vllm_step import lookups

PAGE = 8192
TARGETS = {"load": 200.0, "store": 200.0, "idle": 20.0}


class Step:
    """A depot, and a worker whose caches have twice as many pages as a step moves."""

    def __init__(self, blocks: int, pages: int) -> None:
        caches = [torch.zeros((2 * blocks, PAGE), dtype=torch.int8) for _ in range(pages)]
        refs = [CanonicalKVCacheRef(layer, PAGE) for layer in range(pages)]
        tensors = [CanonicalKVCacheTensor(cache, PAGE) for cache in caches]
        self.worker = DeviceWorker(CanonicalKVCaches(tensors, [refs]), 0, 1)
        self.blocks, self.bytes = blocks, pages * PAGE
        settings = {"cache": {"capacity": 4 * blocks * self.bytes}, "lanes": 2}
        self.depot = kvdepot.open("Cache", settings)
        self.namespace = self.depot.namespace("bench", "int8", 16)
        self.keys = [number.to_bytes(32, "little") for number in range(blocks)]
        self.dice = random.Random(5)
        self.job = 0

    def run(self, what: str) -> float:
        """Microseconds of this thread."""
        if what == "idle":
            return self._timed(self.worker.get_finished)
        self.job += 1
        held: Any
        if what == "store":
            self.namespace.remove(self.keys)
            held = self.namespace.reserve(self.keys, self.bytes)
        else:
            held = self.namespace.pin(self.keys)
        group = GroupPlacements(0, [each.placement for each in held])
        places = Placements(self.job, self.depot.socket or "", [group])
        chosen = self.dice.sample(range(2 * self.blocks), self.blocks)
        device = GPULoadStoreSpec(chosen, group_sizes=[self.blocks], block_indices=[0])
        if what == "store":
            took = self._timed(self.worker.submit_store, self.job, device, places)
        else:
            took = self._timed(self.worker.submit_load, self.job, places, device)
        self.worker.wait({self.job})
        took += self._timed(self.worker.get_finished)
        (report,) = self.worker.take_reports()[self.job].values()
        if what == "store":
            sums = [[each] for each in report.checksums or []]
            self.namespace.commit(held, sums)
        else:
            # What the double does not move is still what the lanes have hashed.
            if report.corrupt or report.undelivered:
                raise RuntimeError("blocks were not loaded")
            self.namespace.unpin(held)
        return took

    @staticmethod
    def _timed(call: Any, *arguments: Any) -> float:
        start = time.perf_counter()
        call(*arguments)
        return (time.perf_counter() - start) * 1e6

    def close(self) -> None:
        """Let the depot go."""
        self.worker.shutdown()
        self.depot.close()


def main() -> int:
    """Measure, and print one row a kind of step."""
    parser = program.parser("vllm_step", __doc__)
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: 15)")
    parser.add_argument(
        "--only", choices=["worker", "lookups"], help="part to measure (default: both)"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        nargs="*",
        default=[8192, 30000],
        help="blocks per prompt, one or more numbers (default: 8192 30000)",
    )
    parser.add_argument(
        "--late",
        type=int,
        nargs="*",
        default=[0, 50],
        help="response times of asynchronous tiers in milliseconds (default: 0 50)",
    )
    parser.add_argument(
        "--blocks", type=int, default=200, help="blocks that a step loads or stores (default: 200)"
    )
    parser.add_argument("--pages", type=int, default=64, help="pages per block (default: 64)")
    options = parser.parse_args()
    if min(options.blocks, options.pages, options.rounds, *options.prompt) < 1:
        parser.error("--blocks, --pages, --prompt and --rounds are at least 1")
    if options.only != "worker":
        for row in lookups.rows(options.prompt, options.late, options.rounds):
            print(json.dumps(row) if options.json else _line(row), flush=True)
    if options.only == "lookups":
        return 0
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        library = double()
        library.double_delay(-1)
        library.double_moves(0)
        step = Step(options.blocks, options.pages)
        step.run("store")
        for what, target in TARGETS.items():
            times = [step.run(what) for _ in range(options.rounds + 1)][1:]
            case = {"step": what, "blocks": options.blocks, "pages": options.pages}
            value = statistics.median(times)
            row = {"bench": "cuda", "case": case | {"where": "double"}, "metric": "step_us"}
            row |= {"unit": "us", "value": round(value, 2), "limit": target}
            row |= {"ratio": round(target / value, 3), "rounds": options.rounds}
            row["limit_name"] = "the target"
            print(json.dumps(row) if options.json else f"{what:<8}{value:>10.1f} us of {target}")
        step.close()
    return 0


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    return (
        f"{row['metric']:<17}{case['model']:<7} {case['blocks']:>6} blocks, "
        f"{case['late_ms']:>3} ms late: {row['value']:>9.3f} ms of {row['limit']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
