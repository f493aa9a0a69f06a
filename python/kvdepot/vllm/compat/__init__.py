"""vLLM's private names, and where its versions differ: the rest of kvdepot knows neither.

One adapter a minor version (`v0_31` and so on) has what is not as in 0.32, and `internals` has the
rest. `versions` has the range. Public names (`KVConnectorBase_V1`, loggers, platforms) are imported
where they are used. tests/engine/vllm_names.py lists all of them, and prints what a version of vLLM
has changed.
"""

from __future__ import annotations

import importlib

from kvdepot.vllm.compat import versions

try:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        FullAttentionSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
        iter_layer_specs,
    )
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        OffloadPolicy,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    # It imports private names, too.
    from kvdepot.vllm.compat import events
    from kvdepot.vllm.compat.internals import (
        configuration_of,
        cpu_isa,
        has_transfers,
        has_whole,
        has_windows,
        is_bounded,
        key_positions,
        local_tokens,
        look_up_rows,
        on_pause,
        request_states,
        store_for,
    )

    _adapter = importlib.import_module(f"{__name__}.{versions.adapter()}").Adapter()
    CacheHitSource = _adapter.cache_hit_source()
except ImportError as error:
    if versions.here() in versions.TESTED:
        raise
    raise versions.lack(error) from error

exclusive = _adapter.exclusive
hash_lookahead = _adapter.hash_lookahead
is_elsewhere = _adapter.is_elsewhere
rest_before_sleep = _adapter.rest_before_sleep

__all__ = [
    "AttentionSpec",
    "CacheHitSource",
    "CanonicalKVCacheRef",
    "CanonicalKVCaches",
    "Executor",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "JobResult",
    "KVQuantMode",
    "LoadStoreSpec",
    "Locality",
    "LookupResult",
    "MLAAttentionSpec",
    "MambaSpec",
    "Medium",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingConnectorWorker",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "OffloadingWorkerMetadata",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "TransferJob",
    "TransferResult",
    "UniformTypeKVCacheSpecs",
    "configuration_of",
    "cpu_isa",
    "events",
    "exclusive",
    "get_hash_fn_by_name",
    "get_kv_transfer_group",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "get_offloading_group_ids",
    "has_kv_transfer_group",
    "has_transfers",
    "has_whole",
    "has_windows",
    "hash_lookahead",
    "is_bounded",
    "is_elsewhere",
    "iter_layer_specs",
    "key_positions",
    "local_tokens",
    "look_up_rows",
    "on_pause",
    "request_states",
    "resolve_none_hash_seed",
    "rest_before_sleep",
    "store_for",
]
