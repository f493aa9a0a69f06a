"""kvdepot's Posix tier beside UCM's store Posix and NIXL's plug-in POSIX: `make bench-ucm`.

As run.py, in an environment of its own, since UCM's wheel is for CPython 3.12. All by direct I/O,
kvdepot with its checksums; what is stored outlives the process and no power cut. UCM's and NIXL's
settings are those that are fastest here, chosen for each size of block and for stores and loads by
a trial of each. NIXL has files and no store: it opens each by its own name and publishes nothing.
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
