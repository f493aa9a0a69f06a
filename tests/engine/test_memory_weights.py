"""Weights that change in memory: no KV of other ones is served, and those that come back find
theirs."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.engine import tensors as engine_tensors

pytest.importorskip("vllm")

from engine_double import EngineDouble
from engine_harness import logged
from kvdepot.vllm import memory_weights, worker_calls
from kvdepot.vllm.compat import versions
from test_scheduling import KINDS, Engines, engines, prompt
from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.request import RequestStatus
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import WorkerBase

__all__ = ["engines"]

pytestmark = pytest.mark.integration

ASKED = prompt(2, 150)


@pytest.fixture
def engine(engines: Engines) -> EngineDouble:
    """One that has stored a prompt, and would hit it."""
    started = engines.start(KINDS["both"])
    started.ask(ASKED)
    started.reset(external=False)
    return started


def test_reloaded_weights_find_nothing_and_those_that_come_back_find_theirs(
    engine: EngineDouble,
) -> None:
    other = prompt(3, 150)
    engine.ask(other)
    engine.reload(1)
    assert engine.ask(ASKED) == [0]
    # What was computed with the new weights is not stored either, before a reset.
    engine.reset(external=False)
    assert engine.ask(ASKED) == [0]
    engine.reset(external=False)
    assert engine.ask(ASKED)[0] > 0
    engine.reload(0)
    engine.reset(external=False)
    assert engine.ask(ASKED)[0] > 0
    assert engine.faults == []


def test_a_reset_of_the_same_weights_keeps_what_is_stored(engine: EngineDouble) -> None:
    engine.reset(external=True)
    assert engine.ask(ASKED)[0] > 0
    assert engine.faults == []


def test_what_vllms_own_cache_has_of_the_weights_before_is_not_stored(
    engine: EngineDouble,
) -> None:
    other = prompt(3, 150)
    engine.ask(other)
    engine.reload(1)
    # vLLM serves KV of other weights from its own cache, and offers it for storing.
    assert engine.ask(other)[0] > 0
    assert engine.faults != []
    engine.faults.clear()
    engine.reset(external=False)
    assert engine.ask(other) == [0]
    assert engine.faults == []


def test_before_vllm_has_computed_anything_no_reset_is_needed(engines: Engines) -> None:
    engine = engines.start(KINDS["full"])
    engine.reload(1)
    engine.ask(ASKED)
    engine.reset(external=False)
    assert engine.ask(ASKED)[0] > 0
    engine = engines.start(KINDS["full"])
    assert engine.ask(ASKED) == [0], "those of the files"
    assert engine.faults == []


def test_a_request_that_goes_on_with_other_weights_is_not_stored(engine: EngineDouble) -> None:
    asked = prompt(21, 150)
    name = engine.add(asked, output_tokens=40)
    for _ in range(10):
        engine.step()
    engine.reload(1)
    engine.run_until(lambda: name not in engine.scheduler.requests)
    engine.faults.clear()
    for expected in (False, True):
        engine.reset(external=False)
        assert (engine.ask(asked)[0] > 0) == expected
    assert engine.faults == []


@pytest.mark.parametrize("external", [False, True])
def test_a_reset_looks_at_weights_that_nobody_was_told_of(
    engine: EngineDouble, external: bool
) -> None:
    engine.weights = 1
    engine.reset(external=external)
    assert engine.ask(ASKED) == [0]
    assert engine.faults == []
    engine.weights = 0
    engine.reset(external=external)
    # What was stored since the last good sample was removed.
    assert engine.ask(ASKED) == [0]
    assert engine.faults == []


def test_a_load_fills_vllms_cache_with_kv_of_the_weights_before(engine: EngineDouble) -> None:
    name = engine.add(ASKED)
    engine.step()
    status = engine.scheduler.requests[name].status
    assert status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.reload(1)
    engine.run_until(lambda: name not in engine.scheduler.requests)
    # vLLM's own cache has it, and is not reset.
    engine.ask(ASKED)
    engine.faults.clear()
    for _ in range(2):
        engine.reset(external=False)
        engine.ask(ASKED)
        assert engine.faults == []


@pytest.mark.parametrize("then", ["reset", "reload"])
def test_what_was_stored_after_a_change_that_nobody_watches_is_not_found(
    engine: EngineDouble, then: str
) -> None:
    asked = prompt(5, 150)
    engine.ask(prompt(6, 150))
    engine.weights = 1
    engine.ask(asked)
    if then == "reload":
        engine.reload(2)
    engine.reset(external=False)
    engine.faults.clear()
    engine.ask(prompt(7, 150))
    engine.reload(0)
    engine.reset(external=False)
    engine.ask(asked)
    assert engine.faults == []


def test_weights_that_changed_and_came_back_unseen_leave_vllms_cache_in_doubt(
    engine: EngineDouble,
) -> None:
    asked = prompt(5, 150)
    engine.ask(prompt(6, 150))
    engine.weights = 1
    engine.ask(asked)
    memory = engine.connector._memory_weights
    memory._begin_sample()
    engine.weights = 0
    engine.ask(prompt(7, 150))
    engine.ask(asked)
    engine.reset(external=False)
    engine.faults.clear()
    engine.ask(asked)
    assert engine.faults == []


def test_weights_that_cannot_be_read_get_a_name_of_their_own_at_every_call(
    engine: EngineDouble,
) -> None:
    """As on a CPU, where vLLM packs those of linear layers, and leaves an empty tensor."""
    engine.executor.model["packed"] = torch.zeros(0)
    engine.ask(prompt(6, 150))
    engine.reload(0)
    engine.reset(external=False)
    assert engine.ask(ASKED) == [0], "nobody knows"
    engine.reset(external=False)
    assert engine.ask(ASKED)[0] > 0, "nothing was called"
    engine.reset(external=True)
    assert engine.ask(ASKED) == [0]
    assert engine.faults == []


def test_a_sample_that_fails_ends_nothing(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    def fail(*_: Any) -> bytes:
        raise MemoryError("no memory")

    engine.ask(prompt(6, 150))
    monkeypatch.setattr(memory_weights, "SAMPLE_STEPS", 1)
    monkeypatch.setattr(engine_tensors, "sample_of", fail)
    engine.ask(prompt(7, 150))
    engine.reload(0)
    assert engine.ask(prompt(7, 150))[0] > 0
    assert [text for text in errors if "cannot check the weights" in text]
    assert engine.faults == []


def test_nothing_is_kept_of_requests_that_have_ended(engine: EngineDouble) -> None:
    for number in range(1, 4):
        name = engine.add(prompt(number, 150), output_tokens=40)
        for _ in range(5):
            engine.step()
        engine.reload(number)
        engine.run_until(lambda name=name: name not in engine.scheduler.requests)
        engine.settle()
    assert engine.connector.manager.ends._ends == {}


@pytest.fixture
def errors() -> Iterator[list[str]]:
    with logged("vllm.kvdepot.weights", logging.ERROR) as found:
        yield found


def test_a_change_that_nobody_watches_is_noticed_and_what_was_stored_since_is_withdrawn(
    engine: EngineDouble, engines: Engines, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    monkeypatch.setattr(memory_weights, "SAMPLE_STEPS", 20)
    for seed in range(30, 50):
        engine.ask(prompt(seed, 20), output_tokens=4)
    before = engines.blocks()
    engine.weights = 1
    other = prompt(5, 150)
    engine.ask(other)
    assert len(engines.blocks()) > len(before)
    for seed in range(6, 26):
        engine.ask(prompt(seed, 20), output_tokens=4)
    assert [text for text in errors if "without a vLLM call" in text]
    stored = {record.key for record in engines.blocks()}
    # What was stored since the last good sample, and no more.
    known = {record.key for record in before}
    assert stored < known
    assert len(known - stored) < 8
    engine.reset(external=False)
    engine.faults.clear()
    assert engine.ask(other) == [0]
    engine.reload(0)
    engine.reset(external=False)
    assert engine.ask(other) == [0]
    assert engine.faults == []


def test_weights_that_did_not_change_cost_nothing(engine: EngineDouble) -> None:
    engine.reload(0)
    engine.executor.collective_rpc("list_loras")
    assert engine.ask(ASKED)[0] > 0


def test_a_call_that_fails_half_way_counts(engine: EngineDouble) -> None:
    with pytest.raises(RuntimeError, match="trainer"):
        engine.executor.collective_rpc("fail", args=(1,))
    assert engine.ask(ASKED) == [0]
    assert engine.faults == []


def test_a_function_counts_whatever_its_name_is(engine: EngineDouble) -> None:
    def list_loras(worker: Any) -> None:
        engine.weights = 1

    engine.executor.collective_rpc(list_loras)
    assert engine.ask(ASKED) == [0]
    assert engine.faults == []


def test_nothing_is_summed_while_weights_are_unmapped(engine: EngineDouble) -> None:
    engine.reset(external=True)
    engine.executor.sleep(2)
    weights = engine.executor.model.pop("weights")
    assert weights is not None
    engine.connector._memory_weights.refresh()
    engine.executor.model["weights"] = torch.zeros(1000)
    engine.executor.wake_up()
    engine.reload(1)
    engine.ask(ASKED)
    assert engine.faults == []
    engine.reset(external=False)
    assert engine.ask(ASKED)[0] > 0, "the cache was empty as the weights changed"
    assert engine.faults == []


def test_weights_without_bytes_are_not_known(engine: EngineDouble, errors: list[str]) -> None:
    weights = engine.executor.model["weights"]
    engine.executor.model["weights"] = weights.to("meta")
    engine.executor.collective_rpc("wake_up", kwargs={"tags": None})
    engine.connector._memory_weights.refresh()
    assert [text for text in errors if "cannot be identified" in text]
    assert engine.connector.manager.withheld
    engine.executor.model["weights"] = weights
    engine.executor.collective_rpc("wake_up", kwargs={"tags": None})
    assert engine.ask(ASKED)[0] > 0
    assert engine.faults == []


class Ranks:
    """The executor of several processes, of which each is no more than a queue of responses, and
    the time that passes while one is waited for."""

    def __init__(self, config: Any) -> None:
        self.now = 1000.0
        self.after: list[float] = [0.0, 0.0]
        """Seconds until each rank responds to the next call."""
        self.sum = "loaded"
        made: Any = object.__new__(MultiprocExecutor)
        made.vllm_config, made.sleeping_tags = config, set()
        made.is_failed, made.futures_queue = False, deque()
        made.rpc_broadcast_mq = SimpleNamespace(enqueue=self._call)
        made.response_mqs = [
            SimpleNamespace(dequeue=functools.partial(self._response, rank))
            for rank in range(len(self.after))
        ]
        self.executor = made
        self._due: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def _call(self, message: Any) -> None:
        self._due = [self.now + seconds for seconds in self.after]

    def _response(self, rank: int, timeout: float | None) -> Any:
        assert timeout is not None, "it waits for ever"
        end = self.now + timeout
        self.now = max(self.now, min(end, self._due[rank]))
        if self._due[rank] > end:
            raise TimeoutError
        return WorkerProc.ResponseStatus.SUCCESS, (self.sum, True)


@pytest.fixture
def ranks(engine: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    config = copy.copy(engine.executor.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = "mp"
    config.instance_id = "of several ranks"
    made = Ranks(config)
    monkeypatch.setattr(multiproc_executor, "time", made)
    return made


def test_ranks_are_waited_for_as_long_as_vllm_waits_for_a_step(ranks: Ranks) -> None:
    names: list[str | None] = []
    executor = ranks.executor
    memory = memory_weights.MemoryWeights(
        executor.vllm_config, lambda: names.append(memory.name), own_cache=False
    )
    executor.collective_rpc("list_loras", timeout=1)
    for sum_of_ranks, slowest in (("other", 299.0), ("loaded", 10.0)):
        executor.collective_rpc("reload_weights", timeout=1)
        ranks.sum, ranks.after = sum_of_ranks, [3.0, slowest]
        before = ranks.now
        memory.refresh()
        assert ranks.now - before == slowest
        ranks.after = [0.0, 0.0]
    assert len(names) == 2
    assert names[1] == ""
    # One that never responds, whichever it is. The weights stay suspect.
    for after in ([3.0, math.inf], [math.inf, 3.0], [math.inf, math.inf]):
        executor.collective_rpc("reload_weights", timeout=1)
        ranks.after = after
        for _ in range(2):
            before = ranks.now
            with pytest.raises(TimeoutError):
                memory.refresh()
            assert ranks.now - before == envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        ranks.after = [0.0, 0.0]
    # The same before a call that may change weights, of which samples are taken.
    memory.refresh()
    ranks.after, before = [0.0, math.inf], ranks.now
    with pytest.raises(TimeoutError):
        executor.collective_rpc("reload_weights", timeout=1)
    assert ranks.now - before == envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    assert len(names) == 2


def test_until_all_ranks_have_responded_nothing_is_looked_up(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, happened = engine.connector.manager, []
    call, lookup = worker_calls.call, manager._lookup

    def no_response(*_: Any, **__: Any) -> Any:
        happened.append("no response")
        raise TimeoutError

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **options: happened.append(name) or function(*args, **options)

    monkeypatch.setattr(manager, "_lookup", noted("lookup", lookup))
    engine.reload(1)
    engine.add(ASKED)
    monkeypatch.setattr(worker_calls, "call", no_response)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            engine.step()
    assert set(happened) == {"no response"}
    happened.clear()
    monkeypatch.setattr(worker_calls, "call", noted("sum", call))
    engine.step()
    assert happened[:2] == ["sum", "lookup"]
    engine.run_until(lambda: not engine.scheduler.requests)
    assert set(engine.cached.values()) == {0}, "of other weights"
    assert engine.faults == []


def test_an_adapter_is_identified_as_it_is_loaded(engines: Engines, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = adapter / "adapter_config.json"
    found = []
    for replaced in (True, False, False):
        config.write_text(json.dumps({"r": 8}))
        engine = engines.start(KINDS["full"])
        engine.lora = LoRARequest("a", 1, str(adapter))
        engine.executor.add_lora(engine.lora)
        if replaced:
            # It computes with the files before.
            config.write_text(json.dumps({"r": 16}))
        engine.ask(ASKED)
        found.append(engines.blocks())
    assert [len(blocks) for blocks in found] == [9, 18, 18], "nobody finds the first one's"


def test_what_is_said_to_be_harmless_exists() -> None:
    known = {name for kind in (WorkerBase, CPUWorker) for name in dir(kind)}
    here = versions.here()
    assert here is not None
    later = {
        name
        for first, names in worker_calls.SINCE.items()
        if tuple(map(int, first.split("."))) > here
        for name in names.split()
    }
    assert set(worker_calls.HARMLESS) - known == later
    assert not {name for name in worker_calls.HARMLESS if "weights" in name}


# ---- sums ----------------------------------------------------------------------------------------


def linear(size: int = 300_000) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("a", torch.nn.Parameter(torch.arange(size, dtype=torch.float32)))
    module.register_buffer("b", torch.ones(7, dtype=torch.bfloat16))
    return module


def summed(module: torch.nn.Module) -> str | None:
    return engine_tensors.sum_of(engine_tensors.named_tensors(module))


@pytest.mark.parametrize("size", [1, 3, 65_536 * 2, 131_073, 300_000])
def test_every_bit_and_every_place_counts(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = summed(linear(size))
    assert before == summed(linear(size))
    found = {before}
    for _ in range(20):
        module = linear(size)
        place = int(torch.randint(size, (1,), generator=generator))
        bit = int(torch.randint(32, (1,), generator=generator))
        words = module.a.detach().view(torch.int32)
        words[place] ^= torch.tensor(1, dtype=torch.int32) << bit
        found.add(summed(module))
        if size > 2:
            other = (place + 1) % size
            module = linear(size)
            with torch.no_grad():
                module.a[[place, other]] = module.a[[other, place]]
            found.add(summed(module))
    assert len(found) > 20 - 10 * (size < 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_a_word_and_its_complement_differ(dtype: torch.dtype) -> None:
    tensor = torch.randint(-100, 100, (64,), dtype=dtype)
    sums = {engine_tensors.sum_of([("a", one)]) for one in (tensor, ~tensor)}
    assert len(sums) == 2


def test_a_sum_does_not_depend_on_how_the_bytes_lie() -> None:
    module = linear()
    before = summed(module)
    wide = torch.zeros(300_000, 2)
    wide[:, 0] = module.a.detach()
    module.a = torch.nn.Parameter(wide[:, 0])
    assert not module.a.is_contiguous()
    assert summed(module) == before
    shifted = torch.zeros(300_001)[1:]
    shifted.copy_(module.a.detach())
    module.a = torch.nn.Parameter(shifted)
    assert summed(module) == before


def test_a_transposed_tensor_is_summed_in_place() -> None:
    tensor = torch.arange(60_000, dtype=torch.float32).view(200, 300).T
    before = engine_tensors.sum_of([("a", tensor)])
    assert engine_tensors._flat(tensor).data_ptr() == tensor.data_ptr()
    assert before != engine_tensors.sum_of([("a", tensor.contiguous().view(200, 300).T)])
    assert before != engine_tensors.sum_of([("a", tensor.reshape(-1).view(300, 200))])
    tensor[7, 9] += 1
    assert before != engine_tensors.sum_of([("a", tensor)])


def test_a_name_a_shape_and_a_type_count() -> None:
    tensor = torch.zeros(8)
    sums = {
        engine_tensors.sum_of([pair])
        for pair in (
            ("a", tensor), ("b", tensor), ("a", tensor.view(2, 4)), ("a", tensor.view(torch.int32)),
            ("a", torch.zeros(9)),
        )
    }  # fmt: skip
    assert len(sums) == 5
