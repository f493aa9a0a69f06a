"""Why no step waits for its own load layer by layer: what vLLM does with a step that is void.

A layer's bytes could be had while the layer before computes, if a block that turns out bad with its
last layer took back all that was computed from it. Two tests of vLLM's own scheduler, without
kvdepot: when one of them fails, vLLM takes that back, and the question is open again.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_double import BLOCK, BYTES, full, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

pytestmark = pytest.mark.unit

BLOCKS = 8
PROMPT = list(range(3, 3 + BLOCKS * BLOCK + BLOCK // 2))


class InStep(KVConnectorBase_V1, SupportsHMA):
    """Has the first request's blocks, and loads them within the step that uses them."""

    requires_kv_delivery = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return (BLOCKS * BLOCK if request.request_id == "first" else 0), False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, *arguments: Any) -> None: ...
    def start_load_kv(self, *arguments: Any, **more: Any) -> None: ...
    def wait_for_layer_load(self, *arguments: Any) -> None: ...
    def save_kv_layer(self, *arguments: Any, **more: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def request_finished_all_groups(self, *arguments: Any) -> tuple[bool, None]:
        return False, None


class Engine:
    """vLLM's scheduler, and steps of which only the outcome is there."""

    def __init__(self, directory: Path, scheduler: type[Scheduler]) -> None:
        transfer = {
            "kv_connector": "InStep",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        config = vllm_config(directory, transfer, batched_tokens=2 * BLOCK, prefix_caching=True)
        blocks, page = 64, BLOCK * BYTES
        config.cache_config.num_gpu_blocks = blocks
        caches = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(page * blocks, ["layer"], page * blocks, page)],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], full())],
            kv_cache_layout=config.cache_config.kv_cache_layout,
        )
        manager: Any = SimpleNamespace(accept_tokens=lambda *_: True)
        self.scheduler = scheduler(config, caches, manager, block_size=BLOCK)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def request(self, name: str) -> Request:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        return Request(name, PROMPT, sampling, None, block_hasher=self._hasher)

    def end(self, step: SchedulerOutput, token: int, invalid: set[int]) -> list[int]:
        """A step that sampled `token` for each of its requests; the tokens that leave."""
        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[token] for _ in names],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )
        given = self.scheduler.update_from_output(step, output)
        outputs = [one for each in given.values() for one in each.outputs]
        return [token for one in outputs for token in one.new_token_ids]


def test_a_token_computed_from_that_of_a_void_step_leaves(tmp_path: Path) -> None:
    engine = Engine(tmp_path, AsyncScheduler)
    first = engine.request("first")
    engine.scheduler.add_request(first)
    step = engine.scheduler.schedule()
    assert step.has_sync_kv_loads
    # As it is by default on a GPU: the next step is under way before this one's outcome is known.
    behind = engine.scheduler.schedule()
    assert behind.num_scheduled_tokens == {"first": 1}

    (table,) = engine.scheduler.kv_cache_manager.get_block_ids("first")
    assert engine.end(step, token=7, invalid={table[2]}) == []
    assert first.num_computed_tokens == 2 * BLOCK
    assert engine.end(behind, token=8, invalid=set()) == [8], "vLLM takes it back now"


def test_blocks_of_a_void_step_stay_in_the_prefix_cache(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Scheduler)
    first = engine.request("first")
    engine.scheduler.add_request(first)
    step = engine.scheduler.schedule()
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids("first")
    bad = table[2:BLOCKS]
    assert engine.end(step, token=7, invalid=set(bad)) == []

    # The second request comes while only some of them have been computed again.
    engine.end(engine.scheduler.schedule(), token=7, invalid=set())
    assert first.num_computed_tokens < BLOCKS * BLOCK
    second = engine.request("second")
    found, tokens, *_ = engine.scheduler.kv_cache_manager.get_computed_blocks(second)
    (blocks,) = found.get_block_ids()
    assert (tokens, blocks[-1]) == (BLOCKS * BLOCK, bad[-1]), "vLLM forgets them now"
