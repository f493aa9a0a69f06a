"""Ends of prompts within a block, which vLLM stores for models with states (Mamba): each KV group
has one, and a preempted request loads all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK, UNIT, EngineDouble, full, state
from kvdepot.vllm.compat import get_offload_group_idx, key_positions
from test_scheduling import Engines, engines, prompt

__all__ = ["engines"]

pytestmark = pytest.mark.integration

KINDS = {
    "a state": [full(), state()],
    "two states": [full(), state(), state()],
    "states first and last": [state(), full(), full(), state()],
}


class Loads:
    """What the scheduler has an engine's worker load."""

    def __init__(self, engine: EngineDouble) -> None:
        self.ends: list[dict[int, list[int]]] = []
        """For each load, by KV group: tokens at which its blocks end."""
        self.pinned: list[list[list[bool]]] = []
        """The same, without the number of the group: whether a block is pinned."""
        self.blocks: list[list[list[int]]] = []
        """The same: vLLM's blocks that they are loaded into."""
        manager = engine.connector.manager
        prepare, submit = manager.prepare_load, engine.worker.connector_worker.worker.submit_load

        def prepared(keys: Any, context: Any) -> Any:
            ends: dict[int, list[int]] = {}
            for key in keys:
                end = key_positions(context)[key]
                ends.setdefault(get_offload_group_idx(key), []).append(end)
            self.ends.append(ends)
            return prepare(keys, context)

        def submitted(job: int, source: Any, target: Any, *more: Any) -> bool:
            self.pinned.append([[p is not None for p in g.placements] for g in source.groups])
            ids = iter(target.block_ids.tolist())
            self.blocks.append([[next(ids) for _ in range(size)] for size in target.group_sizes])
            return submit(job, source, target, *more)

        manager.prepare_load = prepared
        engine.worker.connector_worker.worker.submit_load = submitted

    def tails(self) -> int:
        """Loads with ends within a block."""
        return sum(any(end % BLOCK for ends in load.values() for end in ends) for load in self.ends)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_preemption_the_tail_of_each_kv_group_is_in_its_block(
    engines: Engines, kind: str
) -> None:
    groups = KINDS[kind]
    engine = engines.start(groups)
    loads = Loads(engine)
    requests = engine.scheduler.requests
    # Neither the last block nor the last hash of the prompt is full.
    asked = prompt(1, 5 * BLOCK + 2 * UNIT + 1)
    tail = 5 * BLOCK + 2 * UNIT
    name = engine.add(asked, output_tokens=40)
    engine.run_until(lambda: requests[name].num_computed_tokens >= len(asked) + 3)
    # While the prompt's last block is not full.
    assert engine.preempt()
    assert requests[name].num_computed_tokens == 0
    engine.run_until(lambda: len(loads.blocks) == 1)
    (ends,), (pinned,), (blocks,) = loads.ends, loads.pinned, loads.blocks
    tables = engine.scheduler.kv_cache_manager.get_block_ids(name)
    assert list(ends) == list(range(len(groups)))
    for group, spec in enumerate(groups):
        whole = [] if spec == state() else [number * BLOCK for number in range(1, 6)]
        assert ends[group] == [*whole, tail]
        assert all(pinned[group]), "no block without a pin"
        assert blocks[group] == tables[group][5 - len(whole) : 6]
        assert 0 not in blocks[group]
    engine.run_until(lambda: name not in requests)
    engine.settle()
    assert engine.faults == []
    # Another engine of the same files finds them too.
    engine = engines.start(groups)
    assert engine.ask(asked) == [tail]
    assert engine.faults == []


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_preempted_the_states_are_those_of_its_tokens(
    engines: Engines, kind: str, seed: int, rounds: int
) -> None:
    """Prompts with common beginnings, whose answers do not fit into vLLM's memory beside each
    other, and which are all preempted now and then."""
    groups = KINDS[kind]
    drawn = random.Random(f"{seed} {kind}")
    # With less, vLLM stops: loaded prompts keep their blocks, while each needs one more for every
    # state.
    blocks = 32 * groups.count(full()) + 9 * groups.count(state())
    preempted = tails = 0
    for _ in range(rounds):
        engine = engines.start(groups, engine={"blocks": blocks})
        loads = Loads(engine)

        def sometimes(engine: EngineDouble = engine) -> None:
            nonlocal preempted
            if preempted == 0 or drawn.random() < 0.05:
                preempted += engine.preempt()

        engine.between_steps = sometimes
        stems = [prompt(drawn.randrange(1 << 30), 150) for _ in range(3)]
        for _ in range(6):
            several = [
                drawn.choice(stems)[: drawn.randrange(100, 150)]
                + prompt(drawn.randrange(1 << 30), drawn.choice([0, 0, 5]))
                for _ in range(3)
            ]
            engine.ask(*several, output_tokens=drawn.choice([1, 20, 100]))
            if drawn.random() < 0.3:
                engine.reset(external=False)
        assert engine.faults == []
        tier = engine.connector.manager.depot.stats()["tiers"]["Dax"]
        assert (tier["reserved_blocks"], tier["pinned_blocks"]) == (0, 0)
        tails += loads.tails()
    assert preempted > 0
    assert tails > 0
