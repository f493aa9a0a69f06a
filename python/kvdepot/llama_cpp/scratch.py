"""Memory for copies of a state that is no process's own: a mapped file without a name.

A state may be as large as all that is free. The kernel writes pages of a file out where memory is
short, and frees them with the last array on them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, TypeAlias

import numpy as np

import kvdepot

Bytes: TypeAlias = Any
"""A NumPy array of bytes: NumPy is not installed where types are checked."""

# /tmp is memory on many machines.
ON_DISK = "/var/tmp"


def folder() -> str:
    """The directory of scratch files: `TMPDIR`, or /var/tmp, or whatever `tempfile` chooses."""
    if not os.environ.get("TMPDIR") and os.access(ON_DISK, os.W_OK | os.X_OK):
        return ON_DISK
    return tempfile.gettempdir()


def scratch(size: int) -> Bytes:
    """Returns `size` bytes, 1 or more, of a new scratch file.

    Raises kvdepot.Error where the file system has no room: all of it is reserved before a page of
    it is touched.
    """
    where = folder()
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            # A page without a block on the disk would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError as error:
        raise kvdepot.Error(f"no room for {size} bytes of a state in {where}: {error}") from error
