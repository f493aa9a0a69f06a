"""What outlives a server: SIGKILL, damage on the medium, another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kvd_reader
import pytest
from engine_harness import BLOCK, Start, assert_same, flip, prompts

# Whole blocks of a prompt of 1,000 tokens.
PROMPT_BLOCKS = 1000 // BLOCK


@pytest.fixture(scope="module")
def settings(arena: Path) -> dict:
    return {
        "cache": {"capacity": "64MiB"},
        "dax": {"path": str(arena), "capacity": "512MiB"},
    }


def sound_blocks(arena: Path) -> list[kvd_reader.Record]:
    """All blocks, each of which verifies."""
    with arena.open("rb") as medium:
        reader = kvd_reader.Arena(medium)
        blocks = sorted(reader.blocks(), key=lambda record: record.sequence)
        assert [reader.fault(record) for record in blocks] == [None] * len(blocks)
    return blocks


def test_blocks_outlive_sigkill_and_a_damaged_one_is_computed_again(
    start: Start, arena: Path, settings: dict, models: Callable[..., Path]
) -> None:
    first = start(settings, "--no-enable-prefix-caching")
    kept, damaged, unfinished = prompts(3, 1000, seed=20)
    kept_output, damaged_output, unfinished_output = map(first.ask, (kept, damaged, unfinished))
    # Again, so that the arena holds the blocks in a known order.
    first.settle()
    first.reset(external=True)
    for prompt in (kept, damaged):
        first.ask(prompt)
        first.settle()
    first.ask(unfinished)
    first.kill()

    blocks = sound_blocks(arena)
    assert len(blocks) >= 2 * PROMPT_BLOCKS
    flip(arena, blocks[PROMPT_BLOCKS + 2].extents[0][0] + 1234)  # the third block of `damaged`

    second = start(settings, "--no-enable-prefix-caching")
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
    stored = sound_blocks(arena)

    other = start(settings, "--no-enable-prefix-caching", model=models("qwen3-other", "1"))
    assert other.ask(kept).cached_tokens == 0, "another model's blocks"
    other.settle()
    other.kill()
    both = sound_blocks(arena)
    assert {r.key for r in stored} <= {r.key for r in both}
    assert len({record.namespace for record in both}) == 2
