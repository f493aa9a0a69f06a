"""Workers move bytes for an owner in another process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvdepot
import numpy as np
import pytest

Keys = Callable[[int], list[bytes]]


@pytest.fixture
def mover(depot: kvdepot.Depot) -> Iterator[kvdepot.Mover]:
    assert depot.socket is not None
    with kvdepot.attach(depot.socket) as mover:
        yield mover


def placements(held: list[Any]) -> list[bytes]:
    return [one.placement for one in held if one is not None]


WORKER = """
    import pickle, sys
    import kvdepot
    import numpy as np

    socket = sys.argv[1]
    with kvdepot.attach(socket, lanes=2) as mover:
        verb, placements, rows = pickle.load(sys.stdin.buffer)
        memory = np.zeros((4, 8, 1000), np.uint8)
        if verb == "store":
            memory[:] = np.arange(8)[:, None] + np.arange(4)[:, None, None] * 10
        base = memory.ctypes.data
        ranges = [(base + layer * 8000, 1000, 1000) for layer in range(4)]
        spans = kvdepot.Spans(ranges, rows, memory)
        job = getattr(mover, verb)(placements, spans)
        assert job.wait(30), job.error
        sys.stdout.buffer.write(pickle.dumps((job.checksums, job.results, memory.tobytes())))
"""


def work(child: Any, socket: str, verb: str, held: list[bytes], rows: list[list[int]]) -> Any:
    import pickle

    process = child(WORKER, socket)
    out, error = process.communicate(pickle.dumps((verb, held, rows)), timeout=60)
    assert process.returncode == 0, error.decode()
    return pickle.loads(out)


@pytest.fixture
def worker(tmp_path: Path, child: Any) -> Callable[..., subprocess.Popen[bytes]]:
    """Children whose pipes carry bytes."""

    def start(program: str, *arguments: object, **options: Any) -> Any:
        return child(program, *arguments, text=False, **options)

    return start


def test_a_process_stores_and_another_loads(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys, worker: Any
) -> None:
    names = keys(3)
    rows = [[0, 1], [5, 3], [7, 7]]
    reserved = [one for one in ns.reserve(names, 8000) if one]
    sums, results, memory = work(worker, depot.socket, "store", placements(reserved), rows)
    assert results == [True] * 3
    assert ns.commit(reserved, [[one] for one in sums]) == [True] * 3
    source = np.frombuffer(memory, np.uint8).reshape(4, 8, 1000)
    plain = [bytearray(8000) for _ in names]
    assert all(ns.get(names, plain).wait(30))
    assert [bytes(one) for one in plain] == [source[:, row].tobytes() for row in rows]
    pins = ns.pin(names[:2])
    elsewhere = [[6, 2], [-1, 0]]
    _, results, memory = work(worker, depot.socket, "load", placements(pins), elsewhere)
    ns.unpin(pins, served=True)
    assert results == [True, True]
    target = np.frombuffer(memory, np.uint8).reshape(4, 8, 1000)
    assert (target[:, [6, 2, 0]] == source[:, [0, 1, 3]]).all()
    assert not target[:, [1, 3, 4, 5, 7]].any()


def test_a_job_tells_what_it_did(ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys) -> None:
    reserved = [one for one in ns.reserve(keys(2), 100_000) if one]
    job = mover.store(placements(reserved), [bytes(100_000), bytes(100_000)])
    assert job.wait() is True
    assert job.done
    assert job.bytes == 200_000
    assert 0 < job.seconds < 300
    assert job.error is None
    assert job.results == [True, True]
    assert [len(one or b"") for one in job.checksums] == [16, 16]
    # The same bytes under another key have another checksum.
    assert job.checksums[0] != job.checksums[1]


def test_what_is_asked_for_aside_is_moved_though_nobody_has_the_mover_any_more(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    assert depot.socket is not None
    names = keys(100)
    for name in names:
        (reserved,) = ns.reserve([name], 50_000)
        job = kvdepot.attach(depot.socket, lanes=1).store(
            placements([reserved]), [bytes(50_000)], background=True
        )
        assert job.wait(30)
        assert (job.whole, job.rejected, job.error) == (True, False, None)
        assert ns.commit([reserved], [job.checksums]) == [True]
    assert ns.prefix(names) == 100


def test_what_is_asked_of_a_closed_mover_aside_is_refused(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    assert depot.socket is not None
    held = placements([one for one in ns.reserve(keys(1), 100) if one])
    mover = kvdepot.attach(depot.socket)
    wrong = mover.store(held, [bytes(99)], background=True)
    assert wrong.wait(30)
    assert wrong.rejected
    assert "100 bytes" in (wrong.error or "")
    assert (wrong.results, wrong.whole) == ([False], False)
    mover.close()
    late = mover.store(held, [bytes(100)], background=True)
    assert late.wait(30)
    assert late.rejected
    assert late.error == "the mover (connection to the server) is closed; attach again"


def test_rotten_bytes_are_false(depots: Any, keys: Keys) -> None:
    depot = depots.open("Dax")
    ns = depot.namespace("m", "f", 1)
    names = keys(2)
    ns.put(names, [b"a" * 5000, b"b" * 5000]).wait(30)
    with kvdepot.attach(depot.socket) as mover:
        pins = ns.pin(names)
        place = mover.locate(placements(pins))[0]
        assert place is not None
        medium, offset, length = place
        assert (medium, length) == (0, 5000)
        view = mover.media[medium]
        assert view[offset : offset + 5000] == b"a" * 5000
        view[offset + 1234] ^= 0x10
        job = mover.verify(placements(pins))
        assert job.wait(30)
        assert job.results == [False, True]
        out = [bytearray(5000), bytearray(5000)]
        job = mover.load(placements(pins), out)
        assert job.wait(30)
        assert job.results == [False, True]
        assert job.corrupt == [True, False]
        assert job.checksums[0] is None
        assert job.error is not None
        assert "checksum" in job.error
        assert out[1] == b"b" * 5000
        ns.unpin(pins)
        task = ns.get(names, out)
        assert task.wait(30) == [False, True]
        assert task.errors == ["corrupt", None]
        assert ns.contains(names) == [False, True]
        assert depot.stats()["tiers"]["Dax"]["corrupt_blocks"] == 1
        assert ns.put(names[:1], [b"a" * 5000]).wait(30) == [True]
        assert all(ns.get(names, out).wait(30))
        assert out[0] == b"a" * 5000


def test_a_device_writes_and_the_host_hashes(
    depot: kvdepot.Depot, mover: kvdepot.Mover, keys: Keys
) -> None:
    ns = depot.namespace("m", "f", 1)
    names = keys(2)
    reserved = [one for one in ns.reserve(names, 5000) if one]
    for number, place in enumerate(mover.locate(placements(reserved))):
        assert place is not None
        medium, offset, length = place
        assert offset % 4096 == 0
        assert length == 5000
        mover.media[medium][offset : offset + length] = bytes([number + 1]) * length
    job = mover.digest(placements(reserved))
    assert job.wait(30)
    assert ns.commit(reserved, [[one] for one in job.checksums if one]) == [True, True]
    out = [bytearray(5000), bytearray(5000)]
    assert all(ns.get(names, out).wait(30))
    assert out == [b"\x01" * 5000, b"\x02" * 5000]


def test_a_reader_cannot_write(depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(2)
    ns.put(names[:1], [b"abc"]).wait(30)
    with kvdepot.attach(depot.socket or "", write=False) as mover:
        assert [view.readonly for view in mover.media] == [True, True]
        out = bytearray(3)
        job = mover.load(placements(ns.pin(names[:1])), [out])
        assert job.wait(30)
        assert out == b"abc"
        reserved = [one for one in ns.reserve(names[1:], 3) if one]
        with pytest.raises(
            kvdepot.InputError, match=r"write: false .* without `write` can only load"
        ):
            mover.store(placements(reserved), [b"abc"])


def test_placements_of_an_owner_that_is_gone(depots: Any, keys: Keys) -> None:
    first = depots.open()
    ns = first.namespace("m", "f", 1)
    names = keys(2)
    ns.put(names, [b"abc"] * 2).wait(30)
    stale = placements(ns.pin(names[:1]))
    first.close()
    second = depots.open()
    ns = second.namespace("m", "f", 1)
    with kvdepot.attach(second.socket) as mover:
        fresh = ns.pin(names[1:])
        out = [bytearray(3), bytearray(3)]
        job = mover.load(stale + placements(fresh), out)
        assert job.wait(30)
        assert job.results == [False, True]
        assert job.corrupt == [False, False], "nothing is known about its bytes"
        assert job.error is not None
        assert "another depot" in job.error
        assert mover.locate(stale) == [None]
        assert mover.verify(stale).results == [False]


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(kvdepot.Error, match=str(tmp_path)):
        kvdepot.attach(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(kvdepot.Error, match=str(tmp_path)):
        kvdepot.attach(str(tmp_path / "file"))


def test_a_listener_that_does_not_answer(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "mute")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        with pytest.raises(kvdepot.Error, match=f"{path}.*no response"):
            kvdepot.attach(path)


def test_a_closed_mover_refuses(depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys) -> None:
    mover = kvdepot.attach(f"unix:{depot.socket}")  # as open has it
    reserved = [one for one in ns.reserve(keys(1), 1 << 20) if one]
    job = mover.store(placements(reserved), [bytes(1 << 20)])
    mover.close()
    mover.close()
    assert job.done
    assert job.results == [True]
    with pytest.raises(kvdepot.ClosedError, match=r"the mover .* is closed"):
        mover.store(placements(reserved), [bytes(1 << 20)])


def test_a_mover_outlives_the_depot(depots: Any, keys: Keys) -> None:
    depot = depots.open()
    ns = depot.namespace("m", "f", 1)
    names = keys(1)
    ns.put(names, [b"abc"]).wait(30)
    held = placements(ns.pin(names))
    mover = kvdepot.attach(depot.socket)
    depot.close()
    out = bytearray(3)
    # The mapping stays; what it holds now is only trusted because it verifies.
    job = mover.load(held, [out])
    assert job.wait(30)
    assert job.results == [True]
    mover.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([b""], "placements"),
        ([bytes(200)], "placements"),
        ([None], r"placements\[0\]"),
        (["x"], r"placements\[0\]"),
        ([7], r"placements\[0\]"),
    ],
)
def test_placements_that_are_none(mover: kvdepot.Mover, wrong: Any, words: str) -> None:
    for call in (
        lambda: mover.store(wrong, [b"x"]),
        lambda: mover.load(wrong, [bytearray(1)]),
        lambda: mover.digest(wrong),
        lambda: mover.verify(wrong),
        lambda: mover.locate(wrong),
    ):
        with pytest.raises(kvdepot.InputError, match=words):
            call()


def test_changed_placements_never_reach_beyond_the_medium(
    ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys, source: Any
) -> None:
    names = keys(1)
    ns.put(names, [b"a" * 1000]).wait(30)
    (good,) = placements(ns.pin(names))
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(source.randint(1, 3)):
            bad[source.randrange(len(bad))] ^= 1 << source.randrange(8)
        out = bytearray(1000)
        try:
            job = mover.load([bad], [out])
        except kvdepot.Error:
            continue
        assert job.wait(30)
        # Some bytes of a placement mean nothing; what is delivered is the block all the same.
        assert job.results == [False] or out == b"a" * 1000


def test_lengths_must_fit(ns: kvdepot.Namespace, mover: kvdepot.Mover, keys: Keys) -> None:
    names = keys(1)
    ns.put(names, [b"a" * 1000]).wait(30)
    held = placements(ns.pin(names))
    with pytest.raises(kvdepot.InputError, match="1000 bytes"):
        mover.load(held, [bytearray(999)])
    with pytest.raises(kvdepot.InputError, match="2 buffers for 1 keys"):
        mover.load(held, [bytearray(1000), bytearray(1000)])
    with pytest.raises(kvdepot.InputError, match="read-only"):
        mover.load(held, [bytes(1000)])


@pytest.mark.parametrize("lanes", [0, 257])
def test_lanes_of_a_mover(depot: kvdepot.Depot, lanes: int) -> None:
    with pytest.raises(kvdepot.Error, match=f"lanes.*{lanes}"):
        kvdepot.attach(depot.socket or "", lanes=lanes)


def test_memory_can_be_made_present(mover: kvdepot.Mover) -> None:
    address = np.frombuffer(mover.media[0], np.uint8).ctypes.data

    def present() -> int:
        ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                ours = int(span[1], 16) <= address < int(span[2], 16)
            elif ours and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
        raise AssertionError("it is not mapped")

    # What of the file is in memory already is the system's choice.
    before = present()
    mover.prefault(wait=True)
    assert present() - before > mover.media[0].nbytes * 0.9
    mover.prefault()  # in the background, for a second time: nothing left to do
    mover.close()
    with pytest.raises(kvdepot.ClosedError):
        mover.prefault(wait=True)


def test_views_outlive_their_mover(depot: kvdepot.Depot) -> None:
    mover = kvdepot.attach(depot.socket or "")
    views = mover.media
    mover.close()
    del mover
    assert len(views[0]) == 32 << 20
    assert views[0][0] == 0
