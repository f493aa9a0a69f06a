"""What LMCache's configuration names: `"module_path": "kvdepot.lmcache"`.

LMCache itself is imported with the class that needs it.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvdepotBackend":
        from kvdepot.lmcache_storage import KvdepotBackend

        return KvdepotBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
