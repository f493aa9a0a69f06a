"""The connector under vLLM's own scheduler, with a model whose every key and value is checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvd_reader
import kvdepot
import pytest

pytest.importorskip("vllm")

import engine_neighbour
from engine_device import DeviceWorker
from engine_double import BLOCK, BYTES, OURS, EngineDouble, full, window
from engine_fleet import NEIGHBOUR
from engine_harness import ROOT, flip, logged
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import spec as vllm_spec
from kvdepot.vllm.compat import versions

pytestmark = pytest.mark.integration

WINDOW = 4 * BLOCK
KINDS = {
    "full": [full()],
    "window": [window(WINDOW)],
    "both": [full(), window(WINDOW)],
    "two windows": [window(WINDOW), window(WINDOW + 3 * BLOCK)],
}
# With the group of a drafter (EAGLE, MTP).
DRAFTERS = {
    "full": ([full()], 0),
    "window": ([window(WINDOW)], 0),
    "full beside a window": ([full(), window(WINDOW)], 0),
    "window beside full": ([full(), window(WINDOW)], 1),
    "two windows": ([window(WINDOW), window(WINDOW + 3 * BLOCK)], 1),
}


class Engines:
    """One engine after the other on one arena."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.arena = directory / "arena.kvd"
        self.engine: EngineDouble | None = None

    def start(
        self,
        groups: Any,
        *,
        beside: Callable[[dict[str, Any]], dict[str, Any]] = lambda ours: ours,
        engine: dict[str, Any] | None = None,
        **extra: Any,
    ) -> EngineDouble:
        """`extra` are kvdepot's settings, `beside` puts other connectors around it."""
        self.stop()
        settings: dict[str, Any] = {
            "pipeline": "Dax",
            "dax": {"path": str(self.arena), "capacity": "64MiB"},
        }
        if "pipeline" in extra:
            settings = {}
        # A probe would compute a part of what is found.
        settings["probe_every"] = 0
        # Longer than anything here takes on a busy machine.
        settings["lookup_wait"] = "10m"
        ours = OURS | {"kv_connector_extra_config": settings | extra}
        self.engine = EngineDouble(self.directory, groups, beside(ours), **(engine or {}))
        return self.engine

    def stop(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()

    def blocks(self) -> list[kvd_reader.Record]:
        with self.arena.open("rb") as medium:
            found = kvd_reader.Arena(medium).blocks()
            return sorted(found, key=lambda record: record.sequence)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    # What vLLM knows about its models: asking one takes a process that imports all of it.
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(ROOT / "build" / "vllm-cache"))
    made = Engines(tmp_path)
    yield made
    made.stop()


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=tokens)


def failed_loads(engine: EngineDouble) -> int:
    return engine.counted("kvdepot_failed_blocks", ("load",))


@pytest.fixture(params=["host", "double"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The worker as it is in host memory, and on a device by the double of its driver."""
    if request.param == "double":
        monkeypatch.setattr(vllm_spec, "KvdepotWorker", DeviceWorker)
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotten_block_is_computed_again_and_with_a_window_all_before_it(
    engines: Engines, worker: str, kind: str
) -> None:
    engine = engines.start(KINDS[kind])
    asked = prompt(1, 200)
    assert engine.ask(asked) == [0]
    engine.reset(external=False)
    whole = 200 // BLOCK * BLOCK
    assert engine.ask(asked) == [whole]
    for n, record in enumerate(engines.blocks()):
        flip(engines.arena, record.extents[0][0] + 77)
        engine.reset(external=False)
        (cached,) = engine.ask(asked)
        assert engine.faults == []
        assert (cached > 0) <= (kind == "full"), "vLLM goes on before it where it still can"
        assert cached < whole
        assert failed_loads(engine) == n + 1
        engine.reset(external=False)
        assert engine.ask(asked) == [whole], "stored again"
    assert engine.faults == []


def test_a_block_that_is_partly_out_of_the_window_is_not_stored(
    engines: Engines, worker: str
) -> None:
    """vLLM offers it, with those of its own blocks that it has."""
    engine = engines.start(KINDS["window"], blocks_per_chunk=4)
    asked = prompt(10, 165)
    engine.ask(asked, output_tokens=1)
    (group,) = engine.connector.manager._groups.values()
    assert group.namespace.clear() > 0
    # Its room gets other bytes.
    engine.ask(prompt(11, 165), output_tokens=1)
    # Of what vLLM's own cache has, the request gets the window.
    engine.ask([*asked, 7, 8, 9], output_tokens=1)
    engine.reset(external=False)
    engine.ask(asked[:130])
    assert engine.faults == []


@pytest.mark.parametrize(
    ("kind", "chunk"),
    # A stored block of a model with several groups is one of vLLM's.
    [(kind, chunk) for kind in ("full", "window") for chunk in (1, 2, 4, 8)]
    + [("both", 1), ("two windows", 1)],
)
def test_whatever_is_asked_the_bytes_are_those_of_its_tokens(
    engines: Engines, worker: str, kind: str, chunk: int, seed: int, rounds: int
) -> None:
    """Prompts with common beginnings, side by side, in steps that cut chunks, in little memory."""
    drawn = random.Random(f"{seed} {worker} {kind} {chunk}")
    for _ in range(rounds):
        engine = engines.start(
            KINDS[kind],
            engine={
                "blocks": drawn.choice([24, 40, 64]) * len(KINDS[kind]),
                "batched_tokens": drawn.choice([16, 24, 48, 80, 200]),
                "prefix_caching": drawn.random() < 0.7,
            },
            blocks_per_chunk=chunk,
        )
        stems = [prompt(drawn.randrange(1 << 30), 250) for _ in range(3)]
        for _ in range(12):
            several = [
                drawn.choice(stems)[: drawn.randrange(20, 250)]
                + prompt(drawn.randrange(1 << 30), drawn.choice([0, 0, 5, 40]))
                for _ in range(drawn.choice([1, 1, 2, 4]))
            ]
            engine.ask(*several, output_tokens=drawn.choice([1, 4, 40, 90]))
            if drawn.random() < 0.5:
                engine.reset(external=False)
            if drawn.random() < 0.3 and (found := engines.blocks()):
                flip(engines.arena, drawn.choice(found).extents[0][0] + 7)
        assert engine.faults == []
        engine.settle()
        state = engine.connector.manager.depot.stats()["tiers"]["Dax"]
        assert (state["reserved_blocks"], state["pinned_blocks"]) == (0, 0)


@pytest.mark.parametrize("on_reset", ["verify", "epoch", "clear"])
def test_after_other_weights_and_a_reset_nothing_stale_is_served(
    engines: Engines, on_reset: str
) -> None:
    engine = engines.start(KINDS["both"], on_reset=on_reset)
    asked = prompt(2, 150)
    engine.ask(asked)
    stored = len(engines.blocks())
    for weights in (1, 2):
        engine.reload(weights)
        engine.reset(external=True)
        assert engine.ask(asked) == [0]
        engine.reset(external=False)
        assert engine.ask(asked)[0] > 0, "what was stored since is served"
        assert engine.faults == []
    # Of three epochs the one in the middle has gone.
    assert len(engines.blocks()) == {"verify": 3, "epoch": 2, "clear": 1}[on_reset] * stored


def test_the_next_engine_serves_what_was_stored_before_a_reset(engines: Engines) -> None:
    engine = engines.start(KINDS["both"])
    asked = prompt(9, 150)
    engine.ask(asked)
    engine.reload(1)
    engine.reset(external=True)
    engine.ask(asked)
    # It has the weights of the files again.
    engine = engines.start(KINDS["both"])
    assert engine.ask(asked)[0] > 0
    assert engine.faults == []


def test_blocks_of_another_minor_version_are_found_where_they_are_shared(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, whole = prompt(22, 200), 200 // BLOCK * BLOCK

    def found(version: tuple[int, int], **extra: Any) -> int:
        monkeypatch.setattr(versions, "here", lambda: version)
        (cached,) = engines.start(KINDS["full"], **extra).ask(asked)
        return cached

    assert [found(version) for version in ((0, 32), (0, 33), (0, 32))] == [0, 0, whole]
    shared = {"share_vllm_versions": True}
    assert [found(version, **shared) for version in ((0, 32), (0, 33))] == [0, whole]


@pytest.mark.parametrize("on_reset", ["verify", "epoch", "clear"])
@pytest.mark.parametrize("kind", ["full", "both"])
def test_weights_that_change_while_requests_are_served_leave_nothing_behind(
    engines: Engines, worker: str, on_reset: str, kind: str, seed: int, rounds: int
) -> None:
    drawn = random.Random(seed)
    resets = 0
    for _ in range(rounds):
        engines.stop()
        engines.arena.unlink(missing_ok=True)
        engine = engines.start(KINDS[kind], on_reset=on_reset, engine={"batched_tokens": 48})

        def sometimes(engine: EngineDouble = engine) -> None:
            nonlocal resets
            # vLLM refuses a reset while blocks are on their way.
            if resets == 0 or drawn.random() < 0.03:
                resets += engine.change_weights()

        engine.between_steps = sometimes
        stems = [prompt(drawn.randrange(1 << 30), 200) for _ in range(2)]
        for _ in range(12):
            several = [drawn.choice(stems)[: drawn.randrange(20, 200)] for _ in range(3)]
            engine.ask(*several, output_tokens=drawn.choice([1, 20]))
            if drawn.random() < 0.5:
                engine.reset(external=False)
        assert engine.faults == []
        state = engine.connector.manager.depot.stats()["tiers"]["Dax"]
        assert (state["reserved_blocks"], state["pinned_blocks"]) == (0, 0)
    assert resets > 0


@pytest.mark.parametrize("on_reset", ["verify", "epoch", "clear"])
@pytest.mark.parametrize("kind", ["full", "both"])
def test_what_a_request_has_from_before_a_reset_is_not_stored_after_it(
    engines: Engines, on_reset: str, kind: str
) -> None:
    """A reset leaves running requests alone unless it is told otherwise."""
    engine = engines.start(KINDS[kind], on_reset=on_reset)
    asked = prompt(21, 150)
    name = engine.add(asked, output_tokens=40)
    for _ in range(10):
        engine.step()
    engine.weights = 1
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run_until(lambda: name not in engine.scheduler.requests)
    engine.faults.clear()
    engine.reset(external=False)
    assert engine.ask(asked) == [0]
    engine.reset(external=False)
    assert engine.ask(asked)[0] > 0, "others are stored"
    assert engine.faults == []


def multi(*children: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
        **outer,
    }


def test_until_all_weights_are_read_nothing_is_stored_or_looked_up(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fingerprint = threading.Event(), vllm_namespace.weights

    def weights(config: Any, given: str) -> str:
        assert given != "full" or read.wait(300)
        return fingerprint(config, given)

    monkeypatch.setattr(vllm_namespace, "weights", weights)
    asked, whole = prompt(9, 200), 200 // BLOCK * BLOCK
    engine = engines.start(KINDS["full"], weights="full")
    try:
        assert engine.ask(asked) == [0]
        assert engines.blocks() == []
    finally:
        read.set()
    engine.run_until(lambda: engine.connector._weights.known)
    for expected in (0, whole):
        engine.reset(external=False)
        assert engine.ask(asked) == [expected]
    assert engine.faults == []


@pytest.mark.parametrize("first", ["neighbour", "kvdepot"])
@pytest.mark.parametrize("kind", ["full", "both"])
def test_beside_another_connector_it_works_as_alone(
    engines: Engines, first: str, kind: str
) -> None:
    def beside(ours: dict[str, Any]) -> dict[str, Any]:
        return multi(NEIGHBOUR, ours) if first == "neighbour" else multi(ours, NEIGHBOUR)

    asked = prompt(4, 200)
    engine = engines.start(KINDS[kind])
    engine.ask(asked)
    alone = engines.blocks()
    engine = engines.start(KINDS[kind], beside=beside)
    neighbours = [
        child
        for child in engine.connector.sub_connectors
        if isinstance(child, engine_neighbour.Neighbour)
    ]
    assert neighbours[0].heard, "the handshake is its own"
    assert engine.ask(asked)[0] == 200 // BLOCK * BLOCK, "the first request hits: same blocks"
    # And stores, and computes again what fails.
    flip(engines.arena, alone[-1].extents[0][0] + 9)
    engine.reset(external=False)
    engine.ask(asked)
    other = prompt(5, 200)
    engine.ask(other)
    engine.reset(external=False)
    assert engine.ask(asked, other) == [200 // BLOCK * BLOCK] * 2
    engine.reload(1)
    engine.reset(external=True)
    assert engine.ask(asked) == [0]
    assert engine.faults == []


def test_a_prompt_for_another_engine_ends_with_the_words_of_each_connector(
    engines: Engines,
) -> None:
    """vLLM ends the engine where two connectors return the same word."""
    vllms = {"do_remote_prefill": True, "do_remote_decode": False}
    asked = prompt(6, 100)
    for beside in (None, lambda ours: multi(NEIGHBOUR, ours), lambda ours: multi(ours, NEIGHBOUR)):
        engine = engines.start(KINDS["full"], **({"beside": beside} if beside else {}))
        engine.transfer = {"do_remote_decode": True}
        engine.ask(asked, output_tokens=1)
        (words,) = engine.returned.values()
        # vLLM's own.
        words.pop("remote_prefill_cached_tokens", None)
        assert words == vllms | {"kvdepot_stored": True} | ({"remote_port": 1} if beside else {})
        assert engine.faults == []


def test_beside_another_connector_its_requests_do_not_wait(engines: Engines) -> None:
    """Those that carry vLLM's words alone are that one's."""
    engine = engines.start(KINDS["full"], beside=lambda ours: multi(NEIGHBOUR, ours))
    engine.ask(prompt(7, 100))
    engine.transfer = {"do_remote_prefill": True}
    # It would not end in ten minutes.
    assert engine.ask(prompt(8, 100)) == [0]
    assert engine.faults == []


def test_beside_another_connector_the_failure_policy_has_to_be_set(engines: Engines) -> None:
    with pytest.raises(kvdepot.ConfigError, match=r"kv_load_failure_policy: 'fail'.*\"recompute\""):
        engines.start(
            KINDS["full"],
            beside=lambda ours: multi(ours, NEIGHBOUR, kv_load_failure_policy="fail"),
        )


@pytest.mark.parametrize(
    ("own", "prefix_caching"), [("less", True), ("more", True), ("more", False)]
)
def test_a_depot_that_holds_less_than_vllms_own_cache_says_so_once(
    engines: Engines, own: str, prefix_caching: bool
) -> None:
    blocks = {"less": 64, "more": (65 << 20) // (BLOCK * BYTES)}[own]
    with logged("vllm.kvdepot.tiers") as lines:
        engines.start(KINDS["full"], engine={"blocks": blocks, "prefix_caching": prefix_caching})
    said = [line for line in lines if "vLLM's prefix cache" in line]
    assert len(said) == (own == "more" and prefix_caching)
    assert all("Dax (0.06 GiB)" in line and "increase Dax" in line for line in said)


def test_a_depot_that_is_gone_costs_hits_and_no_request(engines: Engines) -> None:
    engine = engines.start(KINDS["both"])
    asked = prompt(6, 200)
    engine.ask(asked)
    engine.reset(external=False)
    # Its server is closed while the engine goes on, and with it every call's hope.
    engine.connector.manager.depot._depot.close()
    assert engine.ask(asked, prompt(7, 100)) == [0, 0]
    engine.worker.connector_worker.worker._mover.close()
    assert engine.ask(asked, prompt(8, 100)) == [200 // BLOCK * BLOCK, 0], "vLLM's own cache"
    engine.reset(external=True)
    assert engine.ask(asked) == [0]
    assert engine.faults == []


@pytest.mark.parametrize("kind", DRAFTERS)
def test_with_a_drafters_group_all_but_the_last_block_is_served(
    engines: Engines, kind: str
) -> None:
    """vLLM drops the last block that it finds of such a group. Of windows it stores only what ends
    with the prompt's last block, unless it is told otherwise."""
    groups, drafter = DRAFTERS[kind]
    lengths = [blocks * BLOCK + more for blocks in (7, 12) for more in (0, 1, BLOCK - 1)]
    asked = [prompt(length, length) for length in lengths]
    engine = engines.start(groups, engine={"drafter": drafter})
    assert engine.ask(*asked) == [0] * len(asked)
    engine = engines.start(groups, engine={"drafter": drafter})
    found = [engine.ask(one)[0] for one in asked]
    assert found == [(length // BLOCK - 1) * BLOCK for length in lengths]
    assert engine.faults == []


def test_after_a_wake_up_blocks_have_the_names_that_they_had(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells connectors of both from 0.33 on."""
    engine = engines.start(KINDS["full"])
    asked = prompt(1, 200)
    assert engine.ask(asked) == [0]
    groups, mover = engine.connector.manager.hittable, engine.worker._half.mover
    rested: list[str] = []
    monkeypatch.setattr(mover, "rest", lambda: rested.append("rested"))
    engine.worker.unregister_kv_caches()
    assert rested == ["rested"]
    geometry = engine.worker.get_handshake_metadata()
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): geometry})
    assert engine.connector.manager.hittable is groups
    engine.reset(external=False)
    assert engine.ask(asked) == [200 // BLOCK * BLOCK]


def test_after_a_wake_up_with_other_options_no_request_is_stored_under_both_names(
    engines: Engines,
) -> None:
    """As if vLLM had written into its configuration meanwhile."""
    engine = engines.start(KINDS["full"])
    asked = prompt(1, 200)
    name = engine.add(asked, output_tokens=60)
    requests = engine.scheduler.requests
    engine.run_until(lambda: requests[name].num_computed_tokens > len(asked))
    before = engine.connector.manager.hittable[0].namespace
    geometry = replace(engine.worker.get_handshake_metadata(), options="others")
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): geometry})
    engine.run_until(lambda: name not in requests)
    engine.settle()
    manager = engine.connector.manager
    namespace = manager.hittable[0].namespace
    assert namespace.digest != before.digest
    assert list(namespace.opened_by(manager.depot.raw).blocks()) == []
    engine.ask(prompt(2, 200))
    assert len(list(namespace.opened_by(manager.depot.raw).blocks())) >= 200 // BLOCK
