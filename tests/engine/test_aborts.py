"""Requests that end before their time, engines that pause, and many requests for one prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK, EngineDouble, full
from engine_neighbour import Neighbour
from test_scheduling import KINDS, WINDOW, Engines, engines, multi, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

__all__ = ["engines"]

pytestmark = pytest.mark.integration

STEPS_TO_SEND = 5


@dataclass
class Finished(KVConnectorMetadata):
    requests: list[str] = field(default_factory=list)


class LateSender(Neighbour):
    """Keeps each finished request's blocks for some steps, as a connector does that sends them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished: list[str] = []
        self._sending: dict[str, int] = {}

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        # As vLLM's NixlConnector: those that were aborted are not sent.
        if request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self._finished.append(request.request_id)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Finished:
        finished, self._finished = self._finished, []
        return Finished(finished)

    def has_pending_push_work(self) -> bool:
        return bool(self._finished)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Finished)
        self._sending |= dict.fromkeys(metadata.requests, STEPS_TO_SEND)
        self._sending = {name: steps - 1 for name, steps in self._sending.items()}
        sent = {name for name, steps in self._sending.items() if steps == 0}
        self._sending = {name: steps for name, steps in self._sending.items() if steps}
        return sent, set()


LATE_SENDER = {
    "kv_connector": "LateSender",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}


def beside_a_late_sender(ours: dict[str, Any]) -> dict[str, Any]:
    return multi(LATE_SENDER, ours)


def over_files(directory: Path) -> dict[str, Any]:
    """Settings of a pipeline whose second tier answers late."""
    return {
        "pipeline": "Cache|Posix",
        "cache": {"capacity": "1MiB"},
        "posix": {"path": str(directory / "files"), "capacity": "64MiB"},
    }


@pytest.mark.parametrize("beside", [lambda ours: ours, beside_a_late_sender], ids=["alone", "late"])
@pytest.mark.parametrize("kind", ["full", "both"])
@pytest.mark.parametrize("files", [False, True], ids=["Dax", "Cache|Posix"])
def test_aborted_requests_leave_nothing_behind(
    engines: Engines,
    tmp_path: Path,
    beside: Callable[[dict[str, Any]], dict[str, Any]],
    kind: str,
    files: bool,
    seed: int,
) -> None:
    """Queued, while they load, while they store, and after the end."""
    drawn = random.Random(f"{seed} {kind} {files}")
    settings = over_files(tmp_path) if files else {}
    engine = engines.start(KINDS[kind], beside=beside, engine={"blocks": 48}, **settings)
    stems = [prompt(drawn.randrange(1 << 30), 250) for _ in range(4)]
    seen: set[RequestStatus] = set()
    alive: list[str] = []
    ended: list[str] = []

    def abort(name: str) -> None:
        request = engine.scheduler.requests.get(name)
        if request is not None:
            seen.add(request.status)
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    for _ in range(200):
        asked = drawn.choice(stems)[: drawn.randrange(20, 250)]
        alive.append(engine.add(asked, drawn.choice([1, 4, 20])))
        for _ in range(drawn.choice([0, 0, 1, 3])):
            engine.step()
        if drawn.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        if len(alive) > drawn.randrange(8):
            ended.append(alive.pop(drawn.randrange(len(alive))))
            abort(ended[-1])
            abort(drawn.choice(ended))
        loading = [
            name
            for name, request in engine.scheduler.requests.items()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        if loading and drawn.random() < 0.3:
            abort(drawn.choice(loading))
    for name in alive + ended:
        abort(name)
    engine.settle()
    assert seen >= {
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
    }
    assert engine.faults == []
    manager = ours_of(engine).manager
    state = manager.depot.stats()["tiers"]
    for tier in set(state) - {"Posix"}:
        assert (state[tier]["reserved_blocks"], state[tier]["pinned_blocks"]) == (0, 0)
    kept = manager._prompts._by_request
    assert (manager._tickets, manager._storing, kept) == ({}, {}, {})
    assert manager.depot.pending_bytes() == 0
    assert not engine.scheduler.requests


def ours_of(engine: EngineDouble) -> Any:
    """kvdepot's connector of an engine, which may be one of several."""
    children = getattr(engine.connector, "sub_connectors", [engine.connector])
    return next(child for child in children if type(child).__name__ == "KvdepotConnector")


@pytest.mark.parametrize("beside", [lambda ours: ours, beside_a_late_sender], ids=["alone", "late"])
def test_a_pause_does_not_wait_for_a_metric(
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    beside: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    engine = engines.start(KINDS["full"], beside=beside)
    engine.ask(prompt(1, 150))
    manager = ours_of(engine).manager
    # What is written from tier to tier touches nothing of vLLM's.
    monkeypatch.setattr(manager, "_queued_bytes", lambda: 4096)
    engine.step()
    assert engine.scheduler.has_requests(), "the metric follows without further requests"
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()
    monkeypatch.undo()
    engine.settle()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("steps", [9, 12, 16])
def test_a_running_request_that_a_reset_lets_go_of_is_loaded_later(
    engines: Engines, steps: int, external: bool
) -> None:
    """vLLM fails on a request that is preempted and loaded in one step."""
    engine = engines.start(KINDS["full"])
    name = engine.add(prompt(1, 200), 40)
    for _ in range(steps):
        engine.step()
    assert engine.scheduler.running
    scheduler = engine.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=external)
    engine.run_until(lambda: name not in scheduler.requests)
    assert engine.faults == []


def test_running_requests_go_on_after_a_reset_that_vllm_refuses(engines: Engines) -> None:
    """It refuses while a request is loaded, when it has preempted the others already."""
    # What it has let go of is loaded: vLLM's own cache has none of it.
    size = {"prefix_caching": False}
    engines.start(KINDS["full"]).ask(prompt(2, 200))
    engine = engines.start(KINDS["full"], engine=size)
    running = engine.add(prompt(1, 200), 40)
    for _ in range(12):
        engine.step()
    engine.run_until(lambda: not ours_of(engine).manager._tickets)
    loading = engine.add(prompt(2, 200))
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.requests[loading].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run_until(lambda: running not in scheduler.requests)
    engine.settle()
    assert engine.faults == []


@pytest.mark.parametrize("files", [False, True], ids=["Dax", "Cache|Posix"])
@pytest.mark.parametrize("groups", [[full()], KINDS["both"]], ids=["full", "both"])
def test_requests_for_one_prefix_load_it_once(
    engines: Engines, tmp_path: Path, files: bool, groups: list[Any]
) -> None:
    settings = over_files(tmp_path) if files else {}
    asked = prompt(3, 1600)
    blocks = len(asked) // BLOCK
    size = {"blocks": 400, "batched_tokens": 2048}
    engines.start(groups, engine=size, **settings).ask(asked)
    engine = engines.start(groups, engine=size, **settings)
    several = [asked + prompt(seed, 5) for seed in range(32)]
    cached = engine.ask(*several)
    assert min(cached) >= (blocks - 1) * BLOCK
    assert engine.faults == []
    tiers = ("Cache", "Posix", "Dax")
    loaded = sum(engine.counted("kvdepot_moved_blocks", ("load", tier)) for tier in tiers)
    window = WINDOW // BLOCK + 1
    assert blocks <= loaded <= 1.1 * (blocks + (len(groups) - 1) * window)
