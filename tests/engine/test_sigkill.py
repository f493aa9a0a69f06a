"""What outlives a server: SIGKILL, damage on the medium, another model."""

from __future__ import annotations

from pathlib import Path

import kvd_reader
from engine_fleet import DEFAULT, WAIT_FOR_ARENA, Fleet, Plan
from engine_harness import BLOCK, assert_same, flip, prompts

# Whole blocks of a prompt of 1,000 tokens.
PROMPT_BLOCKS = 1000 // BLOCK


# The same arena under other weights, twice.
RESTARTED = Plan(
    DEFAULT.arena,
    lambda arena: {**WAIT_FOR_ARENA, **DEFAULT.settings(arena)},
    DEFAULT.arguments,
    model=("qwen3-other", "1"),
    lives=2,
    after=DEFAULT,
)
SERVERS = [DEFAULT, RESTARTED]


def sound_blocks(arena: Path) -> list[kvd_reader.Record]:
    """All blocks, each of which verifies."""
    with arena.open("rb") as medium:
        reader = kvd_reader.Arena(medium)
        blocks = sorted(reader.blocks(), key=lambda record: record.sequence)
        assert [reader.fault(record) for record in blocks] == [None] * len(blocks)
    return blocks


def test_blocks_outlive_sigkill_and_a_damaged_one_is_computed_again(fleet: Fleet) -> None:
    arena = fleet.arena(RESTARTED)
    kept, damaged, unfinished = prompts(3, 1000, seed=20)
    other = fleet.take(DEFAULT)
    # What it stored for other tests.
    other.reset(external=True)
    other.ask(kept)
    other.settle()
    other.kill()
    of_other = sound_blocks(arena)
    assert len(of_other) == PROMPT_BLOCKS

    first = fleet.take(RESTARTED)
    kept_output = first.ask(kept)
    assert kept_output.cached_tokens == 0, "another model's blocks"
    damaged_output, unfinished_output = map(first.ask, (damaged, unfinished))
    # Again, so that the arena holds the blocks in a known order.
    first.settle()
    first.reset(external=True)
    for prompt in (kept, damaged):
        first.ask(prompt)
        first.settle()
    first.ask(unfinished)
    first.kill()

    blocks = [record for record in sound_blocks(arena) if record not in of_other]
    assert len(blocks) >= 2 * PROMPT_BLOCKS
    flip(arena, blocks[PROMPT_BLOCKS + 2].extents[0][0] + 1234)  # the third block of `damaged`

    second = fleet.take(RESTARTED)
    served = second.ask(kept)
    assert served.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert_same(served, kept_output)
    assert second.failed_loads() == 0

    assert_same(second.ask(damaged), damaged_output)
    assert second.failed_loads() == 1
    second.settle()
    again = second.ask(damaged)
    assert again.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert_same(again, damaged_output)
    assert second.failed_loads() == 1, "stored again by the request that computed it"

    assert_same(second.ask(unfinished), unfinished_output)
    second.settle()
    second.kill()
    both = sound_blocks(arena)
    assert [record for record in both if record in of_other] == of_other, "reset was not for them"
    assert len({record.namespace for record in both}) == 2
