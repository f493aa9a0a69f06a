"""The answer that is kept for a prompt that waits: what it costs, what ends it, what it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK
from engine_lookups import EXTENT, MODELS, Lookups, hashes
from kvdepot.vllm import manager as vllm_manager
from kvdepot.vllm import questions as vllm_questions
from kvdepot.vllm.jobs import WorkerReport
from test_linear import steps

pytestmark = pytest.mark.integration

Start = Callable[..., Lookups]


@pytest.fixture(autouse=True)
def no_answer_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_manager, "SHARED_SECONDS", 3600.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Lookups] = []

    def one(model: str = "full", **settings: Any) -> Lookups:
        started.append(Lookups(tmp_path, model, **settings))
        return started[-1]

    yield one
    for engine in started:
        prompts = engine.manager._prompts
        for request in list(prompts._by_request):
            engine.manager.on_request_finished(prompts.get(request).rows.context)
        assert engine.pinned() == 0
        assert not prompts._by_request, "nothing is left of requests that are over"
        engine.close()


def waiting(engine: Lookups) -> Any:
    """A request that waits with a hit of 50 blocks."""
    prompt = hashes("prompt", 50)
    engine.put(prompt)
    request = engine.request(prompt)
    assert engine.look(request) == 50 * BLOCK
    engine.end_step()
    return request


def asks(engine: Lookups, request: Any, computed_tokens: int = 0) -> tuple[int | None, int]:
    """vLLM's result in the next step, and how often the depot was asked for it."""
    engine.end_step()
    before = sum(front.calls for front in engine.fronts)
    matched = engine.look(request, computed_tokens)
    return matched, sum(front.calls for front in engine.fronts) - before


@pytest.mark.parametrize("model", MODELS)
def test_a_further_step_costs_the_same_for_any_prompt_while_others_store(
    start: Start, model: str
) -> None:
    engine = start(model, capacity="256MiB")
    cost: dict[int, set[int]] = {}
    for size in (100, 3000):
        prompt = hashes(f"prompt {size}", size)
        engine.put(prompt)
        request = engine.request(prompt)
        assert engine.look(request) == size * BLOCK
        for step in range(3):
            engine.end_step()
            engine.store(hashes(f"other {size} {step}", 5))
            engine.remove(hashes(f"other {size} {step}", 5))
            look = functools.partial(engine.look, request)
            cost.setdefault(size, set()).add(steps(look, engine.keys_handed))
        assert engine.look(request) == size * BLOCK
        engine.finish(request)
    assert cost[100] == cost[3000]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("delay", [1, 7])
def test_a_prompt_that_a_tier_has_not_answered_for_asks_it_once(
    start: Start, model: str, delay: int
) -> None:
    engine = start(model, delay=delay)
    prompt = hashes("prompt", 300)
    engine.put(prompt)
    request = engine.request(prompt)
    assert engine.look(request) is None
    for _ in range(delay - 1):
        assert asks(engine, request) == (None, 0)
    engine.end_step()
    # A group with a window is asked for once the others are known.
    assert engine.wait(request) == 300 * BLOCK
    questions = sum(front.calls for front in engine.fronts)
    assert questions == 2 * len(engine.fronts), "a lookup and a pin each"


def test_other_computed_tokens_end_it(start: Start) -> None:
    engine = start()
    prompt = hashes("prompt", 50)
    engine.put(prompt)
    request = engine.request(prompt)
    assert engine.look(request) == 50 * BLOCK
    assert asks(engine, request) == (50 * BLOCK, 0)
    matched, questions = asks(engine, request, 30 * BLOCK)
    assert (matched, questions > 0) == (20 * BLOCK, True)
    assert asks(engine, request, 30 * BLOCK) == (20 * BLOCK, 0)
    assert engine.pinned() == 20, "those that vLLM has are not held"


def test_a_commit_of_the_first_block_that_was_missing_ends_it(start: Start) -> None:
    engine = start()
    prompt = hashes("prompt", 50)
    engine.store(prompt[:20])
    request = engine.request(prompt)
    assert engine.look(request) == 20 * BLOCK
    engine.store(hashes("another prompt", 20))
    assert asks(engine, request) == (20 * BLOCK, 0), "no block of its own"
    engine.store(prompt[:40])
    assert engine.look(request) == 40 * BLOCK
    assert asks(engine, request) == (40 * BLOCK, 0)


def test_a_commit_in_a_window_ends_it(start: Start) -> None:
    engine = start("window")
    prompt = hashes("prompt", 200)
    request = engine.request(prompt)
    assert engine.look(request) == 0
    assert asks(engine, request) == (0, 0)
    engine.store(prompt)
    assert engine.look(request) == 200 * BLOCK


def test_a_block_that_does_not_verify_ends_it(start: Start) -> None:
    engine = start()
    prompt = hashes("prompt", 50)
    engine.put(prompt)
    other, request = engine.request(prompt[:10]), engine.request(prompt)
    assert engine.look(request) == 50 * BLOCK
    matched = engine.look(other)
    assert matched == 10 * BLOCK
    (job,) = engine.admit(other, matched)
    engine.end_step()
    # It waits for that load, and its own pins are from before.
    assert engine.look(request) is None
    engine.end_step()
    engine.loaded(job, WorkerReport(corrupt=[3]))
    assert engine.look(request) == 3 * BLOCK, "the blocks before it"
    engine.end_step()
    assert engine.pinned() == 3


def test_requests_that_wait_for_one_load_do_not_use_up_what_may_be_pinned(start: Start) -> None:
    engine = start(capacity="4MiB")
    shared = hashes("shared", engine.capacity_blocks() // 8)
    engine.put(shared)
    first, *others = (engine.request(shared) for _ in range(9))
    (job,) = engine.admit(first, engine.wait(first))
    assert [engine.look(each) for each in others] == [None] * 8
    assert [asks(engine, each) for each in others] == [(None, 0)] * 8
    engine.loaded(job)
    assert [engine.look(each) for each in others] == [len(shared) * BLOCK] * 8


@pytest.mark.parametrize("on_reset", ["epoch", "clear", "verify"])
def test_a_reset_ends_it(start: Start, on_reset: str) -> None:
    engine = start(on_reset=on_reset)
    request = waiting(engine)
    assert engine.connector.reset_cache()
    assert engine.pinned() == 0
    assert engine.look(request) == (50 * BLOCK if on_reset == "verify" else 0)


def test_other_weights_end_it(start: Start) -> None:
    engine = start()
    request = waiting(engine)
    engine.engine.reload(1)
    assert engine.look(request) == 0
    engine.end_step()
    assert engine.pinned() == 0
    engine.engine.reload(0)
    assert engine.look(request) == 50 * BLOCK


def test_blocks_with_other_names_end_it(start: Start) -> None:
    engine = start()
    request = waiting(engine)
    engine.manager.set_groups({})
    assert engine.pinned() == 0
    assert engine.look(request) == 0


def test_a_quarantine_ends_it(start: Start) -> None:
    engine = start()
    request = waiting(engine)
    probes = engine.manager.probes
    # Of three failed probes, this is what the last one leads to.
    probes._state.quarantined = True
    probes._changed()
    assert engine.pinned() == 0
    assert asks(engine, request) == (0, 0)


def test_a_request_that_reads_nothing_is_no_miss(start: Start) -> None:
    """As for log probabilities of the prompt. vLLM asks its connector all the same."""
    engine = start()
    prompt = hashes("prompt", 50)
    engine.put(prompt)
    request = engine.request(prompt)
    request.skip_reading_prefix_cache = True
    before = engine.manager.depot.stats()["missed_blocks"]
    assert asks(engine, request) == (0, 0)
    assert engine.manager.depot.stats()["missed_blocks"] == before


def test_an_admission_uses_it_and_the_end_of_a_request_too(start: Start) -> None:
    engine = start()
    prompt = hashes("prompt", 50)
    engine.put(prompt)
    request, aborted = engine.request(prompt), engine.request(prompt)
    for each in (request, aborted):
        assert engine.look(each) == 50 * BLOCK
    engine.end_step()
    assert engine.pinned() == 50, "a block counts once, however many hold it"
    engine.finish(aborted)
    (job,) = engine.admit(request, 50 * BLOCK)
    engine.end_step()
    assert engine.pinned() == 50, "the load has them"
    engine.loaded(job)
    assert engine.pinned() == 0
    # Preempted, it is looked up again.
    _, questions = asks(engine, request)
    assert questions > 0


def test_less_than_what_was_found_is_admitted(start: Start) -> None:
    """Another connector has the rest, or all."""
    engine = start()
    request = waiting(engine)
    assert engine.admit(request, 0) == []
    engine.end_step()
    assert engine.pinned() == 0


def test_blocks_of_a_waiting_prompt_stay_while_others_need_the_room(start: Start) -> None:
    engine = start(capacity="4MiB")
    room = engine.capacity_blocks()
    prompt = hashes("prompt", room // 8)
    engine.put(prompt)
    request = engine.request(prompt)
    assert engine.look(request) == len(prompt) * BLOCK
    for step in range(6):
        engine.end_step()
        # As prompts of less than an eighth of the tier.
        for part in range(4):
            engine.put(hashes(f"other {step} {part}", room // 12))
        assert engine.look(request) == len(prompt) * BLOCK
    (job,) = engine.admit(request, len(prompt) * BLOCK)
    spec = engine.connector.scheduler._current_batch_load_jobs[job].src_spec
    assert all(place is not None for group in spec.groups for place in group.placements)
    engine.loaded(job)


def test_waiting_prompts_hold_at_most_a_quarter_of_a_tier(start: Start) -> None:
    engine = start(capacity="4MiB")
    room = engine.capacity_blocks()
    requests = []
    for number in range(8):
        prompt = hashes(f"prompt {number}", room // 10)
        engine.put(prompt)
        requests.append(engine.request(prompt))
        assert engine.look(requests[-1]) == len(prompt) * BLOCK
    engine.end_step()
    assert 0 < engine.pinned() * EXTENT <= (4 << 20) // 4
    engine.finish(requests[0])
    # Another one has its room, in the next step that asks.
    for request in requests[1:]:
        engine.look(request)
    engine.end_step()
    assert 0 < engine.pinned() * EXTENT <= (4 << 20) // 4


def test_blocks_that_are_not_held_are_asked_for_again_and_never_loaded_when_lost(
    start: Start,
) -> None:
    engine = start(capacity="4MiB")
    room = engine.capacity_blocks()
    prompt = hashes("prompt", room // 2)
    engine.put(prompt)
    request = engine.request(prompt)
    assert engine.look(request) == len(prompt) * BLOCK
    engine.end_step()
    assert engine.pinned() == 0, "more than waiting requests may hold"
    engine.remove(prompt[100:])
    assert engine.look(request) == 100 * BLOCK


def test_prompts_with_blocks_that_another_loads_wait_without_asking(start: Start) -> None:
    engine = start()
    shared = hashes("shared", 100)
    engine.put(shared)
    first, *others = (engine.request([*shared, *hashes(f"own {n}", 5)]) for n in range(9))
    assert engine.look(first) == 100 * BLOCK
    (job,) = engine.admit(first, 100 * BLOCK)
    assert [engine.look(each) for each in others] == [None] * 8
    for _ in range(3):
        assert [asks(engine, each) for each in others] == [(None, 0)] * 8
    engine.loaded(job)
    assert [engine.look(each) for each in others] == [100 * BLOCK] * 8
    # The first of them loads, and the others wait again.
    (job,) = engine.admit(others[0], 100 * BLOCK)
    assert [engine.look(each) for each in others[1:]] == [None] * 7
    engine.loaded(job)


def test_what_other_engines_store_is_found_after_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(delay=1)
    prompt = hashes("prompt", 40)
    engine.put(prompt[:10])
    early, late = engine.request(prompt), engine.request(prompt)
    assert engine.wait(early) == 10 * BLOCK
    monkeypatch.setattr(vllm_manager, "SHARED_SECONDS", 0.0)
    assert engine.wait(late) == 10 * BLOCK
    engine.put(prompt)
    assert asks(engine, early) == (10 * BLOCK, 0)
    assert engine.wait(late) == 40 * BLOCK


def test_blocks_that_had_no_room_on_their_way_are_fetched_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_questions, "AGAIN_SECONDS", 0.0)
    for wait, expected in (("10m", 10 * BLOCK), ("0s", 0)):
        engine = start(delay=1, far=True, lookup_wait=wait)
        prompt = hashes("prompt", 10)
        engine.put(prompt)
        (front,) = engine.fronts
        front.drops = 3
        assert engine.wait(engine.request(prompt)) == expected
        assert (front.drops == 0) == (expected > 0)


def test_a_prompt_that_is_stored_now_goes_on_when_it_is(start: Start) -> None:
    engine = start()
    prompt = hashes("prompt", 10)
    storing, request = engine.request(prompt), engine.request(prompt)
    spec = engine.offer(storing).store_spec
    assert engine.look(request) is None
    assert asks(engine, request) == (None, 0)
    # It fails: nothing is there, and nothing is waited for.
    engine.manager.apply({spec.ticket: {0: WorkerReport(checksums=[None] * 10)}})
    assert engine.look(request) == 0
