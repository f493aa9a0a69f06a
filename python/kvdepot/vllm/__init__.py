"""kvdepot for vLLM: `"kv_connector_module_path": "kvdepot.vllm"`, `KvdepotConnector`.

docs/engines/vllm.md has the configuration. vLLM itself is imported with the connector.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "KvdepotConnector": "kvdepot.vllm.connector",
    "KvdepotSpec": "kvdepot.vllm.spec",
    "KvdepotTier": "kvdepot.vllm.tier",
    "KvdepotTieringConnector": "kvdepot.vllm.tiering",
}

__all__ = ["KvdepotConnector", "KvdepotSpec", "KvdepotTier", "KvdepotTieringConnector"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
