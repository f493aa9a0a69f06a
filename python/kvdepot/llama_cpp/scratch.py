"""Memory for copies of a state that is no process's own: a mapped file without a name.

A state may be as large as all that is free. The kernel writes pages of a file out where memory is
short, and frees them with the last array on them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from typing import Any, TypeAlias

import numpy as np

import kvdepot

Bytes: TypeAlias = Any
"""A NumPy array of bytes: NumPy is not installed where types are checked."""

# /tmp is memory on many machines.
ON_DISK = "/var/tmp"
# `mmap.mmap` keeps a descriptor as long as the memory, and many states may wait to be written.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


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
            return _map(file.fileno(), size)
    except OSError as error:
        raise kvdepot.Error(
            f"cannot allocate {size} bytes for a state in {where}: {error}"
        ) from error


def _map(file: int, size: int) -> Bytes:
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, size, rights, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Each array on it keeps `memory`. The end of the process frees all that is left.
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return np.frombuffer(memory, np.uint8)
