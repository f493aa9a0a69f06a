"""vLLM 0.31: it does not count where hits come from."""

from __future__ import annotations

import enum
from typing import Any

from kvdepot.vllm.compat import internals


class Source(enum.StrEnum):
    """Stands for the source of hits that vLLM has from 0.32 on. vLLM 0.31 never reads it."""

    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class Adapter(internals.Adapter):
    """0.31."""

    def cache_hit_source(self) -> Any:
        """A stand-in: vLLM does not ask."""
        return Source

    def is_elsewhere(self, lora_request: Any) -> bool:
        """A request may name a file of tensorizer's, beside the path."""
        return lora_request.tensorizer_config_dict is not None
