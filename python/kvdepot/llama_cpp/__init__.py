"""kvdepot for llama.cpp through llama-cpp-python: conversations go on from what is stored of them.

    cache = kvdepot.llama_cpp.KvdepotCache(llama, depot)
    cache.attach()

docs/engines/llama_cpp.md says what may be relied on. `python -m kvdepot.llama_cpp` is a server
(docs/engines/llama_cpp_server.md). llama_cpp is imported with what is used of this package.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "KvdepotCache": "kvdepot.llama_cpp.cache",
    "Snapshot": "kvdepot.llama_cpp.states",
    "States": "kvdepot.llama_cpp.states",
}

__all__ = ["KvdepotCache", "Snapshot", "States"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
