"""Several servers on one directory of blocks: who hits what, and what is there after kills."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvd_reader
import kvdepot
import pytest
from engine_fleet import Fleet, Plan
from engine_harness import BLOCK, Engine, assert_same, prompts
from vllm_demo.server import ServerError

CAPACITY = 384 << 20
TOKENS = 1000
# What a server that has a whole prompt finds of it.
CACHED = TOKENS // BLOCK * BLOCK


def sharing(number: int, name: str = "directory", *arguments: str) -> Plan:
    """One of several servers on a directory; each has memory of its own before it."""
    return Plan(
        name,
        lambda arena: {
            "pipeline": "Cache|Posix",
            "cache": {"capacity": "64MiB"},
            "posix": {"path": str(arena), "capacity": CAPACITY},
        },
        ("--no-enable-prefix-caching", "--seed", str(number), *arguments),
    )


FIRST = sharing(0)
LATER = sharing(1)
OTHER_LAYOUT = sharing(2, "directory", "--block-size", "64")
RANKS = Plan(
    "directory-of-ranks",
    lambda arena: {
        "pipeline": "Cache|Posix",
        # Eight blocks, or one prompt.
        "cache": {"capacity": "17MiB"},
        "posix": {"path": str(arena), "capacity": CAPACITY},
        "overload": "wait",
    },
    (
        "--no-enable-prefix-caching",
        *("--tensor-parallel-size", "2"),
        *("--max-num-batched-tokens", "512"),
    ),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
)
# The others are not ahead: they start when the first one has stored something.
SERVERS = [FIRST, RANKS]


class Load:
    """Asks a server for new prompts until it dies; none of its answers is an error before that."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._stop = threading.Event()
        self.answered = 0
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            (prompt,) = prompts(1, TOKENS, seed=self._seed + 10_000 * number + turn)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, ServerError):
                self._engine.ask(prompt, output_tokens=1)
                self.answered += 1

    def kill(self) -> None:
        """SIGKILL for all processes of the server, whatever they are at."""
        self._stop.set()
        self._engine.kill()
        for thread in self._threads:
            thread.join(30)


def files(directory: Path) -> Iterator[Path]:
    """The blocks' files; those that are evicted meanwhile come or not."""
    yield from (path for path in (directory / "blocks").glob("*/*") if path.is_file())


def parts(path: Path) -> int:
    """How many ranks have contributed to a block."""
    with path.open("rb") as medium:
        (record,) = kvd_reader.BlockFile(medium).blocks()
        return record.parts


def fault(path: Path) -> str | None:
    """Why a file is no block; None for a whole one."""
    with path.open("rb") as medium:
        try:
            reader = kvd_reader.BlockFile(medium)
        except kvd_reader.NotAnArenaError as error:
            return str(error)
        (record,) = reader.blocks()
        return reader.fault(record)


def in_use(directory: Path) -> int:
    """Bytes that the directory's files have, those that are being written among them."""
    found = 0
    for path in below(directory):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_blocks * 512
    return found


def below(folder: Path) -> list[Path]:
    """All files below a folder; `rglob` ends with an error where a folder goes meanwhile."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def acknowledged(engine: Engine) -> float:
    """Bytes of the blocks that a server has published, and been told so."""
    return engine.metric("kvdepot_stored_bytes_total", tier="Posix")


def check_after_kills(directory: Path) -> set[str]:
    """Everything is whole and within bounds, and the next opener sweeps what was begun."""
    assert in_use(directory) <= CAPACITY * 1.05
    found = {path: fault(path) for path in files(directory)}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}
    assert found
    settings = {"posix": {"path": str(directory), "capacity": CAPACITY}}
    with kvdepot.open("Posix", settings):
        deadline = time.monotonic() + 150
        # This opener's own folder, with nothing but the file that says that it lives.
        while len(left := below(directory / "new")) > 1:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
    assert in_use(directory) <= CAPACITY * 1.05
    return {path.name for path in found}


def test_servers_share_a_directory_and_those_of_another_layout_never_meet(fleet: Fleet) -> None:
    first, directory = fleet.take(FIRST), fleet.arena(FIRST)
    one, two = prompts(2, TOKENS, seed=90)
    answers = [first.ask(one)]
    first.settle()
    assert len(list(files(directory))) == TOKENS // BLOCK

    fleet.start(LATER, OTHER_LAYOUT)
    later = fleet.take(LATER)
    served = later.ask(one)
    assert served.cached_tokens == CACHED, "its first request"
    assert_same(served, answers[0])
    assert later.external_hits() == CACHED
    assert later.metric("kvdepot_moved_blocks_total", op="load", tier="Posix") == TOKENS // BLOCK
    assert later.failed_loads() == 0
    assert later.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") > 0

    # The other way round, too: what the later one stores the first one finds.
    answers.append(later.ask(two))
    later.settle()
    served = first.ask(two)
    assert served.cached_tokens == CACHED
    assert_same(served, answers[1])

    other = fleet.take(OTHER_LAYOUT)
    of_two = {path.name for path in files(directory)}
    for number, prompt in enumerate((one, two)):
        fresh = other.ask(prompt)
        assert fresh.cached_tokens == 0, "blocks of another size"
        assert fresh.tokens == answers[number].tokens
    other.settle()
    of_all = {path.name for path in files(directory)}
    assert of_two < of_all
    # A name ends with its namespace.
    namespaces = [{name.rpartition("-")[2] for name in names} for names in (of_two, of_all)]
    assert [len(found) for found in namespaces] == [1, 2]
    served = other.ask(one)
    assert served.cached_tokens == TOKENS // 64 * 64
    assert other.failed_loads() == first.failed_loads() == later.failed_loads() == 0
    other.server.stop()


def test_killed_under_load_they_leave_whole_blocks_alone(fleet: Fleet, seed: int) -> None:
    directory = fleet.arena(FIRST)
    engines = [fleet.take(plan) for plan in (FIRST, LATER)]
    for engine in engines:
        engine.settle()
    before = {path.name for path in files(directory)}
    assert before
    counted = [acknowledged(engine) for engine in engines]
    chance = random.Random(seed)
    loads = [Load(engine, seed=chance.randrange(1 << 30)) for engine in engines]
    deadline = time.monotonic() + 300

    def stored_by(number: int) -> float:
        return acknowledged(engines[number]) - counted[number]

    while not (all(load.answered for load in loads) and any(map(stored_by, range(2)))):
        assert time.monotonic() < deadline, "nothing was stored under the load"
        time.sleep(0.05)
    stored, published = 0.0, set[str]()
    for load in chance.sample(loads, len(loads)):
        time.sleep(chance.uniform(0, 1.5))
        # What it says last before it is killed; what it has published is there for all.
        number = loads.index(load)
        stored += stored_by(number)
        published |= {path.name for path in files(directory)}
        load.kill()
    # Nothing is evicted: all that was acknowledged has to be there, before and under the load.
    assert in_use(directory) < CAPACITY * 0.9
    left = check_after_kills(directory)
    assert before | published <= left
    # Their prompts differ, so that nobody is told of another's block.
    new = (path for path in files(directory) if path.name not in before)
    assert sum(path.stat().st_size for path in new) >= stored


def test_the_parts_of_two_ranks_join_in_one_file(fleet: Fleet, seed: int) -> None:
    engine, directory = fleet.take(RANKS), fleet.arena(RANKS)
    prompt, between = prompts(2, TOKENS, seed=91)
    first = engine.ask(prompt)
    engine.settle()
    of_prompt = {path: parts(path) for path in files(directory)}
    assert list(of_prompt.values()) == [2] * (TOKENS // BLOCK)
    engine.ask(between)
    engine.settle()
    served = engine.ask(prompt)
    assert served.cached_tokens == CACHED
    assert_same(served, first)
    assert engine.metric("kvdepot_moved_blocks_total", op="load", tier="Posix") > 0
    assert engine.failed_loads() == 0

    # A worker is killed while blocks are stored, chunk by chunk; vLLM ends the server.
    workers = [
        pid
        for pid in engine.server.processes()
        if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Worker")
    ]
    asked = 0
    with ThreadPoolExecutor(1) as thread:
        for text in prompts(8, TOKENS, seed=92):
            before, asked = len(list(files(directory))), asked + 1
            lost = thread.submit(engine.ask, text * 3)
            while len(list(files(directory))) == before and not lost.done():
                pass
            if not lost.done():
                break
        time.sleep(random.Random(seed).uniform(0, 0.5))
        engine.server.kill_one(workers[1])
        was_answered = lost.exception() is None
    engine.kill()
    left = check_after_kills(directory)
    assert {path.name for path in of_prompt} <= left
    assert {parts(path) for path in files(directory)} == {2}, "never one rank's alone"
    came = 2 * len(of_prompt) + 3 * asked * TOKENS // BLOCK
    assert was_answered or len(left) < came, "and not all that came"


@pytest.mark.stress
def test_killed_at_random_for_a_minute_they_leave_whole_blocks_alone(
    fleet: Fleet, seed: int
) -> None:
    """The same again and again, with starts in between, until the directory evicts as well."""
    plans = [sharing(number, "stormy") for number in (0, 1)]
    directory = fleet.arena(plans[0])
    chance = random.Random(seed)
    fleet.start(*plans)
    engines = [fleet.take(plan) for plan in plans]
    under_load, most = 0.0, 0
    while under_load < 60:
        loads = [Load(engine, seed=chance.randrange(1 << 30)) for engine in engines]
        begun, lasts = time.monotonic(), chance.uniform(5, 25)
        while time.monotonic() - begun < lasts:
            most = max(most, in_use(directory))
            time.sleep(0.1)
        under_load += lasts
        for load in chance.sample(loads, len(loads)):
            time.sleep(chance.uniform(0, 0.5))
            load.kill()
        check_after_kills(directory)
        if under_load < 60:
            # A plan's next server; both start at the same time.
            plans = [sharing(number, "stormy") for number in (0, 1)]
            fleet.start(*plans)
            engines = [fleet.take(plan) for plan in plans]
    assert most <= CAPACITY * 1.05
    # Whatever is left of them serves the next ones.
    print(json.dumps({"seconds": under_load, "most": most, "files": len(list(files(directory)))}))
