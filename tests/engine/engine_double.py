"""vLLM's own scheduler with kvdepot's connector, and a model whose KV can be checked.

No server and no weights: the key-value bytes of a token are a hash of all tokens up to it, and
before a token is computed everything in its window must be there. What the scheduler does is real:
blocks, windows, preemption, failed loads, resets.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from identity.engines import configured
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

BLOCK = 16
HEAD = 8
BYTES = 2 * HEAD * 4
"""Of one token in one layer: keys and values of float32."""

UNIT = 4
"""Tokens of one of vLLM's hashes in a model with states: its prompts hit up to a multiple."""

OURS = {
    "kv_connector": "KvdepotConnector",
    "kv_connector_module_path": "kvdepot.vllm",
    "kv_role": "kv_both",
}


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=HEAD,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def state() -> MambaSpec:
    """A group whose layer has one state for all tokens up to the last, as large as a block."""
    shape = (BLOCK * BYTES // 4,)
    return MambaSpec(
        block_size=BLOCK, shapes=(shape,), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def token_bytes(
    layer: int, tokens: Sequence[int], weights: int, before: bytes | None = None
) -> list[bytes]:
    """What the model computes for each token: it depends on all before it, the last of which has
    `before`."""
    states = []
    state = before or bytes([layer, weights])
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(8, "little"), digest_size=BYTES).digest()
        states.append(state)
    return states


class Executor(UniProcExecutor):
    """vLLM's own, over a worker that has a model of one weight, and no process."""

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config
        self.sleeping_tags = set()
        self.model = torch.nn.ParameterDict({"weights": torch.zeros(1000)})
        worker: Any = SimpleNamespace(
            get_model=lambda: self.model,
            get_kv_connector_handshake_metadata=lambda: None,
            reload_weights=self.set_weights,
            list_loras=set,
            add_lora=lambda request: True,
            fail=self._fail,
            sleep=lambda level: None,
            wake_up=lambda tags: None,
        )
        worker.worker = worker
        self.driver_worker = worker

    def set_weights(self, number: int) -> None:
        with torch.no_grad():
            self.model["weights"].fill_(number)

    def _fail(self, number: int) -> None:
        self.set_weights(number)
        raise RuntimeError("the trainer is gone")


class EngineDouble:
    """One engine: scheduler and worker, in this process."""

    def __init__(
        self,
        directory: Path,
        groups: Sequence[FullAttentionSpec | MambaSpec | SlidingWindowSpec],
        transfer: dict[str, Any],
        *,
        blocks: int = 64,
        batched_tokens: int = 64,
        prefix_caching: bool = True,
        drafter: int | None = None,
        events: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """`groups` has one layer each; `transfer` is vLLM's --kv-transfer-config. `drafter` is the
        number of the group with the layers of EAGLE or MTP, if there is one, `events` are vLLM's
        --kv-events-config, and `arguments` are further ones of vLLM's."""
        config = vllm_config(
            directory, transfer, batched_tokens, prefix_caching, events, **(arguments or {})
        )
        config.parallel_config.distributed_executor_backend = "uni"
        if any(isinstance(spec, MambaSpec) for spec in groups):
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.prefix_match_unit = UNIT
        names = [f"layer.{n}" for n in range(len(groups))]
        page = BLOCK * BYTES
        size = page * blocks
        cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[
                KVCacheTensor(len(names) * size, [name], size, page, offset=n * size)
                for n, name in enumerate(names)
            ],
            kv_cache_groups=[
                KVCacheGroupSpec([name], spec, is_eagle_group=number == drafter)
                for number, (name, spec) in enumerate(zip(names, groups, strict=True))
            ],
            kv_cache_layout=config.cache_config.kv_cache_layout,
        )
        config.cache_config.num_gpu_blocks = blocks
        self.groups = list(groups)
        # vLLM's null block, number 0, has bytes too: those of nobody.
        self.caches = [
            torch.full((blocks, 1, BLOCK, BYTES), 0x55, dtype=torch.int8) for _ in groups
        ]
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
        self.executor = Executor(config)
        self.worker: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, cache_config
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.worker.register_kv_caches(dict(zip(names, self.caches, strict=True)))
        # For structured output: every token is right.
        manager: Any = SimpleNamespace(accept_tokens=lambda *_: True)
        self.scheduler = Scheduler(
            config,
            cache_config,
            manager,
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.executor.get_kv_connector_handshake_metadata()
        geometry = self.worker.get_handshake_metadata()
        if geometry is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): geometry})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block_size, sha256)
        self.lora: LoRARequest | None = None
        """The adapter of the requests that come."""
        self.transfer: dict[str, Any] | None = None
        """`kv_transfer_params` of the requests to come."""
        self.returned: dict[str, Any] = {}
        """By request, what goes back under that name."""
        self._count = 0
        self._counters: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.between_steps: Callable[[], None] = lambda: None
        self.faults: list[str] = []
        """Bytes that a computed token would have seen, and that were not those of its tokens."""
        self.cached: dict[str, int] = {}
        """Tokens of each request that were not computed."""
        self._known: dict[tuple[str, int], tuple[int, list[int], list[bytes]]] = {}
        """By request and layer: weights, tokens, and what the model computed for them."""

    @property
    def connector(self) -> Any:
        connector = self.scheduler.connector
        assert connector is not None
        return connector

    @property
    def weights(self) -> int:
        """Number of the weights that it computes with; they are set without anybody's notice."""
        return int(self.executor.model["weights"][0])

    @weights.setter
    def weights(self, number: int) -> None:
        self.executor.set_weights(number)

    def reload(self, number: int) -> None:
        """As vLLM's RPC does."""
        self.executor.collective_rpc("reload_weights", args=(number,))

    def close(self) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.worker.shutdown()
        self.connector.shutdown()

    # ---- requests -------------------------------------------------------------------------------

    def ask(self, *prompts: Sequence[int], output_tokens: int = 4) -> list[int]:
        """Serve prompts at once; how many tokens of each were not computed."""
        names = [self.add(prompt, output_tokens) for prompt in prompts]
        self.run_until(lambda: not any(name in self.scheduler.requests for name in names))
        self.settle()
        return [self.cached[name] for name in names]

    def add(self, prompt: Sequence[int], output_tokens: int = 4) -> str:
        self._count += 1
        extra = self.transfer and {"kv_transfer_params": self.transfer}
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            f"request-{self._count}",
            list(prompt),
            sampling,
            None,
            block_hasher=self._hasher,
            lora_request=self.lora,
        )
        self.scheduler.add_request(request)
        return request.request_id

    def settle(self) -> None:
        """Until all that was stored is written."""
        self.run_until(lambda: not self.scheduler.has_requests())

    def run_until(self, done: Callable[[], bool], seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "the engine does not come to an end"
            self.between_steps()
            if not self.step():
                time.sleep(0.001)

    def reset(self, *, external: bool) -> None:
        self.settle()
        assert self.scheduler.reset_prefix_cache(reset_connector=external)

    def change_weights(self) -> bool:
        """In the middle of everything, with the reset that goes with it; whether that was done."""
        if self._loads():
            return False
        self.weights += 1
        return self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def preempt(self) -> bool:
        """Preempt what runs, and empty vLLM's own cache; whether there was anything."""
        if self._loads() or not self.scheduler.running:
            return False
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _loads(self) -> bool:
        """Whether a request loads blocks, or waits with loaded ones: vLLM raises at a reset
        then."""
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        running = self.scheduler.running
        return any(
            request.status is loading or (request.num_computed_tokens and request not in running)
            for request in self.scheduler.requests.values()
        )

    def counted(self, metric: str, labels: tuple[str, ...]) -> int:
        """The sum of one of kvdepot's counters so far."""
        return self._counters[metric, labels]

    # ---- a step ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """As vLLM's engine core and model runner do it; whether any token was computed."""
        scheduled = self.scheduler.schedule()
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        for cache in self.caches:
            for copy in scheduled.kv_cache_block_copies or ():
                cache[copy.dst_block_id] = cache[copy.src_block_id]
        names = list(scheduled.num_scheduled_tokens)
        sampled = [self._compute(name, scheduled.num_scheduled_tokens[name]) for name in names]
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        outputs = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: n for n, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=output,
            ),
        )
        for output in outputs.values():
            self._count_stats(output.scheduler_stats)
            for one in output.outputs:
                if one.kv_transfer_params is not None:
                    self.returned[one.request_id] = one.kv_transfer_params
        return bool(names)

    def _count_stats(self, stats: Any) -> None:
        found = (stats and stats.kv_connector_stats) or {}
        found = found.get("KvdepotConnector", found)
        for name, kind in found.get("types", {}).items():
            if kind == "counter":
                for labels, value in found["data"][name].items():
                    self._counters[name, tuple(labels)] += value

    def _compute(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        start = end - count
        self.cached.setdefault(name, start)
        tokens = list(request.all_token_ids)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for layer, (spec, table, cache) in enumerate(
            zip(self.groups, tables, self.caches, strict=True)
        ):
            states = self._states(name, layer, tokens[:end])
            if isinstance(spec, MambaSpec):
                self._go_on(name, layer, (start, end), states, table)
                continue
            positions = np.arange(end)
            rows = np.asarray(table)[positions // BLOCK] * BLOCK + positions % BLOCK
            memory = cache.numpy().reshape(-1, BYTES)
            reach = getattr(spec, "sliding_window", None) or end
            first = max(0, start - reach + 1)
            found = memory[rows[first:start]].tobytes()
            if found != b"".join(states[first:start]):
                self.faults += [
                    f"{name}: layer {layer}, token {position} (block {table[position // BLOCK]}) "
                    f"for token {start}"
                    for position in range(first, start)
                    if memory[rows[position]].tobytes() != states[position]
                ]
            computed = np.frombuffer(b"".join(states[start:]), dtype=np.int8)
            memory[rows[start:]] = computed.reshape(-1, BYTES)
        if end < request.num_tokens:
            return []
        return [int.from_bytes(self._states(name, 99, tokens)[-1][:2], "little") % 500 + 3]

    def _go_on(
        self, name: str, layer: int, span: tuple[int, int], states: list[bytes], table: list[int]
    ) -> None:
        """A layer with a state goes on from the one before the first token of the span, in the
        block of that token, and leaves the one after the last in the block of that."""
        start, end = span
        memory = self.caches[layer].numpy().reshape(-1, BLOCK * BYTES)
        before, after = ((token - 1) // BLOCK for token in span)
        if start and memory[table[before]].tobytes() != states[start - 1] * BLOCK:
            self.faults.append(
                f"{name}: layer {layer}, state (block {table[before]}) for token {start}"
            )
        memory[table[after]] = np.frombuffer(states[end - 1] * BLOCK, dtype=np.int8)

    def _states(self, name: str, layer: int, tokens: list[int]) -> list[bytes]:
        """`token_bytes` of a request; those of the step before are kept."""
        weights = self.weights
        known, before, states = self._known.get((name, layer), (weights, [], []))
        if known != weights or tokens[: len(before)] != before:
            before, states = [], []
        last = states[-1] if states else None
        states = states + token_bytes(layer, tokens[len(before) :], weights, last)
        self._known[name, layer] = (weights, tokens, states)
        return states


def vllm_config(
    directory: Path,
    transfer: dict[str, Any],
    batched_tokens: int,
    prefix_caching: bool,
    events: dict[str, Any] | None = None,
    **more: Any,
) -> VllmConfig:
    """vLLM's configuration for a model of which there is no more than a config.json."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HEAD,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    (model / "config.json").write_text(json.dumps(shape))
    arguments = EngineArgs(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=2048,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=8,
        enable_prefix_caching=prefix_caching,
        async_scheduling=False,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(**transfer),
        kv_events_config=events and KVEventsConfig(**events),
        **more,
    )
    return configured(arguments)
