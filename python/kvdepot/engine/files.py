"""kvdepot's own files for a user."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import kvdepot
from kvdepot import _native


def cache_directory() -> Path:
    """Where kvdepot itself has it, which makes it: `kvdepot` in `$XDG_CACHE_HOME`, or in `.cache`
    of the home directory; in `$TMPDIR` where neither can be written. It may not exist where none
    can be."""
    with contextlib.suppress(kvdepot.Error):
        return Path(_native._cache_directory())
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "kvdepot"


def write(path: Path, text: str) -> None:
    """Write a whole file below `cache_directory`, or replace it; directories are made."""
    top = cache_directory()
    if not top.is_absolute():
        raise OSError("this user has no home directory; set XDG_CACHE_HOME to an absolute path")
    top.parent.mkdir(parents=True, exist_ok=True)
    # Default arenas are there, too, and only this user may read them.
    top.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
