"""The transfer engine from Python: what its caller may rely on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import kvdepot
import numpy as np
import pytest
from hosts import until
from kvdepot.transfer import STATUSES, Engine, Remote, Task

SIZE = 1 << 20

PEER = """
import sys
from kvdepot.transfer import Engine

home = bytearray(bytes(range(256)) * (int(sys.argv[1]) // 256))
with Engine() as engine:
    with engine.publish("home", [home], "both"):
        print(engine.address, flush=True)
        for line in sys.stdin:
            print(home.hex() if line == "show\\n" else "", flush=True)
"""


class Peer:
    """Another process that has published a buffer under the name home."""

    def __init__(self, size: int = SIZE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def show(self) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("show\n")
        self.process.stdin.flush()
        return bytes.fromhex(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.close()


@pytest.fixture(params=[True, False], ids=["local", "connections"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(listen=None, local=request.param) as one:
        yield one


def test_what_is_written_to_another_process_is_there_and_comes_back(
    engine: Engine, peer: Peer
) -> None:
    memory = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    remote = engine.open(peer.address, "home")
    assert (remote.nbytes, remote.rights, remote.lasts) == (SIZE, "both", None)
    with engine.register([memory]):
        at = memory.ctypes.data
        step = 10_000
        pieces = [(start, min(step, SIZE - start)) for start in range(0, SIZE, step)]
        writes = [("write", at + start, remote, start, size) for start, size in reversed(pieces)]
        task = engine.submit(writes)
        assert task.wait(timeout=30), task.errors
        assert peer.show() == memory.tobytes()
        wanted = memory.tobytes()
        memory[:] = 0
        assert engine.run([("read", memory, remote, 0, SIZE)]).poll() is True
        assert memory.tobytes() == wanted


def test_columns_of_arrays_are_a_batch_without_a_loop(engine: Engine, peer: Peer) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    remote = engine.open(peer.address, b"home")
    with engine.register([memory]):
        offset = np.arange(0, SIZE, 256, dtype=np.uint64)[::-1]
        task = engine.submit(
            op="read",
            local=memory.ctypes.data + offset.astype(np.int64),
            remote=remote,
            offset=offset,
            length=256,
        )
        assert task.wait(30)
        assert len(task) == SIZE // 256
        assert task.statuses == bytes([1]) * len(task)
        assert memory.tobytes() == bytes(range(256)) * (SIZE // 256)


def test_each_request_has_a_status_of_its_own(engine: Engine, peer: Peer) -> None:
    memory = bytearray(1000)
    remote = engine.open(peer.address, "home")
    with engine.register([memory]):
        requests = [
            ("read", memory, remote, 0, 10),
            ("read", memory, remote, SIZE, 1),
            ("read", 4096, remote, 0, 10),
            ("write", memory, remote, 500, 10),
        ]
        task = engine.submit(requests)
        assert task.wait(30) is False
        assert task.poll() is False
        assert task.done
        assert task.errors == {1: "range", 2: "local"}
        assert [task.status(index) for index in range(4)] == ["done", "range", "local", "done"]
        assert [STATUSES[byte] for byte in task.statuses] == ["done", "range", "local", "done"]
        with pytest.raises(kvdepot.InputError, match="index"):
            task.status(4)


def test_tasks_are_awaited_and_call_back(engine: Engine, peer: Peer) -> None:
    memory = bytearray(SIZE)
    remote = engine.open(peer.address, "home")
    called = threading.Event()
    seen: list[Task] = []

    def note(task: Task) -> None:
        seen.append(task)
        called.set()

    async def both() -> list[bool]:
        one = engine.submit([("read", memory, remote, 0, SIZE)], callback=note)
        other = engine.submit([("read", memory, remote, 1, SIZE)])
        return [await one, await other]

    with engine.register([memory]):
        assert asyncio.run(both()) == [True, False]
        assert called.wait(10)
        assert seen[0].done
        late: list[Task] = []
        seen[0].add_done_callback(late.append)
        assert late == seen


def test_a_stopped_peer_costs_a_task_its_time_and_touches_nothing_later(peer: Peer) -> None:
    memory = bytearray(SIZE)
    with Engine(listen=None, local=False) as engine, engine.register([memory]):
        remote = engine.open(peer.address, "home")
        os.kill(peer.process.pid, signal.SIGSTOP)
        task = engine.submit([("read", memory, remote, 0, SIZE)], timeout=0.5)
        with pytest.raises(kvdepot.TimeoutError):
            task.wait(0.05)
        assert task.wait(60) is False
        assert task.errors == {0: "timed_out"}
        memory[:] = bytes(SIZE)
        os.kill(peer.process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert memory == bytes(SIZE)
        assert engine.run([("read", memory, remote, 0, 256)]).poll() is True


def test_a_task_is_cancelled(peer: Peer) -> None:
    memory = bytearray(SIZE)
    with Engine(listen=None, local=False) as engine, engine.register([memory]):
        remote = engine.open(peer.address, "home")
        os.kill(peer.process.pid, signal.SIGSTOP)
        task = engine.submit([("read", memory, remote, 0, SIZE)])
        engine.cancel(task)
        assert task.done
        assert task.errors == {0: "cancelled"}
        os.kill(peer.process.pid, signal.SIGCONT)


def test_many_ranges_are_registered_at_once(engine: Engine, peer: Peer) -> None:
    memory = np.zeros(100_000 * 8, dtype=np.uint8)
    ranges = [(memory.ctypes.data + 8 * number, 8) for number in range(100_000)]
    with engine.register(ranges):
        remote = engine.open(peer.address, "home")
        assert engine.run([("read", ranges[-1][0], remote, 0, 8)]).poll() is True
    assert memory[-8:].tobytes() == bytes(range(8))


def test_what_a_batch_uses_is_kept_until_it_is_over(peer: Peer) -> None:
    class Held(bytearray):
        """A buffer that can be watched."""

    with Engine(listen=None, local=False) as engine:
        remote = engine.open(peer.address, "home")
        memory = Held(SIZE)
        watched = weakref.ref(memory)
        registered = engine.register([memory])
        os.kill(peer.process.pid, signal.SIGSTOP)
        task = engine.submit([("read", memory, remote, 0, SIZE)], timeout=600)
        registered.close()
        del memory, registered
        gc.collect()
        assert watched() is not None
        os.kill(peer.process.pid, signal.SIGCONT)
        task.wait()

        def is_gone() -> bool:
            gc.collect()
            return watched() is None

        until("gone", is_gone)


def test_what_is_withdrawn_is_unknown(engine: Engine) -> None:
    memory = bytearray(100)
    with Engine() as other:
        assert other.address is not None
        with other.grant([bytearray(b"x" * 100)]) as published:
            remote: Remote = engine.open(other.address, published.name)
            assert remote.rights == "read"
            with engine.register([memory]):
                assert engine.run([("read", memory, remote, 0, 100)]).poll() is True
                published.close()
                assert engine.run([("read", memory, remote, 0, 100)]).errors == {0: "unknown"}
        with pytest.raises(kvdepot.Error, match="nothing is published"):
            engine.open(other.address, published.name)


def test_who_has_another_token_is_refused() -> None:
    with Engine(token="right") as target, Engine(listen=None, token="wrong") as other:
        assert target.address is not None
        target.publish("home", [bytearray(8)])
        with pytest.raises(kvdepot.Error):
            other.open(target.address, "home")
        assert target.stats()["refused_greetings"] == 1
    with pytest.raises(kvdepot.ConfigError, match="allow_unauthenticated"):
        Engine("0.0.0.0:0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": 0}, "streams"),
        ({"slice_size": "1KiB"}, "slice_size"),
        ({"slice_size": "much"}, "slice_size"),
        ({"tail_merge": "1GiB"}, "tail_merge"),
        ({"timeout": "0s"}, "timeout"),
        ({"stream": 2}, "streams"),
        ({"rdma": ["no_such_device"]}, "rdma"),
        ({"tls_key": "key.pem", "tls_ca": "ca.pem"}, "tls_certificate"),
        ({"tls_certificate": "no", "tls_key": "such", "tls_ca": "file"}, "tls_ca"),
        ({"tls_name": "depot.example"}, "tls_name"),
    ],
)
def test_wrong_options_name_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(kvdepot.ConfigError, match=message):
        Engine(**options)  # type: ignore[arg-type]


def test_wrong_requests_are_refused_before_anything_moves(engine: Engine, peer: Peer) -> None:
    remote = engine.open(peer.address, "home")
    memory = bytearray(8)
    with engine.register([memory]):
        for wrong in [
            [("rea", memory, remote, 0, 8)],
            [("read", memory, remote, -1, 8)],
            [("read", memory, "home", 0, 8)],
            [("read", memory, remote, 0)],
            [7],
        ]:
            with pytest.raises(kvdepot.InputError):
                engine.submit(wrong)  # type: ignore[arg-type]
        with pytest.raises(kvdepot.InputError):
            engine.submit(op="read", local=[1, 2], remote=remote, offset=[0, 1, 2], length=1)
        with pytest.raises(kvdepot.InputError):
            engine.submit([("read", memory, remote, 0, 8)], priority="soon")  # type: ignore[arg-type]
        with pytest.raises(kvdepot.InputError, match="not registered yet"):
            engine.register([memory])


def test_a_closed_engine_refuses_and_ends_what_is_under_way(peer: Peer) -> None:
    memory = bytearray(SIZE)
    engine = Engine(listen=None, local=False)
    registered = engine.register([memory])
    remote = engine.open(peer.address, "home")
    os.kill(peer.process.pid, signal.SIGSTOP)
    task = engine.submit([("read", memory, remote, 0, SIZE)])
    engine.close()
    assert task.wait() is False
    assert task.errors == {0: "closed"}
    for call in [
        lambda: engine.submit([("read", memory, remote, 0, 8)]),
        lambda: engine.open(peer.address, "home"),
        lambda: engine.register([bytearray(8)]),
    ]:
        with pytest.raises(kvdepot.ClosedError):
            call()
    engine.close()
    registered.close()
    os.kill(peer.process.pid, signal.SIGCONT)


def test_in_a_forked_child_it_is_closed(engine: Engine, peer: Peer) -> None:
    memory = bytearray(8)
    registered = engine.register([memory])
    remote = engine.open(peer.address, "home")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.submit([("read", memory, remote, 0, 8)])
        except kvdepot.ClosedError:
            status = 0
        engine.close()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.run([("read", memory, remote, 0, 8)]).poll() is True
    registered.close()


def test_submitting_columns_costs_a_request_next_to_nothing(peer: Peer) -> None:
    """No figure: that a million requests are taken at once."""
    memory = np.zeros(SIZE, dtype=np.uint8)
    count = 1_000_000
    with Engine(listen=None) as engine, engine.register([memory]):
        remote = engine.open(peer.address, "home")
        offset = np.random.default_rng(3).integers(0, SIZE, count).astype(np.uint64)
        local = offset + np.uint64(memory.ctypes.data)
        task = engine.submit(op="read", local=local, remote=remote, offset=offset, length=1)
        assert task.wait(60)
        assert len(task) == count
        more = {"local": np.append(local, local[:1]), "offset": np.append(offset, offset[:1])}
        with pytest.raises(kvdepot.InputError, match="1000000"):
            engine.submit(op="read", remote=remote, length=1, **more)
