"""Closing ends what is under way, whoever closes and whatever interrupts it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvdepot
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
    # Again, where a busy machine has sent the signal after the close.
    process = child(
        BUSY
        + """
    def interrupt(depot):
        while not refuses(depot):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(50):
        tasks.clear()
        depot, closed = busy(), False
        thread = threading.Thread(target=interrupt, args=(depot,))
        try:
            thread.start()
            depot.close()
            closed = True
            thread.join()
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        thread.join()
        if not closed and not all(task.done for task in tasks):
            break
    else:
        raise AssertionError("never interrupted")
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


@pytest.mark.integration
def test_ctrl_c_while_another_owner_is_waited_for_leaves_nothing(
    child: Child, tmp_path: Path
) -> None:
    used, fresh = tmp_path / "used", tmp_path / "fresh"
    settings = {"path": str(used), "capacity": "1MiB"}
    with kvdepot.open("Dax", {"dax": settings, "socket": "off"}):
        # It has made the first device when it waits for the second.
        process = child(
            """
            import os, signal, sys, threading, time
            import kvdepot

            fresh, used = sys.argv[1:]

            def press():
                while not os.path.exists(fresh):
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=press).start()
            devices = [{"path": path, "capacity": "1MiB"} for path in (fresh, used)]
            options = {"dax": {"devices": devices}, "socket": "off", "lock_wait": "1h"}
            try:
                kvdepot.open("Dax", options)
            except KeyboardInterrupt:
                print(os.path.exists(fresh))
            """,
            fresh,
            used,
        )
        assert process.communicate(timeout=60)[0].split() == ["False"]
    assert not fresh.exists()


@pytest.mark.integration
def test_a_close_lets_memory_and_the_arena_go_while_a_namespace_is_kept(tmp_path: Path) -> None:
    arena = str(tmp_path / "arena")
    settings = {
        "cache": {"capacity": "43MiB"},
        "dax": {"path": arena, "capacity": "4MiB"},
        "socket": "off",
        "lock_wait": "1h",
    }

    def mapped() -> tuple[bool, bool]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [line.split(" ")[0].split("-") for line in lines if "kvdepot-cache" in line]
        lengths = [int(end, 16) - int(begin, 16) for begin, end in ends]
        return 43 << 20 in lengths, any(arena in line for line in lines)

    depot = kvdepot.open("Cache|Dax", settings)
    ns = depot.namespace("m", "f", 1)
    assert ns.put([bytes(32)], [b"x" * 5000]).wait(30) == [True]
    assert mapped() == (True, True)
    # Nobody would end the wait.
    with pytest.raises(kvdepot.LockedError, match="another depot of this process") as caught:
        kvdepot.open("Cache|Dax", settings)
    assert caught.value.pid == os.getpid()
    depot.close()
    assert mapped() == (False, False)
    with kvdepot.open("Cache|Dax", settings) as again:
        assert again.namespace("m", "f", 1).contains([bytes(32)]) == [True]
    with pytest.raises(kvdepot.ClosedError):
        ns.contains([bytes(32)])


def test_the_end_of_a_process_waits_for_a_mover_that_its_own_thread_lets_go(child: Child) -> None:
    """The last to have it is the thread that has begun its job, where the program has let it go."""
    program = (
        BUSY
        + """
    settings = {"cache": {"capacity": "400MiB"}, "socket": os.path.dirname(__file__) + "/s"}
    depot = kvdepot.open("Cache", settings)
    ns = depot.namespace("m", "f", 1)
    names = [bytes([number]) * 32 for number in range(4)]
    held = [one.placement for one in ns.reserve(names, 90 << 20)]
    block = bytearray(90 << 20)
    mover = kvdepot.attach(depot.socket, lanes=1)
    tasks.append(mover.store(held, [block] * 4, background=True))
    del mover
    time.sleep(0.02)
    print(not tasks[0].done)
    """
    )
    # Again, where a busy machine has let all be copied before the end.
    for _ in range(10):
        process = child(program)
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        under_way, done = out.split()
        assert done == "True"
        if under_way == "True":
            return
    raise AssertionError("too quick")
