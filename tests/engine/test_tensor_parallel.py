"""Two workers: one block has a part of each, and is a hit only when both verify."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvd_reader
from engine_fleet import WAIT_FOR_ARENA, Fleet, Plan
from engine_harness import BLOCK, Engine, assert_same, flip, prompts

# Long enough to be stored in several steps.
OTHER_TOKENS = 27 * BLOCK + 40
# Decoding goes on for seconds after the last block of the prompt, so that no worker dies too late.
OUTPUT_TOKENS = 560


def workers(engine: Engine) -> list[int]:
    return [
        pid
        for pid in engine.server.processes()
        if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Worker")
    ]


TWO_RANKS = Plan(
    "ranks",
    lambda arena: {
        **WAIT_FOR_ARENA,
        "pipeline": "Dax",
        "dax": {"path": str(arena), "capacity": "256MiB"},
    },
    (
        "--no-enable-prefix-caching",
        *("--tensor-parallel-size", "2"),
        *("--max-num-batched-tokens", "512"),
    ),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    lives=2,
)
SERVERS = [TWO_RANKS]


def test_a_block_needs_the_parts_of_all_ranks(fleet: Fleet, seed: int) -> None:
    engine, arena = fleet.take(TWO_RANKS), fleet.arena(TWO_RANKS)
    prompt = prompts(1, 1000, seed=30)[0]
    other = prompts(1, OTHER_TOKENS, seed=31)[0]
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

    # A worker dies while blocks are being stored, chunk by chunk; vLLM ends the server.
    victim = workers(engine)[1]
    delay = random.Random(seed).uniform(0, 0.5)
    with ThreadPoolExecutor(1) as thread:
        lost = thread.submit(engine.ask, other, OUTPUT_TOKENS)
        while not engine.metric("kvdepot_pending_bytes"):
            assert not lost.done(), "answered before anything was seen to be stored"
        time.sleep(delay)
        engine.server.kill_one(victim)
        assert lost.exception() is not None
    engine.kill()
    with arena.open("rb") as medium:
        reader = kvd_reader.Arena(medium)
        faults = [reader.fault(record) for record in reader.blocks()]
    # What was there before, and what came until the worker died.
    assert 7 <= len(faults) <= 7 + (OTHER_TOKENS + OUTPUT_TOKENS) // BLOCK
    assert set(faults) == {None}

    engine = fleet.take(TWO_RANKS)
    served = engine.ask(prompt)
    assert served.cached_tokens == 7 * BLOCK
    assert_same(served, first)
    fresh = engine.ask(other)
    engine.settle()
    assert_same(engine.ask(other), fresh)
    assert engine.failed_loads() == 0
    engine.server.stop()
