"""kvdepot's Posix tier beside vLLM's `fs` tier and LMCache's disk: `make bench-files`.

In each round every contender moves as many blocks of the same size between memory and files of its
own in one directory, once, one after the other: a store of new blocks, and then a load of them.
All by direct I/O, kvdepot with its checksums. Figures are medians over the rounds, ratios medians
over the ratios of each round. Every contender's bytes are compared with what was stored.
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
