"""Waits end in time, notice Ctrl-C, let other threads run, and never cancel what they wait for."""

from __future__ import annotations

import builtins
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import kvdepot
import pytest

Keys = Callable[[int], list[bytes]]


@pytest.fixture
def pending(ns: kvdepot.Namespace, keys: Keys) -> tuple[kvdepot.Task, kvdepot.Reservation]:
    """A put that waits for whoever reserved its key before, and that reservation."""
    (held,) = ns.reserve(keys(1), 5)
    assert held is not None
    return ns.put([held.key], [bytearray(b"bytes")]), held


def test_a_timeout_changes_nothing(ns: kvdepot.Namespace, pending: Any) -> None:
    task, held = pending
    for wait in (task.wait, task.wait_released):
        for timeout in (0, 0.01, 0.12):
            start = time.monotonic()
            with pytest.raises(kvdepot.TimeoutError) as caught:
                wait(timeout)
            assert timeout <= time.monotonic() - start
            assert isinstance(caught.value, builtins.TimeoutError)
            assert isinstance(caught.value, kvdepot.Error)
    assert not task.done
    assert task.errors == ["pending"]
    assert "in progress" in repr(task)
    ns.abort([held])
    # The put takes over from the writer that gave up.
    assert task.wait(30) == [True]
    out = bytearray(5)
    assert ns.get([held.key], [out]).wait(30) == [True]
    assert out == b"bytes"


def test_a_put_shares_the_fate_of_the_writer_before_it(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, pending: Any
) -> None:
    task, held = pending
    with kvdepot.attach(depot.socket or "") as mover:
        job = mover.store([held.placement], [b"BYTES"])
        assert job.wait(30)
        assert ns.commit([held], [[job.checksums[0] or b""]]) == [True]
    assert task.wait(30) == [True]


def test_other_threads_run_during_a_wait(ns: kvdepot.Namespace, pending: Any) -> None:
    task, held = pending

    def end_it() -> None:
        time.sleep(0.3)
        ns.abort([held])

    thread = threading.Thread(target=end_it)
    thread.start()
    # Nobody else would end it.
    assert task.wait(60) == [True]
    thread.join()


def test_many_threads_wait_for_one_task(ns: kvdepot.Namespace, pending: Any) -> None:
    task, held = pending
    answers: list[list[bool]] = []
    threads = [threading.Thread(target=lambda: answers.append(task.wait(30))) for _ in range(8)]
    for thread in threads:
        thread.start()
    ns.abort([held])
    for thread in threads:
        thread.join()
    assert answers == [[True]] * 8


INTERRUPTED = """
    import os, signal, sys, threading, time
    import kvdepot

    def interrupt():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    depot = kvdepot.open("Cache", {"cache": {"capacity": "1MiB"}, "socket": "off"})
    ns = depot.namespace("m", "f", 1)
    key = bytes(32)
    held = ns.reserve([key], 5)
    task = ns.put([key], [b"bytes"])
    threading.Thread(target=interrupt).start()
    try:
        {wait}
    except KeyboardInterrupt:
        print("interrupted")
    ns.abort(held)
    print(task.wait(30), ns.prefix([key]))
"""


@pytest.mark.parametrize("wait", ["task.wait()", "task.wait(600)", "task.wait_released()"])
def test_ctrl_c_ends_a_wait(child: Any, wait: str) -> None:
    process = child(INTERRUPTED.replace("{wait}", wait))
    out, error = process.communicate(timeout=60)
    lines = out.splitlines()
    assert lines[0] == "interrupted", error
    # The task went on.
    assert lines[1] == "[True] 1"


def test_ctrl_c_ends_the_wait_for_a_lock(depots: Any, child: Any) -> None:
    depots.open("Dax")
    program = """
        import sys
        import kvdepot
        settings = {"dax": {"path": sys.argv[1]}, "lock_wait": "1h", "socket": "off"}
        try:
            print("opening", flush=True)
            kvdepot.open("Dax", settings)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = child(program, depots.folder / "arena")
    assert process.stdout is not None
    assert process.stdout.readline() == "opening\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    process.kill()
    process.wait()


def test_a_close_ends_what_waits_for_a_writer(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, pending: Any
) -> None:
    task, held = pending
    depot.close()
    assert task.wait(0) == [False]
    assert task.errors == ["closed"]
    ns.abort([held])


def test_a_task_is_waited_for_after_the_close(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(50)
    put = ns.put(names, [bytes(100_000)] * 50)
    out = [bytearray(100_000) for _ in names]
    get = ns.get(names, out)
    depot.close()
    assert put.done
    assert get.done
    assert put.wait(0) == [True] * 50
    assert len(get.wait(0)) == 50
    assert set(put.errors) == {None}


def test_a_closed_depot_refuses(depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(1)
    ns.put(names, [b"x"]).wait(30)
    pins = ns.pin(names)
    held = [one for one in ns.reserve(keys(1), 1) if one]
    depot.close()
    depot.close()
    calls: list[Callable[[], object]] = [
        lambda: ns.prefix(names),
        lambda: ns.contains(names),
        lambda: ns.where(names),
        lambda: ns.put(names, [b"x"]),
        lambda: ns.get(names, [bytearray(1)]),
        lambda: ns.remove(names),
        lambda: ns.clear(),
        lambda: ns.reserve(names, 1),
        lambda: ns.commit(held, [[bytes(16)]]),
        lambda: ns.pin(names),
        lambda: depot.namespace("m", "f", 1),
    ]
    for call in calls:
        with pytest.raises(kvdepot.ClosedError, match="closed"):
            call()
    # What only gives back still works, and so does looking.
    ns.unpin(pins)
    ns.abort(held)
    assert depot.tiers == ["Cache", "Dax"]
    assert depot.stats()["put_acknowledged_blocks"] == 1
    assert depot.pending_bytes() == 0
    assert depot.drain(1)


def test_a_drain_ends_in_time(depots: Any, keys: Keys) -> None:
    depot = depots.open(cache="256MiB", dax="256MiB", write_back_depth="256MiB")
    ns = depot.namespace("m", "f", 1)
    late = False
    for _ in range(20):
        task = ns.put(keys(4), [bytes(16 << 20)] * 4)
        task.wait_released(30)
        # The far tier has had no time for 64 MiB, unless this thread slept just now.
        late = not depot.drain(0)
        assert late or depot.pending_bytes() == 0
        assert depot.drain(60)
        assert depot.pending_bytes() == 0
        assert task.wait(30) == [True] * 4
        if late:
            break
    assert late


AT_EXIT = """
    import sys
    import kvdepot

    depot = kvdepot.open("Cache|Dax", {
        "dax": {"path": sys.argv[1]}, "cache": {"capacity": "32MiB"}, "socket": "off",
    })
    ns = depot.namespace("m", "f", 1)
    for number in range(50):
        # Neither the tasks nor the buffers are kept.
        ns.put([number.to_bytes(32, "little")], [bytearray([number]) * 300_000])
    print(depot.socket)
"""


def test_the_end_of_the_interpreter_is_a_close(depots: Any, child: Any) -> None:
    depots.open("Dax").close()
    process = child(AT_EXIT, depots.folder / "arena")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert error == ""
    ns = depots.open("Dax").namespace("m", "f", 1)
    names = [number.to_bytes(32, "little") for number in range(50)]
    out = [bytearray(300_000) for _ in names]
    assert all(ns.get(names, out).wait(30))
    assert [one[0] for one in out] == list(range(50))


def test_the_end_of_the_interpreter_with_threads_that_wait(child: Any) -> None:
    program = """
        import threading, time
        import kvdepot
        depot = kvdepot.open("Cache", {"cache": {"capacity": "1MiB"}, "socket": "off"})
        ns = depot.namespace("m", "f", 1)
        held = ns.reserve([bytes(32)], 5)
        task = ns.put([bytes(32)], [bytearray(5)])
        threading.Thread(target=task.wait, daemon=True).start()
        time.sleep(0.2)
        ns.abort(held)
    """
    process = child(program)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def test_threads_share_a_depot(ns: kvdepot.Namespace) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(40):
            names = [bytes([number, turn, i]) + bytes(29) for i in range(4)]
            blocks = [bytes([number, turn, i]) * 5000 for i in range(4)]
            if not all(ns.put(names, blocks).wait(30)):
                failures.append("put")
            out = [bytearray(15_000) for _ in names]
            if not all(ns.get(names, out).wait(30)) or out != blocks:
                failures.append("get")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
