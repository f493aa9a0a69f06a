"""A medium that fails under an arena is a miss, whoever else handles signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import faulthandler, mmap, os, sys
    import kvdepot
    import numpy as np

    path, when = sys.argv[1:]
    if when == "before":
        faulthandler.enable()
    depot = kvdepot.open("Dax", {"dax": {"path": path, "capacity": "8MiB"}, "socket": "off"})
    if when == "after":
        faulthandler.enable()
    ns = depot.namespace(model="m", dtype="uint8", block_tokens=16)
    keys = [bytes([number]) * 32 for number in range(60)]
    blocks = [np.full(100_000, number, np.uint8) for number in range(60)]
    assert all(ns.put(keys, blocks).wait())
    os.truncate(path, os.path.getsize(path) // 2)
    back = [np.zeros(100_000, np.uint8) for _ in keys]
    served = ns.get(keys, back).wait()
    assert any(served) and not all(served), served
    for number, there in enumerate(served):
        assert not there or (back[number] == number).all()
    assert depot.stats()["tiers"]["Dax"]["lost_bytes"] > 0
    print("alive", flush=True)
    if when == "elsewhere":
        faulthandler.enable()
        with open(path + ".other", "w+b") as other:
            other.truncate(8192)
            view = mmap.mmap(other.fileno(), 8192)
            other.truncate(4096)
            print(view[5000])
"""


@pytest.mark.parametrize("when", ["never", "before", "after", "elsewhere"])
def test_an_engine_outlives_its_medium(tmp_path: Path, when: str) -> None:
    path = tmp_path / "arena"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), when],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "alive" in run.stdout, run.stderr
    if when == "elsewhere":
        # Not a fault of kvdepot's: it ends the process, with the traceback that was asked for.
        assert run.returncode == -signal.SIGBUS
        assert "Fatal Python error: Bus error" in run.stderr
    else:
        assert run.returncode == 0, run.stderr
