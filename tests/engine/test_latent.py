"""A model whose KV is the same on every rank (MLA): one part, of one rank, for all."""

from __future__ import annotations

import kvd_reader
import pytest
from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, Engine, assert_same, flip, prompts
from vllm_demo.measure import Answer

pytestmark = pytest.mark.stress  # test_manager.py and test_worker.py do it without a server.

# vLLM's kernels for such models on the CPU compute a token in a prompt and the same token after it
# differently, without any connector too (logprobs differ by more than 1). So what continues a
# prompt is compared with what the first answer generated, from the same blocks in the same way.
BLOCKS = 5

LATENT = Plan(
    "latent",
    lambda arena: {
        "pipeline": "Dax",
        "dax": {"path": str(arena), "capacity": "128MiB"},
        "block_size": BLOCK,
    },
    ("--no-enable-prefix-caching", "--tensor-parallel-size", "2"),
    model=("deepseek", "0", "--latent"),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
)
SERVERS = [LATENT]


def test_one_rank_stores_for_all_of_them(fleet: Fleet) -> None:
    engine, arena = fleet.take(LATENT), fleet.arena(LATENT)
    prompt, damaged = prompts(2, BLOCKS * BLOCK, seed=60)
    first = engine.ask(prompt)
    engine.settle()
    assert_continues(engine, prompt, first)
    with arena.open("rb") as medium:
        reader = kvd_reader.Arena(medium)
        blocks = sorted(reader.blocks(), key=lambda record: record.sequence)
        assert [reader.fault(record) for record in blocks] == [None] * BLOCKS
    assert [record.parts for record in blocks] == [1] * BLOCKS
    # 3 layers of 576 numbers a token.
    assert [record.length for record in blocks] == [BLOCK * 3 * 576 * 4] * BLOCKS

    # Neither rank gets a damaged block.
    engine.ask(damaged)
    engine.settle()
    with arena.open("rb") as medium:
        newest = max(kvd_reader.Arena(medium).blocks(), key=lambda record: record.sequence)
    flip(arena, newest.extents[0][0] + 1234)
    engine.ask([*damaged, 7])
    assert engine.failed_loads() == 1
    assert "on rank 0" in engine.log()
    assert "on rank 1" in engine.log()
    engine.settle()
    assert engine.ask([*damaged, 7]).cached_tokens == BLOCKS * BLOCK
    assert engine.failed_loads() == 1, "stored again"
    assert_continues(engine, prompt, first)
    engine.server.stop()


def assert_continues(engine: Engine, prompt: list[int], first: Answer) -> None:
    """What follows the first generated token comes out of the depot's blocks as it did before."""
    generated = int(first.tokens[0].removeprefix("token_id:"))
    served = engine.ask([*prompt, generated], output_tokens=len(first.tokens) - 1)
    assert served.cached_tokens == BLOCKS * BLOCK
    rest = Answer(0, first.tokens[1:], first.logprobs[1:], 0, 0)
    assert_same(served, rest)
