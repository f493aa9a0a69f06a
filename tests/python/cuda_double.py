"""A double of CUDA's driver in the place of a device: `crates/testkit/cuda/double.c`, built here.

kvdepot loads it where `KVDEPOT_CUDA_LIBRARY` names it, once in a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "crates/testkit/cuda/double.c"

# What tells its addresses from the host's.
DEVICE_BIT = 1 << 56


def build(folder: Path) -> str:
    """The library's path."""
    library = folder / "libdouble.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
    return str(library)


@functools.cache
def built() -> str:
    return build(Path(tempfile.mkdtemp(prefix="kvdepot-double-")))


def double() -> ctypes.CDLL:
    """The double as this process's driver, and its functions. It stays: so does its process's use
    of it."""
    os.environ["KVDEPOT_CUDA_LIBRARY"] = built()
    library = ctypes.CDLL(built())
    library.double_busy_stream.restype = ctypes.c_int64
    library.double_release.argtypes = [ctypes.c_int64]
    return library


class OnDevice:
    """A tensor of host memory as one of the double's device 0: all that kvdepot asks of it."""

    def __init__(self, host: Any) -> None:
        import torch

        self.host = host
        self.dtype = host.dtype
        self.device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        """Its address on the device."""
        return int(self.host.data_ptr()) | DEVICE_BIT

    def stride(self, dimension: int) -> int:
        """Elements from one to the next."""
        return int(self.host.stride(dimension))

    def nbytes(self) -> int:
        """Of its storage, which it is itself."""
        return int(self.host.untyped_storage().nbytes())

    def untyped_storage(self) -> OnDevice:
        """What has its memory."""
        return self
