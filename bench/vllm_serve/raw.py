"""How fast the disk reads what a tier has written: the same files, past the page cache, eight
requests at a time."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REQUESTS = 8
PIECE = 2 << 20
MOST = 1 << 30
ROUNDS = 3


def rate(path: Path) -> float:
    """Bytes a second, the median of some rounds; 0 where there are no files, or no direct reads."""
    # Of an arena's space nobody knows here what was written: the rest the disk need not read.
    files = sorted(path.glob("blocks/*/*")) if path.is_dir() else []
    pieces = [
        (file, at) for file in files for at in range(0, file.stat().st_size - PIECE + 1, PIECE)
    ]
    chosen = random.Random(1).sample(pieces, min(len(pieces), MOST // PIECE))
    if not chosen:
        return 0.0
    try:
        return statistics.median(_once(chosen) for _ in range(ROUNDS))
    except OSError:
        return 0.0


def _once(pieces: list[tuple[Path, int]]) -> float:
    shares = [pieces[at::REQUESTS] for at in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        buffers = [mmap.mmap(-1, PIECE) for _ in range(REQUESTS)]
        for buffer in buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer[:] = bytes(PIECE)
        start = time.perf_counter()
        done = sum(pool.map(_read, shares, buffers))
        return done / (time.perf_counter() - start)


def _read(pieces: list[tuple[Path, int]], buffer: mmap.mmap) -> int:
    done = 0
    for path, at in pieces:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            done += os.preadv(fd, [buffer], at)
        finally:
            os.close(fd)
    return done
