"""A model whose only KV group has a sliding window: before it vLLM holds nobody's bytes."""

from __future__ import annotations

from pathlib import Path

import kvd_reader
import pytest
from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, assert_same, flip, prompts

WINDOW = Plan(
    "window",
    lambda arena: {"pipeline": "Dax", "dax": {"path": str(arena), "capacity": "256MiB"}},
    ("--enable-prefix-caching",),
    model=("mistral", "0", "--window"),
)
SERVERS = [WINDOW]

# It takes a whole start; test_scheduling.py asks the same of vLLM's scheduler without a server.
pytestmark = pytest.mark.stress


def test_a_rotten_block_of_a_window_is_computed_again_with_all_before_it(fleet: Fleet) -> None:
    engine, arena = fleet.take(WINDOW), fleet.arena(WINDOW)
    (prompt,) = prompts(1, 1000, seed=60)
    first = engine.ask(prompt)
    engine.settle()
    engine.reset(external=False)
    hit = engine.ask(prompt)
    assert hit.cached_tokens == 7 * BLOCK
    assert_same(hit, first)
    with arena.open("rb") as medium:
        blocks = sorted(kvd_reader.Arena(medium).blocks(), key=lambda record: record.sequence)
    assert len({record.namespace for record in blocks}) == 1, "one KV group"
    assert len(blocks) == 2, "those in the window of the first token to compute"

    for failed, rotten in enumerate(reversed(blocks), 1):
        flip(arena, rotten.extents[0][0] + 99)
        engine.reset(external=False)
        assert_same(engine.ask(prompt), first)
        assert engine.failed_loads() == failed
        engine.settle()
        engine.reset(external=False)
        again = engine.ask(prompt)
        assert again.cached_tokens == 7 * BLOCK, "stored again by the request that computed it"
        assert_same(again, first)


def test_a_reset_destroys_nothing_and_what_was_stored_before_is_not_served(fleet: Fleet) -> None:
    engine, arena = fleet.take(WINDOW), fleet.arena(WINDOW)
    (prompt,) = prompts(1, 700, seed=61)
    first = engine.ask(prompt)
    engine.settle()
    before = live(arena)
    engine.reset(external=True)
    again = engine.ask(prompt)
    assert again.cached_tokens == 0
    assert_same(again, first)
    engine.settle()
    assert before < live(arena)
    engine.reset(external=False)
    assert engine.ask(prompt).cached_tokens == 5 * BLOCK
    engine.server.stop()


def live(arena: Path) -> set[tuple[bytes, bytes]]:
    with arena.open("rb") as medium:
        return {(record.namespace, record.key) for record in kvd_reader.Arena(medium).blocks()}
