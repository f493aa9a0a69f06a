"""Opens the depot of LMCache's in-process mode, which has a process for each rank.

An arena has one owner. The first process that opens it is the owner, and serves
the others at a socket whose name follows from the arena's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import kvdepot
from kvdepot._settings import SERVICE

# As long as kvdepot itself waits for another owner to go.
PATIENCE_SECONDS = 10.0
PAUSE_SECONDS = 0.05


def open_shared(pipeline: str, settings: dict[str, Any]) -> kvdepot.Depot:
    """The depot: opened here, or served by the process that has.

    Raises `kvdepot.LockedError` where the owner of the arena does not serve it
    there: it was opened by something else, or with a socket of its own.
    """
    if pipeline.startswith(SERVICE) or "Dax" not in pipeline or settings.get("socket") == "off":
        return kvdepot.open(pipeline, settings)
    socket = settings.get("socket")
    if socket in (None, "auto"):
        socket = str(_folder() / f"lmcache-{_arena(settings)}.sock")
    mine: dict[str, Any] = {
        name: settings[name] for name in ("lanes", "timeout") if name in settings
    }
    # While the owner of a moment ago goes, or the one of this moment opens.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return kvdepot.open(pipeline, {"lock_wait": 0} | settings | {"socket": socket})
        except kvdepot.LockedError as error:
            try:
                return kvdepot.open(f"{SERVICE}{socket}", mine)
            except kvdepot.ConfigError:
                raise
            except kvdepot.Error:
                if time.monotonic() > deadline:
                    raise error from None
        time.sleep(PAUSE_SECONDS)


def _arena(settings: dict[str, Any]) -> str:
    """Names the arena, by whatever path it is given."""
    dax = settings.get("dax", {})
    paths = [dax.get("path"), *(device["path"] for device in dax.get("devices", []))]
    names = [os.path.realpath(path) for path in paths if path] or [
        f"default {settings.get('instance')}"
    ]
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Where sockets of this user are, as kvdepot itself chooses it; nobody else may enter."""
    session = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    ours = session.is_absolute() and session.is_dir() and session.stat().st_uid == os.geteuid()
    folder = session / "kvdepot" if ours else Path(tempfile.gettempdir(), f"kvdepot-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not folder.is_dir():
        raise kvdepot.ConfigError(
            f"socket: {str(folder)!r} is not a directory of this user alone; name a socket"
        )
    return folder
