"""Two servers over one `kvdepot serve`: what one stored the other hits, and each may be killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvdepot
import pytest
from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, assert_same, prompts
from vllm_demo.measure import Answer

PROMPT_BLOCKS = 1000 // BLOCK

pytestmark = pytest.mark.stress  # test_manager.py and test_worker.py do it without servers.


def shared(number: int) -> Plan:
    """One of several servers; the service's socket is where an arena would be."""
    return Plan(
        "shared",
        lambda arena: {"pipeline": f"unix:{arena}.sock"},
        # Another log, and no server that follows the other.
        ("--no-enable-prefix-caching", "--seed", str(number)),
    )


ONE, OTHER = shared(0), shared(1)
PARALLEL = Plan(
    ONE.arena,
    ONE.settings,
    ("--no-enable-prefix-caching", "--data-parallel-size", "2"),
)

# Not `SERVERS`: started ahead of the service they would find nobody.
PLANS = (ONE, OTHER)


class Service:
    def __init__(self, arena: Path) -> None:
        self.address = f"unix:{arena}.sock"
        self.command = [sys.executable, "-m", "kvdepot._cli", "serve", "Cache|Dax"]
        for option in (f"dax.path={arena}", "dax.capacity=512MiB", "cache.capacity=128MiB"):
            self.command += ["-o", option]
        self.command += ["-o", "overload=drop", "--socket", f"{arena}.sock"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("serving")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tier(self, name: str) -> dict[str, int]:
        with kvdepot.open(self.address) as depot:
            assert depot.drain(60)
            return dict(depot.stats()["tiers"][name])


@pytest.fixture(scope="module")
def service(fleet: Fleet) -> Iterator[Service]:
    made = Service(fleet.arena(ONE))
    yield made
    made.kill()


def eventually(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_what_one_server_stored_the_other_hits_whoever_is_killed(
    fleet: Fleet, service: Service
) -> None:
    fleet.start(*PLANS)
    one, other = (fleet.take(plan) for plan in PLANS)
    first, second, third = prompts(3, 1000, seed=70)
    answers = [one.ask(first)]
    one.settle()
    assert service.tier("Dax")["blocks"] == PROMPT_BLOCKS
    served = other.ask(first)
    assert served.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert_same(served, answers[0])
    other.settle()
    stored = service.tier("Dax")
    assert (stored["blocks"], stored["stored_blocks"]) == (PROMPT_BLOCKS, PROMPT_BLOCKS)

    # A reset of one is none of the other.
    other.reset(external=True)
    assert other.ask(first).cached_tokens == 0
    assert one.ask(first).cached_tokens == PROMPT_BLOCKS * BLOCK

    # The service is killed under both: hits are lost, and no request.
    service.kill()
    for engine in (one, other):
        without = engine.ask(first)
        assert without.cached_tokens == 0
        assert_same(without, answers[0])
    service.start()
    # Their workers were idle when it was killed, and are: nobody waits for them.
    eventually(lambda: one.ask(first).cached_tokens == PROMPT_BLOCKS * BLOCK)
    answers.append(one.ask(second))
    one.settle()
    eventually(lambda: service.tier("Dax")["stored_blocks"] >= PROMPT_BLOCKS)

    # One server is killed while it stores.
    one.server.post("/v1/completions", {"model": "demo", "prompt": third, "max_tokens": 1}).read()
    one.kill()
    for prompt, answer in zip((first, second), answers, strict=True):
        again = other.ask(prompt)
        assert_same(again, answer)
    answers.append(other.ask(third))
    other.settle()
    again = other.ask(third)
    assert again.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert_same(again, answers[2])
    assert other.failed_loads() == 0
    held = service.tier("Dax")
    assert held["pinned_blocks"] == held["reserved_blocks"] == 0
    other.server.stop()


def test_data_parallel_engines_hit_what_each_other_stored(fleet: Fleet, service: Service) -> None:
    fleet.start(PARALLEL)
    engine = fleet.take(PARALLEL)
    (prompt,) = prompts(1, 1000, seed=71)
    before = service.tier("Dax")["stored_blocks"]

    def ask(rank: int) -> Answer:
        engine.server.headers = {"X-data-parallel-rank": str(rank)}
        return engine.ask(prompt)

    first = ask(0)
    engine.settle()
    assert service.tier("Dax")["stored_blocks"] == before + PROMPT_BLOCKS
    for rank in (1, 0, 1):
        served = ask(rank)
        assert served.cached_tokens == PROMPT_BLOCKS * BLOCK
        assert_same(served, first)
    engine.settle()
    assert service.tier("Dax")["stored_blocks"] == before + PROMPT_BLOCKS, "nothing twice"
    assert engine.failed_loads() == 0
    engine.server.stop()
