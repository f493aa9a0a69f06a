"""Two vLLM blocks to a stored one, beside vLLM's own prefix cache and under preemption.

And beside another connector: all of it goes through vLLM's MultiConnector.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fleet import NEIGHBOUR, Fleet, Plan
from engine_harness import BLOCK, Engine, assert_same, prompts
from vllm_demo.measure import largest_difference

CHUNKED = Plan(
    "chunks",
    lambda arena: {
        "blocks_per_chunk": 2,
        "cache": {"capacity": "128MiB"},
        "dax": {"path": str(arena), "capacity": "256MiB"},
    },
    (
        "--enable-prefix-caching",
        # 9 blocks besides the one that vLLM never hands out: two requests of 500 tokens start
        # side by side, and only one of them has room for its 513th.
        *("--num-gpu-blocks-override", "10"),
        *("--max-model-len", "1100"),
    ),
    beside=(NEIGHBOUR,),
)
SERVERS = [CHUNKED]


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.take(CHUNKED)
    yield engine
    engine.server.stop()


def test_a_load_enters_a_stored_block_in_its_middle(engine: Engine) -> None:
    (prompt,) = prompts(1, 1000, seed=50)
    first = engine.ask(prompt)
    engine.settle()
    engine.reset(external=False)
    whole = engine.ask(prompt)
    assert whole.cached_tokens == 3 * 2 * BLOCK
    assert_same(whole, first)
    # vLLM holds one block of the first pair; the load brings the other.
    engine.reset(external=False)
    engine.ask(prompt[:200])
    before = engine.external_hits()
    pieced = engine.ask(prompt)
    assert pieced.cached_tokens == 3 * 2 * BLOCK
    assert engine.external_hits() - before == 5 * BLOCK
    assert_same(pieced, first)


def test_preempted_requests_give_the_same_output(engine: Engine) -> None:
    several = prompts(3, 500, seed=51)
    wanted = [engine.ask(prompt, output_tokens=32) for prompt in several]
    engine.reset(external=True)
    before = engine.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            answers = list(threads.map(lambda prompt: engine.ask(prompt, 32), several))
            for answer, want in zip(answers, wanted, strict=True):
                # Not the tokens: requests computed side by side round differently, and in so
                # many tokens two may be as good as equally likely.
                assert largest_difference(answer, want) <= 1e-3
            engine.reset(external=False)
    assert engine.metric("vllm:num_preemptions_total") > before
    assert engine.failed_loads() == 0
