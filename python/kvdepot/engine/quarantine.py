"""Namespaces that engines of this user do not use any more: what is stored there is not what they
compute.

A namespace in quarantine is a file `quarantine/DIGEST.json` in kvdepot's cache directory, written
by an engine whose probes failed. `kvdepot quarantine` lists and removes these files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdepot.engine import files


def directory() -> Path:
    """Where the files are; it may not exist."""
    return files.cache_directory() / "quarantine"


def read(digest: bytes) -> dict[str, Any] | None:
    """Why the namespace of this digest is in quarantine, None if it is not.

    A file that cannot be read counts: it was written for some reason.
    """
    path = _path(digest)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        # Without a directory that this user can read, there is none.
        return {"reason": f"{path}: {error}"} if os.path.exists(path) else None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"reason": f"{path}: not JSON"}


def add(digest: bytes, reason: str, details: Mapping[str, Any]) -> Path:
    """Put a namespace into quarantine, for all engines of this user; the file that says so.

    Raises OSError where it cannot be written.
    """
    path = _path(digest)
    entry = {
        "namespace": digest.hex(),
        "reason": reason,
        "since": int(time.time()),
        "process": os.getpid(),
        **details,
    }
    files.write(path, json.dumps(entry, indent=1) + "\n")
    return path


def _path(digest: bytes) -> Path:
    return directory() / f"{digest.hex()}.json"
