"""Closing ends what is under way, whoever closes and whatever interrupts it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.unit

Child = Callable[..., subprocess.Popen[Any]]

# Half a second of copies for one lane. `say` runs last of all, after kvdepot's own end.
BUSY = """
    import atexit, os, signal, threading, time

    tasks = []

    def say():
        print([task.done for task in tasks] == [True] * len(tasks), flush=True)

    atexit.register(say)
    import kvdepot

    def busy():
        settings = {"cache": {"capacity": "80MiB"}, "socket": "off", "lanes": 1}
        depot = kvdepot.open("Cache", settings)
        ns = depot.namespace("m", "f", 1)
        assert ns.put([bytes(32)], [bytes(64 << 20)]).wait(60) == [True]
        out = [bytearray(64 << 20) for _ in range(2)]
        tasks.extend(ns.get([bytes(32)], [out[turn % 2]]) for turn in range(40))
        return depot

    def refuses(depot):
        try:
            depot.stats()
            depot.namespace("m", "f", 1)
        except kvdepot.ClosedError:
            return True
        return False

    def interrupt_in(seconds):
        def interrupt():
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
"""


def last_line(process: subprocess.Popen[Any]) -> str:
    out, error = process.communicate(timeout=120)
    assert out, error
    return str(out.splitlines()[-1])


def test_a_second_close_waits_for_the_first(child: Child) -> None:
    process = child(
        BUSY
        + """
    depot = busy()
    first = threading.Thread(target=depot.close)
    first.start()
    while not refuses(depot):
        time.sleep(0.001)
    depot.close()
    assert all(task.done for task in tasks)
    first.join()
"""
    )
    assert last_line(process) == "True"
    assert process.returncode == 0


def test_the_end_waits_for_a_close_that_was_interrupted(child: Child) -> None:
    process = child(
        BUSY
        + """
    depot = busy()
    interrupt_in(0.05)
    try:
        depot.close()
    except KeyboardInterrupt:
        assert not all(task.done for task in tasks), "too quick"
    else:
        raise AssertionError("not interrupted")
"""
    )
    assert last_line(process) == "True"
    assert process.returncode == 0


def test_ctrl_c_at_the_end_skips_no_depot(child: Child) -> None:
    process = child(
        BUSY
        + """
    depots = [busy() for _ in range(3)]
    interrupt_in(0.05)
"""
    )
    assert last_line(process) == "True"
