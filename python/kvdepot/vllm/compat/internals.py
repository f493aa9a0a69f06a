"""What of vLLM's private names is the same in each version of the range, and 0.32's of the rest.

A `scheduler` is the scheduler's half of vLLM's OffloadingConnector, and a request is given by its
ID.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)


class Adapter:
    """What differs between the versions; here as 0.32 has it."""

    def cache_hit_source(self) -> Any:
        """vLLM's enumeration of where hits come from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource

    def exclusive(self, scheduler: Any) -> contextlib.AbstractContextManager[Any]:
        """While it is entered, no thread of vLLM's calls the manager or its tiers."""
        return contextlib.nullcontext()

    def hash_lookahead(self, vllm_config: Any) -> int:
        """How many tokens behind a block its hash covers."""
        return 0

    def is_elsewhere(self, lora_request: Any) -> bool:
        """Whether an adapter's weights come from elsewhere than the files of its path."""
        return False

    def rest_before_sleep(self, rest: Callable[[], None]) -> None:
        """Have `rest` called before the KV caches' memory is taken away.

        Nothing tells the connector, so the allocator waits.
        """
        # A build for CUDA cannot import it on a machine without a driver.
        from vllm.device_allocator.cumem import CuMemAllocator

        # Made before the KV caches are, where the engine may sleep.
        allocator = CuMemAllocator.instance
        if allocator is not None:
            for name in ("sleep", "discard"):
                _rest_before(name, rest, allocator)


def _rest_before(name: str, rest: Callable[[], None], allocator: Any) -> None:
    call: Callable[..., Any] | None = getattr(allocator, name, None)
    if call is None:
        return

    def after_a_rest(*args: Any, **kwargs: Any) -> Any:
        rest()
        return call(*args, **kwargs)

    setattr(allocator, name, after_a_rest)


# ---- requests in the scheduler -----------------------------------------------------------------


def request_states(scheduler: Any) -> Mapping[str, Any]:
    """The requests that vLLM has states of, also ended ones with transfers. `req` of a state is the
    request."""
    states: Mapping[str, Any] = scheduler._req_status
    return states


def has_transfers(scheduler: Any, request: str) -> bool:
    """Whether loads or stores of a request are in progress. vLLM makes no lookup until they end."""
    return bool(scheduler._req_status[request].transfer_jobs)


def local_tokens(scheduler: Any, request: str) -> int:
    """Tokens that vLLM's own cache had of a request when it was last looked up."""
    return int(scheduler._req_status[request].num_locally_computed_tokens)


def has_whole(scheduler: Any, request: str, key: OffloadKey) -> bool:
    """Whether vLLM still has every one of its blocks of a stored block.

    It has not where a part of it is out of a window already.
    """
    config, state = scheduler.config, scheduler._req_status[request]
    end_token = state.req_context.get_offload_key_position(key)
    assert end_token is not None
    for group, group_state in zip(config.kv_group_configs, state.group_states, strict=True):
        if group.group_idx == get_offload_group_idx(key):
            end = end_token // group.tokens_per_block
            blocks = group_state.block_ids[end - config.blocks_per_chunk : end]
            return len(blocks) == config.blocks_per_chunk and 0 not in blocks
    return False


def key_positions(context: ReqContext) -> dict[OffloadKey, int]:
    """vLLM's keys of a request's blocks, in order of their being named, and the tokens that they
    end at. It grows."""
    positions: dict[OffloadKey, int] = context._offload_key_positions
    return positions


# ---- groups in the scheduler -------------------------------------------------------------------


def has_windows(scheduler: Any) -> bool:
    """Whether some KV group has a sliding window, or a state."""
    return bool(scheduler._sliding_window_groups)


def is_bounded(connector: Any) -> bool:
    """Whether KV groups that are not offloaded bound what may be loaded."""
    return bool(connector._bounding_group_ids)


def store_for(scheduler: Any, ends: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    """Have windows stored of the hits that `ends` returns, for those that vLLM expects; both are
    the tokens that hits end at."""
    masks = scheduler._reachable_store_block_mask

    def with_more(*, reachable_boundaries: tuple[int, ...], **others: Any) -> Any:
        return masks(reachable_boundaries=ends(reachable_boundaries), **others)

    scheduler._reachable_store_block_mask = with_more


def look_up_rows(
    scheduler: Any, leading: Callable[[Sequence[OffloadKey], ReqContext], int | None]
) -> None:
    """Have blocks looked up by row, which vLLM looks up one by one.

    `leading` returns how many blocks of a row are there, from the first on; None while that is not
    known. A row with a window is looked up from its last block on, and by vLLM, unless that block
    makes the request wait: then vLLM's result is None whatever it hears of the others.
    """
    look_back = scheduler._sliding_window_lookup

    def look_forward(keys: Sequence[OffloadKey], context: ReqContext, *_: Any) -> int | None:
        return leading(keys, context)

    def look_back_unless_it_waits(
        keys: Sequence[OffloadKey], window: int, context: ReqContext, *first: Any
    ) -> Any:
        answer = scheduler.manager.lookup(keys[-1], context) if keys else None
        if answer is LookupResult.RETRY:
            return None
        if answer is LookupResult.MISS:
            # Not asked for twice. Only a window with the last block may need another length.
            return look_back(keys[:-1], window, context)
        return look_back(keys, window, context, *first)

    scheduler._maximal_prefix_lookup = look_forward
    scheduler._sliding_window_lookup = look_back_unless_it_waits


# ---- the engine --------------------------------------------------------------------------------


def on_pause(tell: Callable[[Any, bool], None]) -> None:
    """From now on every scheduler of this process calls `tell` with each of its connectors, and
    whether it is paused."""
    set_state = Scheduler.set_pause_state
    if hasattr(set_state, "__wrapped__"):
        return

    @functools.wraps(set_state)
    def noticed(self: Scheduler, pause_state: PauseState) -> None:
        set_state(self, pause_state)
        outer: Any = self.connector
        for connector in (outer, *getattr(outer, "sub_connectors", ())):
            tell(connector, pause_state != PauseState.UNPAUSED)

    Scheduler.set_pause_state = noticed


def configuration_of(connector: Any) -> Any:
    """The configuration that a connector was made with."""
    return connector._vllm_config


def cpu_isa(vllm_config: Any, head_size: int) -> str:
    """The instruction set that packs the keys of a layer on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config
    dtype = vllm_config.model_config.dtype
    return str(_get_attn_isa(dtype, cache.block_size, head_size, cache.cache_dtype))
