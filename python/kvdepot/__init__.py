"""Stores the KV cache of large language models in tiers of memory and disks, and reads it back.

Workers in other processes attach with `kvdepot.attach`. docs/python.md is the guide.

Example:
    keys = kvdepot.keys(tokens, block_tokens=256)
    depot = kvdepot.open("Cache|Dax", {"dax": {"path": "/dev/dax0.0"}})
    ns = depot.namespace(model="Qwen/Qwen3-14B", dtype="bfloat16", block_tokens=256)
    ns.put(keys, buffers).wait()
    hits = ns.prefix(keys)
    ok = ns.get(keys[:hits], buffers[:hits]).wait(timeout=30)
"""

import atexit as _atexit
import os as _os
import sys as _sys

if _sys.platform != "linux" or _os.uname().machine not in ("x86_64", "aarch64"):
    raise ImportError("kvdepot runs on Linux on x86-64 and aarch64 only")

from kvdepot import _native
from kvdepot._native import (
    ClosedError,
    Completions,
    ConfigError,
    CorruptError,
    Depot,
    Error,
    FullError,
    InputError,
    LockedError,
    MoveJob,
    Mover,
    Namespace,
    Pin,
    Reservation,
    Spans,
    Task,
    TimeoutError,
    __version__,
    attach,
    check,
    keys,
    open,
)

__all__ = [
    "ClosedError",
    "Completions",
    "ConfigError",
    "CorruptError",
    "Depot",
    "Error",
    "FullError",
    "InputError",
    "LockedError",
    "MoveJob",
    "Mover",
    "Namespace",
    "Pin",
    "Reservation",
    "Spans",
    "Task",
    "TimeoutError",
    "__version__",
    "attach",
    "check",
    "keys",
    "open",
]

# While Python is whole: lanes may still write into memory that Python objects own.
_atexit.register(_native._close_all)
