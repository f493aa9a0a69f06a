"""One owner: forks, second openers, owners that die, the default arena."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvdepot
import pytest
from hosts import until

Keys = Callable[[int], list[bytes]]

OWNER = """
    import sys
    import kvdepot
    depot = kvdepot.open("Cache|Dax", {
        "dax": {"path": sys.argv[1], "capacity": "32MiB"},
        "cache": {"capacity": "8MiB"}, "socket": sys.argv[1] + ".sock",
    })
    ns = depot.namespace("m", "f", 1)
    print(all(ns.put([bytes([n]) * 32 for n in range(9)], [b"abc"] * 9).wait(30)), flush=True)
    sys.stdin.readline()
"""


def test_a_second_opener_learns_who_is_first(depots: Any, child: Any) -> None:
    owner = child(OWNER, depots.folder / "arena")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "True\n"
    with pytest.raises(kvdepot.LockedError) as caught:
        depots.open()
    error = caught.value
    assert error.pid == owner.pid
    assert error.host == socket.gethostname()
    assert error.path == str(depots.folder / "arena")
    assert str(owner.pid) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.pid) == (type(error), str(error), error.pid)
    start = time.monotonic()
    with pytest.raises(kvdepot.LockedError, match=r"lock_wait \(now 0\.3 s\)"):
        depots.open(lock_wait=0.3)
    assert time.monotonic() - start >= 0.3
    owner.kill()
    owner.wait()
    # Its lock died with it, and what it had acknowledged is there.
    ns = depots.open(lock_wait=10).namespace("m", "f", 1)
    names = [bytes([n]) * 32 for n in range(9)]
    assert ns.prefix(names) == 9
    out = [bytearray(3) for _ in names]
    assert all(ns.get(names, out).wait(30))


def test_a_waiting_opener_gets_its_turn(depots: Any, child: Any) -> None:
    owner = child(OWNER, depots.folder / "arena")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "True\n"
    assert owner.stdin is not None
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert depots.open(lock_wait="30s").recovery["blocks"] == 9
    assert owner.wait(30) == 0


def in_child(run: Callable[[], object]) -> str:
    """What a forked child says."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(run())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        said = answers.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_owns_nothing(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys
) -> None:
    names = keys(3)
    ns.put(names[:1], [b"abc"]).wait(30)
    pins = ns.pin(names[:1])
    held = [one for one in ns.reserve(names[1:2], 5) if one]
    task = ns.put(names[1:2], [b"bytes"])
    mover = kvdepot.attach(depot.socket or "")
    placements = [pin.placement for pin in pins if pin]
    calls: list[Callable[[], object]] = [
        lambda: ns.prefix(names),
        lambda: ns.put(names, [b"x"] * 3),
        lambda: ns.get(names[:1], [bytearray(3)]),
        lambda: ns.pin(names),
        lambda: ns.unpin(pins),
        lambda: ns.abort(held),
        lambda: ns.commit(held, [[bytes(16)]]),
        lambda: ns.clear(),
        lambda: depot.namespace("m", "f", 1),
        lambda: depot.stats(),
        lambda: depot.pending_bytes(),
        lambda: depot.drain(1),
        lambda: task.wait(1),
        lambda: mover.load(placements, [bytearray(3)]),
        lambda: mover.media,
    ]
    for number, call in enumerate(calls):
        said = in_child(call)
        assert said.startswith("ClosedError: "), (number, said)
        assert "forked" in said
    # These do nothing, in no time.
    assert in_child(depot.close) == "None"
    assert in_child(mover.close) == "None"
    assert in_child(pins.clear) == "None"
    assert "another process" in in_child(lambda: repr(depot))
    # The parent goes on as if nothing had been.
    assert ns.prefix(names) == 1
    assert depot.stats()["tiers"]["Cache"]["pinned_blocks"] == 1
    ns.abort(held)
    assert task.wait(30) == [True]
    out = bytearray(3)
    job = mover.load(placements, [out])
    assert job.wait(30)
    assert out == b"abc"
    mover.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own(depot: kvdepot.Depot, keys: Keys, tmp_path: Path) -> None:
    names = keys(1)

    def own() -> object:
        settings = {"cache": {"capacity": "1MiB"}, "socket": str(tmp_path / "child")}
        with kvdepot.open("Cache", settings) as mine:
            ns = mine.namespace("m", "f", 1)
            return ns.put(names, [b"x"]).wait(30) + [ns.prefix(names)]

    assert in_child(own) == "[True, 1]"


def test_the_default_arena(child: Any, tmp_path: Path) -> None:
    program = """
        import sys
        import kvdepot
        depot = kvdepot.open("Cache|Dax", {"dax": {"capacity": "8MiB"}, "lock_wait": "100ms"})
        print(depot.path)
        print(depot.description)
        print(depot.tiers, flush=True)
        sys.stdin.readline()
    """
    first = child(program)
    assert first.stdout is not None
    path = first.stdout.readline().strip()
    assert path.startswith(str(tmp_path / "cache"))
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    description = first.stdout.readline()
    assert "Cache" in description
    assert "10 % of the allowed memory" in description
    assert f"Dax 8 MiB at {path}" in description
    assert first.stdout.readline() == "['Cache', 'Dax']\n"
    second = child(program)
    out, error = second.communicate("\n", timeout=60)
    assert out.splitlines()[0] == "None"
    assert f"only: {path} is in use by process {first.pid}" in out.splitlines()[1]
    assert out.splitlines()[2] == "['Cache']"
    assert f"process {first.pid}" in error
    first.communicate("\n", timeout=60)


def test_instances_have_arenas_of_their_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dax": {"capacity": "8MiB"}, "cache": {"capacity": "1MiB"}}
    with (
        kvdepot.open("Cache|Dax", settings | {"instance": "a"}) as a,
        kvdepot.open("Cache|Dax", settings | {"instance": "b"}) as b,
    ):
        assert a.tiers == b.tiers == ["Cache", "Dax"]
        assert a.path != b.path
        assert a.socket != b.socket


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_depot_leaves_no_thread(depots: Any) -> None:
    def threads() -> set[tuple[str, str]]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            # Others' may end meanwhile.
            with contextlib.suppress(OSError):
                found.add((task.name, (task / "comm").read_text().strip()))
        return {(task, name) for task, name in found if name.startswith("kvdepot")}

    # What other tests have dropped starts none later.
    gc.collect()
    before = threads()
    depot = depots.open()
    assert threads() - before
    depot.close()
    # The system shows one for a moment after it was joined.
    until("its threads are gone", lambda: not threads() - before)


def test_a_dropped_depot_is_closed(depots: Any) -> None:
    settings = depots.settings("Dax")
    ns = kvdepot.open("Dax", settings).namespace("m", "f", 1)
    with pytest.raises(kvdepot.LockedError) as caught:
        kvdepot.open("Dax", settings)
    assert caught.value.pid == os.getpid()
    del ns
    kvdepot.open("Dax", settings).close()
