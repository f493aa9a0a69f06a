"""A depot that the command serves, used from Python."""

from __future__ import annotations

import gc
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvdepot
import pytest
from helpers import ctrl_c
from hosts import until

LENGTH = 70_000


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in numbers]


def content(number: int) -> bytes:
    return bytes([number % 251]) * LENGTH


class Service:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.socket = folder / "s"
        arena = f"dax.path={folder / 'arena'}"
        self.command = [sys.executable, "-m", "kvdepot._cli", "serve", "Cache|Dax", "-o", arena]
        self.command += ["-o", "dax.capacity=16MiB", "-o", "cache.capacity=4MiB"]
        self.command += ["--socket", str(self.socket)]
        self.process = self.start(**options)

    def start(self, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, **options)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving Cache 4 MiB | Dax 16 MiB")
        return process

    def open(self, **settings: object) -> kvdepot.Depot:
        return kvdepot.open(f"unix:{self.socket}", {"lanes": 2, **settings})

    def stop(self) -> None:
        """Stop every thread of it, and wait until they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] != "T"
            for task in tasks.iterdir()
        ):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.process.kill()
    service.process.wait()


def namespace(depot: kvdepot.Depot) -> kvdepot.Namespace:
    return depot.namespace(model="m", dtype="float16", block_tokens=16)


@pytest.mark.parametrize("under", ["a shell", "nohup"])
def test_a_server_on_a_terminal_ends_with_it_but_under_nohup(tmp_path: Path, under: str) -> None:
    handler = signal.SIG_DFL if under == "a shell" else signal.SIG_IGN
    ours, terminal = pty.openpty()
    options = {"stdin": terminal, "preexec_fn": lambda: signal.signal(signal.SIGHUP, handler)}
    service = Service(tmp_path, **options)
    try:
        service.process.send_signal(signal.SIGHUP)
        if under == "nohup":
            status = Path(f"/proc/{service.process.pid}/status").read_text()
            ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
            assert int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)
            service.process.terminate()
        assert service.process.wait(60) == 0
        assert not service.socket.exists()
    finally:
        service.process.kill()
        service.process.wait()
        os.close(ours)
        os.close(terminal)


def test_a_served_depot_is_the_same_object(service: Service) -> None:
    with service.open() as depot:
        assert type(depot) is kvdepot.Depot
        assert depot.tiers == ["Cache", "Dax"]
        ns = namespace(depot)
        assert all(ns.put(keys(1, 2, 3), [content(n) for n in (1, 2, 3)]).wait(30))
        assert ns.prefix(keys(1, 2, 9)) == 2
        assert ns.contains(keys(9, 3)) == [False, True]
        buffers = [bytearray(LENGTH) for _ in range(3)]
        task = ns.get(keys(1, 9, 3), buffers)
        assert task.wait(30) == [True, False, True]
        assert task.errors == [None, "miss", None]
        assert (bytes(buffers[0]), bytes(buffers[2])) == (content(1), content(3))
        assert depot.drain(30)
        assert depot.stats()["put_acknowledged_blocks"] == 3
        pins = ns.pin(keys(1))
        with kvdepot.attach(depot.socket) as mover:
            into = bytearray(LENGTH)
            job = mover.load([pins[0].placement], [into])
            assert job.wait(30)
            assert job.results == [True]
            assert bytes(into) == content(1)
        ns.unpin(pins)
    with pytest.raises(kvdepot.ClosedError):
        ns.prefix(keys(1))


def test_blocks_come_back_with_the_next_service(service: Service) -> None:
    with service.open() as depot:
        ns = namespace(depot)
        assert all(ns.put(keys(*range(20)), [content(n) for n in range(20)]).wait(30))
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        assert ns.prefix(keys(0)) == 0
        assert ns.put(keys(50), [content(50)]).wait(30) == [False]
        service.process = service.start()
        until("all are back", lambda: ns.prefix(keys(*range(20))) == 20)
        buffers = [bytearray(LENGTH) for _ in range(20)]
        assert all(ns.get(keys(*range(20)), buffers).wait(30))
        assert [bytes(buffer) for buffer in buffers] == [content(n) for n in range(20)]


def test_a_forked_child_owns_nothing_of_it(service: Service) -> None:
    with service.open() as depot:
        ns = namespace(depot)
        assert ns.put(keys(1), [content(1)]).wait(30) == [True]
        child = os.fork()
        if child == 0:
            try:
                ns.prefix(keys(1))
            except kvdepot.ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert ns.prefix(keys(1)) == 1


@pytest.mark.parametrize(
    ("target", "settings", "words"),
    [
        ("unix:", None, ["pipeline", "unix:/run/kvdepot.sock"]),
        ("unix:/x", {"cache": {"capacity": "1GiB"}}, ["cache", "lanes and timeout"]),
        ("unix:/x", {"timeout": "0s"}, ["timeout", "1ms"]),
        ("unix:/x", {"lanes": 0}, ["lanes"]),
    ],
)
def test_wrong_arguments_are_named(
    target: str, settings: dict[str, object] | None, words: list[str]
) -> None:
    with pytest.raises(kvdepot.ConfigError) as caught:
        kvdepot.open(target, settings)
    assert all(word in str(caught.value) for word in words)


Call = Callable[[kvdepot.Depot, kvdepot.Namespace], object]
CALLS: list[Call] = [
    lambda depot, _: depot.drain(0.5),
    lambda depot, _: depot.stats(),
    lambda depot, _: depot.devices(),
    lambda depot, _: depot.namespaces(),
    lambda depot, _: namespace(depot),
    lambda _, ns: ns.prefix(keys(1)),
    lambda _, ns: ns.contains(keys(1)),
    lambda _, ns: ns.pin(keys(1)),
    lambda _, ns: ns.reserve(keys(8), 10),
    lambda _, ns: ns.blocks(),
]


@contextmanager
def gone_on_by_another_thread(service: Service) -> Iterator[None]:
    """Stops the service, and has a thread of Python let it go on while a call waits for it: a call
    that lets no other thread run is over after its time-out alone, without an answer."""
    service.stop()

    def go_on() -> None:
        time.sleep(0.05)
        service.go_on()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        service.go_on()


def test_a_stopped_service_stops_no_thread(service: Service) -> None:
    with service.open(timeout="60s") as depot:
        ns = namespace(depot)
        assert ns.put(keys(1), [content(1)]).wait(30) == [True]
        for call in CALLS:
            with gone_on_by_another_thread(service):
                call(depot, ns)
            assert depot.connected
        assert ns.prefix(keys(1)) == 1


def test_a_stopped_service_stops_no_call(service: Service) -> None:
    depots = [service.open(timeout="5s") for _ in CALLS]
    spaces = [namespace(depot) for depot in depots]
    assert spaces[0].put(keys(1), [content(1)]).wait(30) == [True]

    def ends(call: Call, depot: kvdepot.Depot, ns: kvdepot.Namespace) -> None:
        call(depot, ns)
        assert not depot.connected
        assert ns.prefix(keys(1)) == 0
        with pytest.raises(kvdepot.Error, match="no server is listening on this socket"):
            ns.clear()

    service.stop()
    try:
        with ThreadPoolExecutor(len(CALLS)) as threads:
            list(threads.map(ends, CALLS, depots, spaces))
    finally:
        service.go_on()
    for depot, ns in zip(depots, spaces, strict=True):
        until("connected again", lambda depot=depot: depot.connected)
        assert ns.prefix(keys(1)) == 1
        depot.close()


def test_a_task_ends_when_its_service_is_stopped(service: Service) -> None:
    with service.open(timeout="5s") as depot:
        ns = namespace(depot)
        assert ns.put(keys(1), [content(1)]).wait(30) == [True]
        service.stop()
        try:
            task = ns.get(keys(1), [bytearray(LENGTH)])
            assert task.wait(60) == [False]
        finally:
            service.go_on()


def test_pins_are_dropped_while_the_service_is_stopped(service: Service) -> None:
    with service.open(timeout="60s") as depot:
        ns = namespace(depot)
        many = keys(*range(20))
        assert all(ns.put(many, [content(n) for n in range(20)]).wait(30))
        pins = ns.pin(many)
        assert all(pins)
        service.stop()
        # Another call waits for its answer meanwhile, and longer than what is dropped after it.
        waiting = threading.Thread(target=ns.prefix, args=(many,))
        waiting.start()
        try:
            time.sleep(0.1)
            del pins
            gc.collect()
            assert waiting.is_alive()
        finally:
            service.go_on()
            waiting.join()

        def are_unpinned() -> bool:
            return not any(tier["pinned_blocks"] for tier in depot.stats()["tiers"].values())

        until("unpinned", are_unpinned)


def test_ctrl_c_ends_a_call_at_once(service: Service) -> None:
    with service.open(timeout="60s") as depot:
        ns = namespace(depot)
        assert ns.put(keys(1), [content(1)]).wait(30) == [True]
        service.stop()
        try:
            late = [ctrl_c(lambda call=call: call(depot, ns), limit=60) for call in CALLS]
        finally:
            service.go_on()
        # On a busy machine most may be later.
        assert min(late) < 1, late
        # The connection is sound, and what was granted to nobody is given back.
        assert ns.prefix(keys(1)) == 1
        assert depot.connected
        tiers = depot.stats()["tiers"].values()
        assert all(tier["pinned_blocks"] == 0 for tier in tiers)
        assert all(tier["reserved_blocks"] == 0 for tier in tiers)


def test_a_reservation_whose_commit_was_interrupted_can_be_ended(service: Service) -> None:
    with service.open() as depot:
        ns = namespace(depot)
        held = [one for one in ns.reserve(keys(1), 10) if one]
        assert held[0].placement
        service.stop()
        # Another call is first: the owner never hears of the commit.
        waiting = threading.Thread(target=ns.prefix, args=(keys(1),))
        waiting.start()
        try:
            time.sleep(0.1)
            ctrl_c(lambda: ns.commit(held, [[bytes(16)]]))
        finally:
            service.go_on()
            waiting.join()
        ns.abort(held)
        assert None not in ns.reserve(keys(1), 10)
        # Once it has heard of it, ending it again does no harm.
        held = [one for one in ns.reserve(keys(2), 10) if one]
        service.stop()
        try:
            ctrl_c(lambda: ns.commit(held, [[bytes(16)]]))
        finally:
            service.go_on()
        assert ns.commit(held, [[bytes(16)]]) == [False]
        ns.abort(held)


def test_a_signal_handler_may_close_the_depot_of_a_call_that_waits(service: Service) -> None:
    depot = service.open(timeout="60s")
    ns = namespace(depot)
    before = signal.signal(signal.SIGUSR1, lambda *_: depot.close())
    service.stop()
    try:
        going_on = threading.Timer(1, service.go_on)
        going_on.start()
        pressed = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        pressed.start()
        assert ns.prefix(keys(1)) == 0
        pressed.join()
        going_on.join()
    finally:
        service.go_on()
        signal.signal(signal.SIGUSR1, before)
    depot.close()
    with pytest.raises(kvdepot.ClosedError):
        ns.prefix(keys(1))


def test_attaching_to_a_stopped_service_notices_ctrl_c(service: Service) -> None:
    service.stop()
    try:
        ctrl_c(lambda: kvdepot.attach(str(service.socket)))
    finally:
        service.go_on()


FORKING = """
import os, sys, threading, time
import kvdepot

slowest, left, lock = 0.0, 2000, threading.Lock()

def attach():
    global slowest, left
    while left > 0 and slowest < 4:
        begun = time.monotonic()
        kvdepot.attach(sys.argv[1], lanes=1).close()
        with lock:
            left -= 1
            slowest = max(slowest, time.monotonic() - begun)

threads = [threading.Thread(target=attach) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
print(left <= 0, slowest < 4, slowest)
"""


def test_attaching_does_not_mind_other_threads_that_fork(service: Service) -> None:
    # An answer that comes during a fork cannot be used.
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(service.socket)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.startswith("True True"), ended.stdout


def test_locating_a_block_stops_no_thread_and_notices_ctrl_c(service: Service) -> None:
    with service.open() as depot:
        assert namespace(depot).put(keys(1), [content(1)]).wait(30) == [True]
        assert depot.drain(30)
        # It works for this owner still when there is another: that one is asked for each place.
        former = kvdepot.attach(str(service.socket))
    service.process.kill()
    service.process.wait()
    service.process = service.start()
    with service.open() as depot, kvdepot.attach(str(service.socket)) as mover, former:
        (pin,) = namespace(depot).pin(keys(1))
        assert pin is not None
        assert mover.locate([pin.placement]) == [None]
        service.stop()
        try:
            # Were no other thread let run, none could send the signal before the time-out.
            ctrl_c(lambda: mover.locate([pin.placement]))
        finally:
            service.go_on()


LOOK = """
import sys, time, kvdepot
depot = kvdepot.open(sys.argv[1])
for wanted in (False, True):
    print(depot.connected, flush=True)
    while depot.connected is not wanted:
        time.sleep(0.01)
print(depot.connected, flush=True)
"""


def test_losing_and_finding_a_service_is_said_once_each(service: Service) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-c", LOOK, f"unix:{service.socket}"],
        env={**os.environ, "KVDEPOT_LOG": "info"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert watching.stdout.readline() == "True\n"
    service.process.kill()
    service.process.wait()
    assert watching.stdout.readline() == "False\n"
    service.process = service.start()
    out, log = watching.communicate(timeout=60)
    assert (out, watching.returncode) == ("True\n", 0)
    lost = [line for line in log.splitlines() if "server disconnected" in line]
    found = [line for line in log.splitlines() if "server connected again" in line]
    assert len(lost) == 1
    assert len(found) == 1
    assert " WARN " in lost[0]
    assert " INFO " in found[0]


def test_nobody_there_is_an_error_that_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(kvdepot.Error, match=r"nobody\.sock"):
        kvdepot.open(f"unix:{tmp_path / 'nobody.sock'}")
