"""vLLM's offloading spec for kvdepot: builds the index side and the moving side.

vLLM finds this class by the names that `KvdepotConnector` writes into
`kv_connector_extra_config`, in the API server's process too (for the metrics).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

import kvdepot
from kvdepot.vllm import compat
from kvdepot.vllm import settings as vllm_settings
from kvdepot.vllm.compat import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.metrics import DEFINITIONS
from kvdepot.vllm.settings import DepotSettings, Settings
from kvdepot.vllm.worker import KvdepotWorker

logger = init_logger("vllm.kvdepot")

# How long an engine that starts beside its service waits for it: as long as a depot waits for
# another owner to go.
SERVICE_SECONDS = 10.0
SERVICE_PAUSE_SECONDS = 0.2

# Each hashes and copies some gigabytes a second; a device takes fifty.
LANES_BESIDE_A_DEVICE = 16


class KvdepotSpec(OffloadingSpec):
    """Offloading spec: creates kvdepot's manager and worker for vLLM's OffloadingConnector."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Returns the metrics that the manager may report."""
        return dict(DEFINITIONS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = vllm_settings.read(config.extra_config)
        # Generated tokens come back too: the next turn of a conversation starts with them.
        self.offload_prompt_only = self.settings.offload_prompt_only
        # The KV of every rank is the same bytes: vLLM then has the first one store it.
        self.replicated_layout = config.replicated_layout

    def get_manager(self) -> KvdepotManager:
        """Opens the depot, or connects to its server, and returns the manager."""
        depot = open_depot(self.settings, self.config)
        if not self.settings.shared:
            # Now, while the engine starts, the memory costs no request anything.
            depot.prefault()
        world = self.config.parallel.world_size
        writers = 1 if self.replicated_layout else world
        return KvdepotManager(
            depot,
            world,
            self.settings.lookup_wait_seconds,
            self.settings.on_reset,
            writers=writers,
            shared=self.settings.shared,
            engine_block_bytes=self.config.worker_kv_bytes_per_block * writers,
            probing=self.settings.probes,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker that copies the bytes of these KV caches."""
        if current_platform.is_cpu() or current_platform.is_cuda():
            made = KvdepotWorker(kv_caches, self.config.parallel.rank, self.blocks_per_chunk)
            if self.replicated_layout:
                made.part = 0
            if self.settings.shared:
                # Otherwise the owner's, which it tells.
                made.lanes = self.settings.depot.get("lanes")
            if current_platform.is_cuda():
                if made.lanes is None and "lanes" not in self.settings.depot:
                    # Beside a device's bus a few are not enough.
                    made.lanes = min(LANES_BESIDE_A_DEVICE, len(os.sched_getaffinity(0)))
                # What a lane hands the device after that would meet memory that is gone.
                compat.rest_before_sleep(made.rest)
            return made
        raise kvdepot.ConfigError(
            f"--device: {current_platform.device_name!r} is not supported by kvdepot's vLLM "
            "connector; use a CPU or a CUDA device"
        )


def open_depot(settings: Settings, config: OffloadingConfig) -> kvdepot.Depot:
    """Open the depot of this engine and say in one line what it is."""
    if settings.shared:
        # No byte is moved from the scheduler's process.
        return open_service(settings.pipeline, settings.depot | {"lanes": 1})
    depot = open_own(settings, config)
    if depot.socket is None:
        depot.close()
        raise kvdepot.ConfigError(
            "socket: 'off' is not allowed, because vLLM's workers need the socket; omit socket"
        )
    return depot


def open_own(settings: DepotSettings, config: OffloadingConfig) -> kvdepot.Depot:
    """Open a depot that no other engine has, and say what it is."""
    wanted = settings.depot
    # Of data-parallel engines, vLLM leaves each its index alone: those of a dense model have a
    # size of 1. The first keeps the names that it has without data parallelism.
    index = config.parallel.data_parallel_index
    if index > 0:
        wanted = with_own_arena(wanted, index)
    depot = kvdepot.open(settings.pipeline, wanted)
    logger.info("kvdepot: %s", depot.description)
    return depot


def open_service(pipeline: str, wanted: dict[str, Any]) -> kvdepot.Depot:
    """The depot of a service; both may have been started at once."""
    deadline = time.monotonic() + SERVICE_SECONDS
    while True:
        try:
            depot = kvdepot.open(pipeline, wanted)
        except kvdepot.ConfigError:
            raise
        except kvdepot.Error as error:
            if time.monotonic() > deadline:
                raise kvdepot.ConfigError(
                    f"pipeline: {pipeline!r}: {error}; start the server first "
                    "('kvdepot serve'), or set a pipeline of tiers here"
                ) from error
        else:
            logger.info("kvdepot: %s: %s", pipeline, depot.description)
            return depot
        time.sleep(SERVICE_PAUSE_SECONDS)


def with_own_arena(depot: dict[str, Any], index: int) -> dict[str, Any]:
    """The settings of the data-parallel engine `index`: an arena has one owner."""
    changed = dict(depot)
    for tier in ("dax", "nvme"):
        section = dict(changed.get(tier) or {})
        path = section.get("path")
        if path is None:
            continue
        if str(path).startswith("/dev/"):
            raise kvdepot.ConfigError(
                f"{tier}.path: {path!r} is one device, but each data-parallel engine needs its "
                "own arena; use a file, or start each engine separately with its own device"
            )
        changed[tier] = section | {"path": f"{path}.dp{index}"}
    # The arenas without a path have one by the instance's name.
    return changed | {"instance": f"{changed.get('instance', 'vllm')}-dp{index}"}
