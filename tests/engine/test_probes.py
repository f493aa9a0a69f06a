"""Probes: stored blocks that an engine would not have computed are noticed, and not served."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import kvdepot
import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK, BYTES, EngineDouble
from engine_harness import flip, logged
from engine_lookups import MODELS, Lookups, hashes
from engine_manager import PART, context, end_step, key
from engine_manager import World as ManagerWorld
from kvdepot.engine import quarantine
from kvdepot.vllm import comparing
from kvdepot.vllm import probes as vllm_probes
from kvdepot.vllm.beside import NOTHING, Beside
from kvdepot.vllm.jobs import Difference, Group, Plan, WorkerReport
from kvdepot.vllm.memory_weights import MemoryWeights
from kvdepot.vllm.probes import Probes
from kvdepot.vllm.settings import ProbeSettings
from test_scheduling import KINDS, Engines, engines, multi, prompt, worker
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import RequestStatus

__all__ = ["engines", "worker"]

pytestmark = pytest.mark.integration

SUSPECT = MemoryWeights.suspect
PROMPTS = [prompt(seed, 150) for seed in range(40, 60)]
WHOLE = 150 // BLOCK * BLOCK
# Of so many hits one is probed by chance: first ones alone are.
FIRST_ALONE = 10**12


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of the test's own; and other weights stand for whatever is in no name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(MemoryWeights, "suspect", lambda *_, **__: None)


def restarted(engines: Engines, kind: str = "full", **settings: object) -> EngineDouble:
    """An engine over what another one has stored, whose weights have changed unnoticed since."""
    first = engines.start(KINDS[kind])
    first.ask(*PROMPTS)
    engine = engines.start(KINDS[kind], **{"probe_every": FIRST_ALONE} | settings)
    engine.weights = 1
    return engine


def probed(engine: EngineDouble, result: str) -> int:
    return engine.counted("kvdepot_probe_blocks", (result,))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_alike_agrees(engines: Engines, kind: str) -> None:
    engine = engines.start(KINDS[kind])
    engine.ask(*PROMPTS)
    engine = engines.start(KINDS[kind], probe_every=1)
    for asked in PROMPTS:
        (cached,) = engine.ask(asked)
        assert 0 <= cached < WHOLE
    assert engine.faults == []
    assert probed(engine, "agreed") >= len(PROMPTS)
    assert {name[1] for name in engine._counters if name[0] == "kvdepot_probe_blocks"} == {
        ("agreed",)
    }
    state = engine.connector.manager.depot.stats()["tiers"]["Dax"]
    assert (state["reserved_blocks"], state["pinned_blocks"]) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_hit_after_a_restart_is_probed_and_nothing_stale_is_served_after_it(
    engines: Engines, kind: str
) -> None:
    engine = restarted(engines, kind)
    with logged("vllm.kvdepot.probes") as lines:
        (first,) = engine.ask(PROMPTS[0])
    # What is stored of windows is all computed again.
    assert (first > 0) is (kind == "full")
    assert bool(engine.faults) is (kind == "full")
    assert "a probe failed" in str(lines)
    assert f"may be wrong: {int(first > 0)}." in str(lines)
    assert probed(engine, "differed") >= 1
    engine.faults.clear()
    stored = len(engines.blocks())
    for asked in (*PROMPTS[1:], prompt(81, 100)):
        assert engine.ask(asked) == [0]
    assert engine.faults == []
    assert len(engines.blocks()) == stored, "nor is anything stored that others may be served"


def test_after_three_probes_that_fail_the_namespace_is_not_used_any_more(engines: Engines) -> None:
    engine = restarted(engines)
    with logged("vllm.kvdepot.probes") as lines:
        for asked in PROMPTS[:5]:
            engine.ask(asked)
    assert sum("a probe failed" in line for line in lines) == 3
    assert "is in quarantine" in str(lines)
    (file,) = quarantine.directory().iterdir()
    digest = bytes.fromhex(file.stem)
    entry = quarantine.read(digest)
    assert entry is not None
    assert "differs from what this engine computes" in entry["reason"]
    assert probed(engine, "differed") > 1 + WHOLE // BLOCK
    stored = len(engines.blocks())
    # Over a restart, too, even with the right weights.
    engine = engines.start(KINDS["full"], probe_every=FIRST_ALONE)
    engine.ask(*PROMPTS[:3])
    assert engine.ask(prompt(70, 100)) == [0]
    assert len(engines.blocks()) == stored
    file.unlink()
    engine = engines.start(KINDS["full"], probe_every=FIRST_ALONE)
    assert engine.ask(PROMPTS[4])[0] > 0
    assert engine.faults == []


def test_weights_that_changed_in_memory_are_noticed_by_a_probe_and_their_namespace_is_sound(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryWeights, "suspect", SUSPECT)
    engine = restarted(engines)
    with logged("vllm.kvdepot.weights") as lines:
        engine.ask(PROMPTS[0])
        assert engine.ask(*PROMPTS[1:6]) == [0] * 5
    assert "without a vLLM call that kvdepot observes" in str(lines)
    assert not engine.connector.manager.probes.quarantined
    engine = engines.start(KINDS["full"], probe_every=FIRST_ALONE)
    assert engine.ask(PROMPTS[6])[0] > 0
    assert engine.faults == []


def test_a_doubt_ends_with_what_it_is_about(engines: Engines) -> None:
    engine = restarted(engines, on_reset="clear")
    engine.ask(PROMPTS[0])
    assert engine.connector.manager.probes.doubtful
    engine.reset(external=True)
    engine.ask(PROMPTS[0])
    engine.reset(external=False)
    assert engine.ask(PROMPTS[0])[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_in_doubt_nothing_is_served_after_a_preemption_either(engines: Engines, kind: str) -> None:
    engine = restarted(engines, kind)
    name = engine.add(PROMPTS[0], output_tokens=40)
    engine.run_until(lambda: engine.connector.manager.probes.doubtful)
    engine.faults.clear()
    scheduler = engine.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    loads = engine.counted("kvdepot_moved_blocks", ("load", "Dax"))
    engine.run_until(lambda: name not in scheduler.requests)
    engine.settle()
    assert engine.counted("kvdepot_moved_blocks", ("load", "Dax")) == loads
    assert engine.faults == []


def test_beside_another_connector_there_are_no_probes(engines: Engines) -> None:
    engines.start(KINDS["full"]).ask(*PROMPTS)
    engine = engines.start(
        KINDS["full"], beside=lambda ours: multi(ours), probe_every=1, probe_first="detect"
    )
    engine.ask(prompt(80, 40))
    assert engine.ask(PROMPTS[0]) == [WHOLE]


def test_where_no_directory_can_be_read_nothing_is_in_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at in ("/dev/null", "/proc/1/fd"):
        monkeypatch.setenv("XDG_CACHE_HOME", at)
        assert quarantine.read(bytes(16)) is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    assert quarantine.read(bytes(16)) is None


def test_after_ten_probes_that_agree_hits_are_served_again_but_not_the_block_that_differed(
    engines: Engines,
) -> None:
    engine = restarted(engines)
    engine.ask(PROMPTS[0])
    engine.weights = 0
    engine.faults.clear()
    with logged("vllm.kvdepot.probes") as lines:
        for asked in PROMPTS[1:11]:
            assert engine.ask(asked) == [0]
            engine.reset(external=False)
    assert "10 probes in a row matched" in str(lines)
    assert engine.ask(PROMPTS[12]) == [WHOLE]
    engine.reset(external=False)
    # Its last block was refused; it stays stored.
    assert engine.ask(PROMPTS[0]) == [WHOLE - BLOCK]
    assert engine.faults == []
    assert not quarantine.directory().exists()
    engine = engines.start(KINDS["full"], probe_every=0)
    assert engine.ask(PROMPTS[0]) == [WHOLE]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_serves_nothing_before_the_first_hit_has_agreed(engines: Engines, kind: str) -> None:
    engine = restarted(engines, kind, probe_first="gate")
    for several in (PROMPTS[:4], PROMPTS[4:8]):
        assert engine.ask(*several) == [0] * 4
    assert engine.faults == []
    assert probed(engine, "differed") > 1
    for file in quarantine.directory().iterdir():
        file.unlink()
    engine = engines.start(KINDS[kind], probe_every=FIRST_ALONE, probe_first="gate")
    # The one that is looked up with the first one does not wait: it misses.
    assert engine.ask(*PROMPTS[8:10]) == [0, 0]
    assert engine.ask(PROMPTS[10])[0] > 0
    assert probed(engine, "differed") == 0
    assert engine.faults == []


def test_a_gate_opens_for_the_next_if_the_first_one_comes_to_nothing(engines: Engines) -> None:
    engines.start(KINDS["full"]).ask(*PROMPTS)
    engine = engines.start(KINDS["full"], probe_every=FIRST_ALONE, probe_first="gate")
    name = engine.add(PROMPTS[0])
    engine.step()
    engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    engine.settle()
    assert engine.ask(PROMPTS[1]) == [0]
    assert engine.ask(PROMPTS[2]) == [WHOLE]
    assert engine.faults == []


def test_without_probes_nothing_is_compared(engines: Engines) -> None:
    engine = restarted(engines, probe_every=0)
    assert engine.ask(PROMPTS[0]) == [WHOLE]
    assert all(name != "kvdepot_probe_blocks" for name, _ in engine._counters)
    with pytest.raises(kvdepot.ConfigError, match="probe_first: 'gate' is not allowed"):
        engines.start(KINDS["full"], probe_every=0, probe_first="gate")


def test_an_engine_that_only_loads_compares_too(engines: Engines) -> None:
    engines.start(KINDS["full"]).ask(*PROMPTS)
    stored = len(engines.blocks())
    engine = engines.start(
        KINDS["full"], beside=lambda ours: ours | {"kv_role": "kv_consumer"}, probe_every=1
    )
    engine.weights = 1
    # With the fourth the third comparison is over.
    for asked in PROMPTS[:4]:
        engine.ask(asked)
    assert probed(engine, "differed") > 1
    assert quarantine.directory().exists()
    assert len(engines.blocks()) == stored


def test_a_corrupt_block_is_not_taken_for_one_that_differs(engines: Engines) -> None:
    engine = engines.start(KINDS["full"], probe_every=1)
    engine.connector.manager.probes._random.seed(3)
    engine.ask(PROMPTS[0])
    last = max(engines.blocks(), key=lambda record: record.sequence)
    flip(engines.arena, last.extents[0][0] + 77)
    engine.reset(external=False)
    engine.ask(PROMPTS[0])
    assert probed(engine, "differed") == 0
    assert probed(engine, "corrupt") == 1
    engine.reset(external=False)
    engine.ask(PROMPTS[0])
    assert engine.faults == []


@pytest.mark.parametrize("differs", [None, 0, 1])
def test_a_block_agrees_if_it_does_on_every_rank(differs: int | None) -> None:
    world = ManagerWorld(2)
    name = key("a")
    world.store(name)
    manager = world.manager
    manager.probes._every = 1
    waiting = SimpleNamespace(request_id="waiting", mm_features=[])
    assert manager.probes.decide(waiting, 0, 128, 16, Beside(adapter=b"a")) is not None
    plan = manager.probes._plans["probe"] = Plan(0, 2, (b"", ()), admitted=True)
    spec = manager.prepare_store([name], context("probe", name)).store_spec
    assert [group.compared for group in spec.groups] == [{0}]
    for rank in range(2):
        assert plan.under_way == 1
        layers = {"layer": 0.7} if rank == differs else {}
        report = WorkerReport(checksums=[None], differences={0: Difference(0.7, layers)})
        manager.apply({spec.ticket: {rank: report}})
    assert manager.probes.doubtful is (differs is not None)
    # Of the kind of a request that waited, the next hit is the first one again.
    assert list(manager.probes._state.kinds.values()) == ([False] if differs is None else [])
    assert manager.probes.refused == ({(0, name[:-4])} if differs is not None else set())
    assert (world.depot.stats()["tiers"]["Cache"]["pinned_blocks"] or 0) == 0
    world.close()


@pytest.mark.parametrize("model", MODELS)
def test_a_hit_is_found_without_its_last_block_and_without_another(
    tmp_path: Path, model: str
) -> None:
    looks = Lookups(tmp_path, model, probe_every=1)
    names = hashes("a", 12)
    looks.put(names)
    assert looks.look(looks.request(names)) == 11 * BLOCK
    looks.close()


def test_blocks_of_all_kv_groups_that_end_with_the_hit_are_compared() -> None:
    """vLLM offers a state's block by itself, before those of the other groups in the same step."""
    world = ManagerWorld(1)
    manager = world.manager
    second = manager.depot.namespace(model="w", dtype="float32", block_tokens=16)
    manager.set_groups({**world.groups(None), 1: Group(1, second, [PART])})
    prompt = [key("a", group) for group in (1, 0)]
    request = context("probe", *prompt)
    for each in prompt:
        request.set_offload_key_position(each, 16)
        world.store(each)
    manager.probes._plans["probe"] = Plan(0, 16, (b"", ()), admitted=True)
    compared = [manager.prepare_store([each], request).keys_to_store for each in prompt]
    assert compared == [[each] for each in prompt]
    end_step(manager)
    assert manager.prepare_store(prompt, request).keys_to_store == []
    world.close()


def test_a_block_that_was_stored_before_it_was_full_is_not_compared() -> None:
    plan = Plan(16, 64, (b"", ()))
    keys = [key(name) for name in "abcde"]
    request = ReqContext("probe")
    for each, end in zip(keys, (16, 32, 40, 64, 80), strict=True):
        request.set_offload_key_position(each, end)
    assert [plan.compares(each, request, 16) for each in keys] == [False, True, False, True, False]


def test_a_request_that_waits_is_decided_anew_as_vllm_has_more_or_less_of_it() -> None:
    world = ManagerWorld(1)
    probes = Probes(ProbeSettings(1, "gate"), world.manager.collector, lambda: None)
    request = SimpleNamespace(request_id="r", mm_features=[])
    for computed in (64, 0, 32):
        probes.look_up_again("r", computed)
        assert probes.decide(request, computed, 128, 16, NOTHING) is not None
        assert probes.cut("r") == computed
    # Another one waits for its verdict meanwhile, and is the first one if it comes to nothing.
    other = SimpleNamespace(request_id="s", mm_features=[])
    waiting = probes.decide(other, 0, 128, 16, NOTHING)
    assert waiting is not None
    assert waiting.waits
    probes.finished("r")
    probes.look_up_again("s", 0)
    first = probes.decide(other, 0, 128, 16, NOTHING)
    assert first is not None
    assert not first.waits
    world.close()


def test_with_an_image_the_probe_begins_before_the_last_block_of_it() -> None:
    world = ManagerWorld(1)
    probes = Probes(ProbeSettings(1000), world.manager.collector, lambda: None)
    image = SimpleNamespace(modality="image", mm_position=SimpleNamespace(offset=40, length=20))
    for name, features, hit, cut in (
        ("text", [], 128, 112),
        ("image", [image], 128, 48),
        # Behind the hit it is no part of it: text, whose first hit was probed.
        ("later", [image], 32, None),
    ):
        request = SimpleNamespace(request_id=name, mm_features=features)
        probes.decide(request, 0, hit, 16, NOTHING)
        assert probes.cut(name) == cut
    world.close()


def test_copies_for_comparisons_are_bounded(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.start(KINDS["full"]).ask(PROMPTS[0])
    # Each block is held twice.
    monkeypatch.setattr(comparing, "HELD_BYTES", 2 * 3 * BLOCK * BYTES + 1)
    engine = engines.start(
        KINDS["full"], engine={"batched_tokens": 200}, probe_every=1, probe_first="gate"
    )
    assert engine.ask(PROMPTS[0]) == [0]
    assert probed(engine, "agreed") == 3
    assert probed(engine, "not_compared") == WHOLE // BLOCK - 3


def test_without_memory_for_copies_nothing_is_compared_and_the_engine_goes_on(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(vllm_probes, "BEHIND_RANDOM", 0)
    engines.start(KINDS["full"]).ask(PROMPTS[0])
    engine = engines.start(KINDS["full"], probe_every=1)
    for owner, name in ((comparing.Comparer, "_copy"), (comparing, "_difference")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            engine.ask(PROMPTS[0])
        engine.reset(external=False)
    assert probed(engine, "not_compared") == 2
    assert engine.counted("kvdepot_failed_calls", ("worker", "compare")) == 2
    assert engine.faults == []


@pytest.mark.parametrize("kind", KINDS)
def test_in_any_mixture_probes_agree_and_hold_nothing(
    engines: Engines, worker: str, kind: str, seed: int, rounds: int
) -> None:
    """Preemption, aborts, resets, damage, little memory, prompts with common beginnings."""
    drawn = random.Random(f"{seed} {worker} {kind} probes")
    for _ in range(rounds):
        engine = engines.start(
            KINDS[kind],
            engine={
                "blocks": drawn.choice([24, 40, 64]) * len(KINDS[kind]),
                "batched_tokens": drawn.choice([16, 48, 200]),
                "prefix_caching": drawn.random() < 0.7,
            },
            probe_every=drawn.choice([1, 3]),
            probe_first=drawn.choice(["detect", "gate"]),
            blocks_per_chunk=drawn.choice([1, 4]) if len(KINDS[kind]) == 1 else 1,
        )
        stems = [prompt(drawn.randrange(1 << 30), 250) for _ in range(3)]
        for _ in range(12):
            names = [
                engine.add(drawn.choice(stems)[: drawn.randrange(20, 250)], drawn.choice([1, 40]))
                for _ in range(drawn.choice([1, 2, 4]))
            ]
            for _ in range(drawn.randrange(20)):
                engine.step()
            gone = [name for name in names if drawn.random() < 0.2]
            engine.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            engine.settle()
            if drawn.random() < 0.5:
                engine.reset(external=drawn.random() < 0.3)
            if drawn.random() < 0.3 and (found := engines.blocks()):
                flip(engines.arena, drawn.choice(found).extents[0][0] + 7)
        assert engine.faults == []
        assert probed(engine, "differed") == 0
        assert engine.connector.manager.probes._plans == {}
        assert engine.connector.manager._tickets == {}
        state = engine.connector.manager.depot.stats()["tiers"]["Dax"]
        assert (state["reserved_blocks"], state["pinned_blocks"]) == (0, 0)
