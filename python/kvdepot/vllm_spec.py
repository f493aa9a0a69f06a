"""vLLM's offloading spec for kvdepot: builds the index side and the moving side.

vLLM finds this class by the names that `KvdepotConnector` writes into
`kv_connector_extra_config`, in the API server's process too (for the metrics).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

import kvdepot
from kvdepot import vllm_settings
from kvdepot.vllm_manager import KvdepotManager
from kvdepot.vllm_metrics import DEFINITIONS
from kvdepot.vllm_settings import Settings
from kvdepot.vllm_worker import KvdepotWorker

logger = init_logger("vllm.kvdepot")


class KvdepotSpec(OffloadingSpec):
    """How vLLM's OffloadingConnector makes kvdepot's manager and worker."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics that the manager may report."""
        return dict(DEFINITIONS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = vllm_settings.read(config.extra_config)
        # Generated tokens come back too: the next turn of a conversation starts with them.
        self.offload_prompt_only = self.settings.offload_prompt_only

    def get_manager(self) -> KvdepotManager:
        """Open the depot; this process owns it."""
        depot = open_depot(self.settings, self.config)
        # Now, while the engine starts, the memory costs no request anything.
        depot.populate()
        return KvdepotManager(
            depot, self.config.parallel.world_size, self.settings.lookup_wait_seconds
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker for the memory that the KV caches are in."""
        rank = self.config.parallel.rank
        if current_platform.is_cpu():
            return KvdepotWorker(kv_caches, rank, self.blocks_per_chunk)
        if current_platform.is_cuda_alike():
            from kvdepot.vllm_cuda import KvdepotCudaWorker

            return KvdepotCudaWorker(kv_caches, rank, self.blocks_per_chunk)
        raise kvdepot.ConfigError(
            f"--device: {current_platform.device_name!r} is not supported by kvdepot's vLLM "
            "connector; it moves KV caches of CPU and CUDA devices"
        )


def open_depot(settings: Settings, config: OffloadingConfig) -> Any:
    """Open the depot of this engine and say in one line what it is."""
    wanted = settings.depot
    # Of data-parallel engines, vLLM leaves each its index alone: those of a dense model have a
    # size of 1. The first keeps the names that it has without data parallelism.
    index = config.parallel.data_parallel_index
    if index > 0:
        wanted = with_own_arena(wanted, index)
    depot = kvdepot.open(settings.pipeline, wanted)
    if depot.socket is None:
        depot.close()
        raise kvdepot.ConfigError(
            "socket: 'off' is not allowed with vLLM, whose workers attach there; leave it out"
        )
    logger.info("kvdepot: %s", depot.description)
    return depot


def with_own_arena(depot: dict[str, Any], index: int) -> dict[str, Any]:
    """The settings of the data-parallel engine `index`: an arena has one owner."""
    changed = dict(depot)
    dax = dict(changed.get("dax") or {})
    path = dax.get("path")
    if path is None:
        return changed | {"instance": f"{changed.get('instance', 'vllm')}-dp{index}"}
    if str(path).startswith("/dev/"):
        raise kvdepot.ConfigError(
            f"dax.path: {path!r} is one device, but each data-parallel engine needs an arena of "
            "its own; give a file, or start the engines one by one with a device each"
        )
    changed["dax"] = dax | {"path": f"{path}.dp{index}"}
    return changed
