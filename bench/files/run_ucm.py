"""Compares kvdepot's Posix tier with UCM's Posix store and NIXL's POSIX plug-in: `make bench-ucm`.

The method is the method of run.py. The benchmark needs its own environment, because UCM's wheel is
for CPython 3.12. All programs use direct I/O, kvdepot with its checksums. Stored data survives the
process, but not a power loss. For UCM and NIXL, the fastest settings on this machine are used,
chosen by a trial for each block size, for stores and for loads. NIXL reads and writes files without
a store: the benchmark opens each file by its own name, and publishes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from command import Comparison, run
from stores import BATCHES_TRIED, Nixl, Ucm


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each size of block."""
    comparison = Comparison(
        {"ucm": "over_ucm", "nixl": "over_nixl"},
        lambda: {"ucm": Ucm, "nixl": Nixl},
        frugal=("ucm", "UCM's Posix"),
        trials=BATCHES_TRIED,
    )
    return run("bench/files/run_ucm.py", __doc__, comparison, arguments)


if __name__ == "__main__":
    sys.exit(main())
