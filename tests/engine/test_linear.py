"""Work that grows with the number of blocks grows no faster: steps are counted, not timed."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_lookups import MODELS, WINDOW_BLOCKS, FrontNamespace, Lookups, hashes
from engine_manager import context
from engine_tiers import Tiers
from kvdepot.vllm.beside import NOTHING
from kvdepot.vllm.rows import Rows
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)

pytestmark = pytest.mark.integration

# To 64,000 blocks in `make test-all`.
SIZES = [1000 << number for number in range(7 if os.environ.get("KVDEPOT_TEST_ALL") else 3)]
# Hashes and comparisons of keys are slow to count: up to so many blocks.
KEYS_COUNTED = 4000
GROWTH = 2.2
"""The most that twice as many blocks may cost."""


class Key(bytes):
    """A key whose hashes and comparisons are counted, and those of its parts."""

    counted = 0

    def __hash__(self) -> int:
        Key.counted += 1
        return bytes.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Key.counted += 1
        return bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Key.counted += 1
        return bytes.__ne__(self, other)

    def __add__(self, other: Any) -> Key:
        return Key(bytes.__add__(self, other))

    def __getitem__(self, index: Any) -> Any:
        found = bytes.__getitem__(self, index)
        return Key(found) if isinstance(found, bytes) else found


def steps(work: Callable[[], Any], keys_handed: Callable[[], int]) -> int:
    """Calls, hashes and comparisons of keys, and keys handed to the depot."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = Key.counted + keys_handed()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls + Key.counted + keys_handed() - before


def keys_of(blocks: Sequence[bytes]) -> list[bytes]:
    """Hashes of blocks; of short prompts, what is done with them is counted."""
    kind = Key if len(blocks) <= KEYS_COUNTED else bytes
    return [kind(each) for each in blocks]


def assert_linear(counted: dict[int, int], case: str = "") -> None:
    for size, twice in itertools.pairwise(sorted(counted)):
        # Where keys are not counted any more, fewer steps are.
        assert counted[twice] <= GROWTH * counted[size], (case, counted)


# The blocks of a prompt that are stored, by the number of its blocks.
STORED = {
    "all": lambda blocks: slice(0, blocks),
    "none": lambda blocks: slice(0, 0),
    "the first half": lambda blocks: slice(0, blocks // 2),
    # Nothing in a group with a window is of use then.
    "too few at the end": lambda blocks: slice(blocks - WINDOW_BLOCKS // 2, blocks),
}
TIERS = {
    "near": {},
    "late": {"delay": 3},
    "to fetch": {"delay": 2, "far": True},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("tiers", TIERS)
def test_twice_as_many_blocks_cost_twice_as_many_steps(
    tmp_path: Path, model: str, tiers: str
) -> None:
    """Of a lookup, the steps while it waits, its admission, and stores of what is there."""
    engine = Lookups(tmp_path, model, capacity="1GiB", **TIERS[tiers])
    blocks = hashes("prompt", SIZES[-1])

    def serve(request: Any) -> None:
        matched = engine.wait(request)
        for _ in range(3):
            engine.end_step()
            engine.wait(request)
        for job in engine.admit(request, matched):
            engine.loaded(job)
        engine.end_step()

    try:
        for stored, part_of in STORED.items():
            counted: dict[int, int] = {}
            for size in SIZES:
                engine.remove(blocks)
                engine.put(blocks[part_of(size)])
                request = engine.request(keys_of(blocks[:size]))
                counted[size] = steps(lambda made=request: serve(made), engine.keys_handed)
                engine.finish(request)
            assert_linear(counted, stored)
    finally:
        engine.close()


def test_stores_of_twice_as_many_blocks_cost_twice_as_many_steps(
    tmp_path: Path, model: str
) -> None:
    engine = Lookups(tmp_path, model, capacity="1GiB")
    try:
        blocks = hashes("prompt", SIZES[-1])
        engine.put(blocks)
        counted: dict[int, int] = {}
        for size in SIZES:
            request = engine.request(keys_of(blocks[:size]))
            engine.look(request)
            offer = functools.partial(engine.offer, request)
            counted[size] = steps(offer, engine.keys_handed)
            engine.finish(request)
        assert_linear(counted)
    finally:
        engine.close()


def test_a_window_with_a_block_that_is_being_stored_is_looked_up_in_linear_work(
    tmp_path: Path,
) -> None:
    engine = Lookups(tmp_path, "window", capacity="1GiB")
    counted: dict[int, int] = {}
    try:
        for size in [each for each in SIZES if each <= KEYS_COUNTED]:
            blocks = hashes(f"prompt {size}", size)
            # Another request stores the first block, and has not ended.
            storing = engine.request(blocks[:1])
            engine.offer(storing)
            request = engine.request(keys_of(blocks))
            look = functools.partial(engine.look, request)
            counted[size] = steps(look, engine.keys_handed)
            engine.finish(request)
            engine.finish(storing)
        assert_linear(counted)
    finally:
        engine.close()


@pytest.mark.parametrize("tiers", ["near", "late"])
def test_rows_are_looked_up_as_vllm_looks_up_their_blocks(
    tmp_path: Path, model: str, tiers: str
) -> None:
    """Whatever is stored of them, and whichever block another request is storing."""
    engine = Lookups(tmp_path, model, **TIERS[tiers])
    dice = random.Random(11)
    said: set[int | None] = set()

    def answers(blocks: Sequence[bytes]) -> list[int | None]:
        request = engine.request(blocks)
        found = []
        for _ in range(6):
            found.append(engine.look(request))
            engine.end_step()
        engine.finish(request)
        return found

    try:
        for number in range(30):
            blocks = hashes(f"prompt {number}", 2 * WINDOW_BLOCKS + dice.randrange(20))
            gaps = dice.choice([0.0, 0.01, 0.1, 1.0])
            stored = [each for each in blocks[:-1] if dice.random() >= gaps]
            if stored:
                engine.put(stored)
            storing = engine.request([dice.choice([each for each in blocks if each not in stored])])
            if dice.random() < 0.5:
                engine.offer(storing)
            by_row = answers(blocks)
            with engine.one_by_one():
                assert answers(blocks) == by_row
            said.add(by_row[-1] and 1)
            engine.finish(storing)
        assert said == {None, 0, 1}, "all kinds of answers"
    finally:
        engine.close()


@pytest.mark.parametrize("tiers", ["near", "late"])
def test_a_row_is_looked_up_in_few_calls(tmp_path: Path, model: str, tiers: str) -> None:
    """Those of full attention. vLLM looks up as many blocks as a window has."""
    engine = Lookups(tmp_path, model, **TIERS[tiers])
    look_up, calls = engine.manager.lookup, 0

    def counted(*arguments: Any) -> LookupResult:
        nonlocal calls
        calls += 1
        return look_up(*arguments)

    engine.manager.lookup = counted
    try:
        blocks = hashes("prompt", 1000)
        engine.put(blocks)
        request = engine.request(blocks)
        while engine.look(request) is None:
            assert calls <= 2, "one of each group, while the tier has not answered"
            engine.end_step()
        assert calls < 20 + (0 if model == "full" else WINDOW_BLOCKS)
        engine.finish(request)
    finally:
        engine.close()


@pytest.mark.parametrize("sizes", [(16,), (16, 32), (32, 16, 48)])
def test_each_block_is_in_the_row_of_its_kv_group(sizes: tuple[int, ...]) -> None:
    """However vLLM names blocks: more of each group as a request grows, and ends of prompts that
    lie within a block, which have no row."""
    dice = random.Random(7)
    for _ in range(50):
        request = ReqContext("request")
        rows = Rows(request, NOTHING)
        full: dict[int, list[Any]] = {group: [] for group in range(len(sizes))}
        tokens = 0
        for growth in [dice.choice([16, 100, 700]) for _ in range(4)]:
            tokens += growth
            for group, size in enumerate(sizes):
                named = [make_offload_key(each, group) for each in hashes("", tokens // size)]
                for number in range(len(full[group]), len(named)):
                    request.set_offload_key_position(named[number], (number + 1) * size)
                full[group] = named
            for group, size in enumerate(sizes):
                # Behind an end before the first full block, blocks have rows of their own.
                if tokens % size and all(full.values()):
                    end = make_offload_key(*hashes(f"end {tokens}", 1), group)
                    request.set_offload_key_position(end, tokens)
            if dice.random() < 0.5:
                continue
            for group, keys in full.items():
                for at in {0, len(keys) // 2, len(keys) - 1} if keys else set():
                    row, found = rows.find(keys[at])
                    assert (row.group, found, row.keys) == (group, at, keys)
                    assert row.names == [each[:-4] for each in keys]
    for tokens in range(1, 48):
        request = ReqContext("request")
        # A prompt that ends within its first block, and what is computed behind it later.
        named = [
            (make_offload_key(*hashes(f"end {end}", 1), group), end)
            for end in (tokens, 48)
            for group in range(len(sizes))
        ]
        for key, end in named:
            request.set_offload_key_position(key, end)
        rows = Rows(request, NOTHING)
        for key, _ in named:
            row, found = rows.find(key)
            assert row.keys[found] == key
        for row in rows:
            assert {get_offload_group_idx(key) for key in row.keys} == {row.group}


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers({"pipeline": "Posix", "posix": {"path": str(tmp_path / "kv"), "capacity": "1GiB"}})
    yield made
    made.close()


@pytest.mark.parametrize("order", ["from the first", "from the last"])
def test_lookups_behind_vllms_own_tier_are_linear(tiers: Tiers, order: str) -> None:
    blocks = hashes("prompt", SIZES[-1])
    fronts = {
        group: FrontNamespace(namespace, delay=1)
        for group, namespace in tiers.tier._namespaces.items()
    }
    tiers.tier._namespaces = fronts
    counted: dict[int, int] = {}
    for size in SIZES:
        keys = Lookups.keys(keys_of(blocks[:size]))
        request = context(f"request {size}", *keys)
        tiers.manager.on_new_request(request)
        asked = keys if order == "from the first" else keys[::-1]

        def look(asked: Any = asked, request: Any = request) -> None:
            # Once to ask, and once when the answers are there.
            for _ in range(2):
                for each in asked:
                    tiers.tier.lookup(each, request)
                for front in fronts.values():
                    front.steps += 1

        counted[size] = steps(look, lambda: sum(front.keys for front in fronts.values()))
        assert tiers.tier.lookup(keys[-1], request) is LookupResult.MISS
        tiers.manager.on_request_finished(request)
    assert_linear(counted)
