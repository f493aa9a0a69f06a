"""Measures the time to fingerprint sampled weights when an engine starts.

Sparse files of 28 GB in total are fingerprinted twice: the first time without cached pages.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

import program
from kvdepot.engine import weights

# With the sampled pages in memory.
TARGET_SECONDS = 2.0
FILES = 7
FILE_BYTES = 4_000_000_000
TENSORS = 64
"""A file."""


def main() -> int:
    """The figures; 1 where it takes longer than it may."""
    options = program.parser("identity.start_cost", __doc__)
    options.add_argument(
        "--folder", type=Path, help="folder for the files (default: the system's temporary folder)"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-cost", dir=given.folder) as at:
        files = [_file(Path(at) / f"model-{number}.safetensors") for number in range(FILES)]
        for file in files:
            # As after a reboot.
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold, warm = (_fingerprint(Path(at)) for _ in range(2))
    if given.json:
        row = {"bench": "start_cost", "bytes": FILES * FILE_BYTES, "cold_s": cold, "warm_s": warm}
        print(json.dumps(row))
    else:
        print(
            f"{FILES * FILE_BYTES / 1e9:.0f} GB in {FILES * TENSORS} tensors: {warm:.2f} s, with "
            f"nothing of them in memory {cold:.2f} s"
        )
    return int(warm > TARGET_SECONDS)


def _fingerprint(directory: Path) -> float:
    start = time.perf_counter()
    weights.of_directory(directory)
    return time.perf_counter() - start


def _file(path: Path) -> Path:
    size = FILE_BYTES // TENSORS
    header = {
        f"layer.{number}": {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [number * size, (number + 1) * size],
        }
        for number in range(TENSORS)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + TENSORS * size)
    return path


if __name__ == "__main__":
    sys.exit(main())
