"""vLLM's KV caches of host memory as a device's, by the double of the driver."""

from __future__ import annotations

from typing import Any

from cuda_double import OnDevice, double
from kvdepot.vllm.worker import KvdepotWorker
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor


class DeviceWorker(KvdepotWorker):
    """The worker as it is on a device; what it asks of the driver the double answers."""

    stream = 0
    """What the engine computes on; 0 has nothing to do."""

    def __init__(self, kv_caches: CanonicalKVCaches, rank: int, blocks_per_chunk: int) -> None:
        double()
        moved: list[Any] = [
            CanonicalKVCacheTensor(OnDevice(each.tensor), each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        caches = CanonicalKVCaches(moved, kv_caches.group_data_refs)
        super().__init__(caches, rank, blocks_per_chunk)

    def _computing(self) -> int | None:
        return self.stream
