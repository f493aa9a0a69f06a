"""A depot that the command serves, used from Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kvdepot
import pytest

LENGTH = 70_000


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in numbers]


def content(number: int) -> bytes:
    return bytes([number % 251]) * LENGTH


class Service:
    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        arena = f"dax.path={folder / 'arena'}"
        options = ["-o", arena, "-o", "dax.capacity=16MiB", "-o", "cache.capacity=4MiB"]
        self.command = [sys.executable, "-m", "kvdepot._cli", "serve", "Cache|Dax", *options]
        self.command += ["--socket", str(self.socket)]
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving Cache 4 MiB | Dax 16 MiB")
        return process

    def open(self) -> kvdepot.Depot:
        return kvdepot.open(f"unix:{self.socket}", {"lanes": 2})


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.process.kill()
    service.process.wait()


def namespace(depot: kvdepot.Depot) -> kvdepot.Namespace:
    return depot.namespace(model="m", dtype="float16", block_tokens=16)


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
        deadline = time.monotonic() + 30
        while ns.prefix(keys(*range(20))) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
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
        ("unix:/x", {"cache": {"capacity": "1GiB"}}, ["cache", "lanes alone"]),
        ("unix:/x", {"lanes": 0}, ["lanes"]),
    ],
)
def test_wrong_arguments_are_named(
    target: str, settings: dict[str, object] | None, words: list[str]
) -> None:
    with pytest.raises(kvdepot.ConfigError) as caught:
        kvdepot.open(target, settings)
    assert all(word in str(caught.value) for word in words)


def test_nobody_there_is_an_error_that_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(kvdepot.Error, match=r"nobody\.sock"):
        kvdepot.open(f"unix:{tmp_path / 'nobody.sock'}")
