"""kvdepot for llama.cpp through llama-cpp-python: conversations continue from stored states.

docs/engines/llama_cpp.md has the guarantees. `python -m kvdepot.llama_cpp` is a server
(docs/engines/llama_cpp_server.md). llama_cpp is imported on the first use of a class of this
package.

Example:
    cache = kvdepot.llama_cpp.KvdepotCache(llama, depot)
    cache.attach()
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
