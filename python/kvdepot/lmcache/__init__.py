"""kvdepot for LMCache: `"module_path": "kvdepot.lmcache"`.

* `KvdepotNative`: native plug-in of the multi-process mode, the fastest one.
* `KvdepotAdapter`: Python L2 adapter of the multi-process mode, with pins, eviction events, usage
  per salt, listings, and devices that are added and removed while it serves.
* `KvdepotBackend`: storage plug-in of the in-process mode.

docs/engines/lmcache.md has the configuration. LMCache itself is imported with the class that needs
it.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvdepot.lmcache.native import KvdepotNative

__all__ = ["KvdepotNative"]

_WHERE = {
    "KvdepotAdapter": "kvdepot.lmcache.adapter",
    "KvdepotBackend": "kvdepot.lmcache.storage",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
