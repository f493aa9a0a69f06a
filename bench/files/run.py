"""Compares kvdepot's Posix tier with vLLM's `fs` tier and LMCache's disk: `make bench-files`.

In each round, each program stores the same number of new blocks of the same size in its own files
in one directory, and then loads the blocks into memory. The programs run one after the other, all
with direct I/O, kvdepot with its checksums. Values are medians over the rounds, and ratios are
medians over the ratios of the rounds. The loaded bytes of each program are compared with the stored
bytes.
"""

from __future__ import annotations

import os

# Before LMCache is imported: it reports its usage otherwise.
os.environ["DO_NOT_TRACK"] = "1"
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import logging
import sys
from collections.abc import Mapping, Sequence

from command import Comparison, run
from contest import Kind


def kinds() -> Mapping[str, Kind]:
    """Who is beside kvdepot."""
    logging.disable(logging.WARNING)
    from contenders import LmcacheDisk, VllmFs

    return {"vllm": VllmFs, "lmcache": LmcacheDisk}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each size of block."""
    metrics = {"vllm": "over_vllm_fs", "lmcache": "over_lmcache_disk"}
    comparison = Comparison(metrics, kinds, frugal=("vllm", "vLLM's fs tier"))
    return run("bench/files/run.py", __doc__, comparison, arguments)


if __name__ == "__main__":
    sys.exit(main())
