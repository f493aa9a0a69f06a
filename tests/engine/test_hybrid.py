"""A model with two KV groups: full attention and a sliding window."""

from __future__ import annotations

import kvd_reader
from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, assert_same, flip, prompts

SLIDING = Plan(
    "hybrid",
    lambda arena: {"pipeline": "Dax", "dax": {"path": str(arena), "capacity": "256MiB"}},
    ("--enable-prefix-caching",),
    model=("gemma3", "0", "--sliding"),
)
SERVERS = [SLIDING]


def test_sliding_windows_are_served_and_damage_is_computed_again(fleet: Fleet) -> None:
    engine, arena = fleet.take(SLIDING), fleet.arena(SLIDING)
    (prompt,) = prompts(1, 1000, seed=40)
    first = engine.ask(prompt)
    engine.settle()
    engine.reset(external=False)
    hit = engine.ask(prompt)
    assert hit.cached_tokens == 7 * BLOCK
    assert_same(hit, first)
    with arena.open("rb") as medium:
        blocks = kvd_reader.Arena(medium).blocks()
    assert len({record.namespace for record in blocks}) == 2

    for record in blocks:
        flip(arena, record.extents[0][0] + 99)
    engine.reset(external=False)
    assert_same(engine.ask(prompt), first)
    assert engine.failed_loads() > 0
    failed = engine.failed_loads()
    engine.settle()
    engine.reset(external=False)
    again = engine.ask(prompt)
    assert again.cached_tokens > 0
    assert_same(again, first)
    engine.settle()
    engine.reset(external=False)
    assert_same(engine.ask(prompt), first)
    assert engine.failed_loads() >= failed
    assert engine.ask(prompt).cached_tokens == 7 * BLOCK
    engine.server.stop()
