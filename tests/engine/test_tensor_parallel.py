"""Two workers: one block has a part of each, and is a hit only when both verify."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvd_reader
from engine_harness import BLOCK, Engine, Start, assert_same, flip, prompts


def workers(engine: Engine) -> list[int]:
    return [
        pid
        for pid in engine.server.processes()
        if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Worker")
    ]


def test_a_block_needs_the_parts_of_all_ranks(start: Start, arena: Path, seed: int) -> None:
    def serve() -> Engine:
        return start(
            {"pipeline": "Dax", "dax": {"path": str(arena), "capacity": "256MiB"}},
            "--no-enable-prefix-caching",
            "--tensor-parallel-size",
            "2",
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )

    engine = serve()
    prompt, other = prompts(2, 1000, seed=30)
    first = engine.ask(prompt)
    engine.settle()
    hit = engine.ask(prompt)
    assert hit.cached_tokens == 7 * BLOCK
    assert_same(hit, first)

    with arena.open("rb") as medium:
        blocks = sorted(kvd_reader.Arena(medium).blocks(), key=lambda record: record.sequence)
    assert [record.parts for record in blocks] == [2] * 7
    # The second half of the payload is the second rank's part.
    start_of_block, length = blocks[3].extents[0]
    flip(arena, start_of_block + blocks[3].length * 3 // 4)
    assert length >= blocks[3].length
    assert_same(engine.ask(prompt), first)
    assert engine.failed_loads() == 1
    assert "on rank 1" in engine.log()
    engine.settle()
    assert engine.ask(prompt).cached_tokens == 7 * BLOCK
    assert engine.failed_loads() == 1

    # A worker dies while blocks are being stored; vLLM ends the server.
    delay = random.Random(seed).uniform(0.2, 1.5)
    with ThreadPoolExecutor(1) as thread:
        lost = thread.submit(engine.ask, other)
        time.sleep(delay)
        engine.server.kill_one(workers(engine)[1])
        assert lost.exception() is not None or delay > 1
    engine.kill()
    with arena.open("rb") as medium:
        reader = kvd_reader.Arena(medium)
        assert [reader.fault(record) for record in reader.blocks()].count(None) >= 7

    engine = serve()
    served = engine.ask(prompt)
    assert served.cached_tokens == 7 * BLOCK
    assert_same(served, first)
    fresh = engine.ask(other)
    engine.settle()
    assert_same(engine.ask(other), fresh)
    assert engine.failed_loads() == 0
