"""Opens the depot of LMCache's in-process mode, which has a process for each rank.

An arena has one owner. The first process that opens it is the owner, and serves
the others at a socket whose name follows from the arena's. A directory of blocks
has none: each process opens it, unless a socket is named.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvdepot
from kvdepot._settings import SERVICE
from kvdepot.lmcache.settings import ARENAS, tiers_of

# As long as kvdepot itself waits for another owner to go.
PATIENCE_SECONDS = 10.0
PAUSE_SECONDS = 0.05


def open_shared(pipeline: str, settings: dict[str, Any]) -> kvdepot.Depot:
    """The depot: opened here, or served by the process that has.

    Raises `kvdepot.LockedError` where the owner of the arena does not serve it
    there: it was opened by something else, or with a socket of its own.
    """
    socket = settings.get("socket")
    arenas = tiers_of(pipeline, ARENAS)
    named = socket not in (None, "auto")
    if pipeline.startswith(SERVICE) or socket == "off" or not (arenas or named):
        return kvdepot.open(pipeline, settings)
    if not named:
        socket = str(_folder() / f"lmcache-{_arena(settings, arenas)}.sock")
    mine: dict[str, Any] = {
        name: settings[name] for name in ("lanes", "timeout") if name in settings
    }
    if not arenas:
        # Whoever listens there serves; no lock says that somebody is about to.
        for _ in range(2):
            with suppress(kvdepot.Error):
                return kvdepot.open(f"{SERVICE}{socket}", mine)
            with suppress(kvdepot.ConfigError):
                return kvdepot.open(pipeline, settings)
        return kvdepot.open(pipeline, settings)
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


def _arena(settings: dict[str, Any], tiers: list[str]) -> str:
    """Names the arenas, by whatever paths they are given."""
    sections = [settings.get(tier.lower(), {}) for tier in tiers]
    devices = [device for section in sections for device in section.get("devices", [])]
    paths = [one.get("path") for one in [*sections, *devices]]
    others = "".join(f" {tier}" for tier in tiers if tier != "Dax")
    names = [os.path.realpath(path) for path in paths if path] or [
        f"default {settings.get('instance')}{others}"
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
            f"socket: {str(folder)!r} is not a private directory of this user; set socket to a path"
        )
    return folder
