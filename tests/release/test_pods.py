"""What pods of a node impose on the server and its clients, without a cluster.

Numeric users, process namespaces, a read-only root file system, and memory limits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvdepot
import pytest
from served import SECONDS, client, served

NEEDED = ("unshare", "setpriv")
MISSING = [tool for tool in NEEDED if not shutil.which(tool)]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING), reason=f"needs root, and {', '.join(NEEDED)}"
)

UID, OTHER = 65_532, 1_000_680_000
SPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def user(uid: int) -> list[str]:
    """The command that becomes a user without a name and without rights."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]


@dataclass
class Package:
    """The package, and an interpreter, as every user finds them."""

    python: str
    env: dict[str, str]


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Package]:
    """The folder of this test may be closed to other users."""
    site = Path(f"/tmp/kvr-site-{os.getpid()}")
    shutil.copytree(Path(kvdepot.__file__).parent, site / "kvdepot")
    env = {"PYTHONPATH": str(site), "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for python in (sys.executable, "/usr/bin/python3"):
            run = subprocess.run(
                [*user(UID), python, "-m", "kvdepot", "--version"], env=os.environ | env,
                capture_output=True, check=False,
            )  # fmt: skip
            if run.returncode == 0:
                yield Package(python, env)
                return
        pytest.skip("no interpreter of CPython 3.11 or later is readable for other users")
    finally:
        shutil.rmtree(site)


def test_pods_of_one_user_share_a_depot_and_others_are_refused(package: Package) -> None:
    options = {"python": package.python, "env": package.env}
    with served(before=[*SPACE, *user(UID)], **options) as server:
        server.notification()
        address = f"unix:{server.socket}"
        assert client(address, [*SPACE, *user(UID)], **options) == "stored and loaded\n"
        refused = client(address, [*SPACE, *user(OTHER)], **options)
        assert "Permission denied" in refused or f"uid {OTHER} is not allowed" in refused


def test_the_platform_may_choose_the_user(package: Package) -> None:
    options = {"python": package.python, "env": package.env}
    with served(before=[*SPACE, *user(OTHER)], **options) as server:
        server.notification()
        address = f"unix:{server.socket}"
        assert client(address, [*SPACE, *user(OTHER)], **options) == "stored and loaded\n"


def test_a_group_may_share_the_depot(package: Package) -> None:
    options = {"python": package.python, "env": package.env}
    member = ["setpriv", f"--reuid={OTHER}", f"--regid={UID}", "--clear-groups"]
    with served("-o", "socket_mode=0660", before=[*SPACE, *user(UID)], **options) as server:
        server.notification()
        address = f"unix:{server.socket}"
        assert client(address, [*SPACE, *member], **options) == "stored and loaded\n"


HOLDS = """
import signal, sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="pod", dtype="float16", block_tokens=16)
held = ns.reserve(kvdepot.keys(range(96), block_tokens=16), 1 << 20, strict=True)
print(len(held), flush=True)
signal.pause()
"""
WANTS = """
import sys, time, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="other", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range(96), block_tokens=16)
begun = time.monotonic()
refused = 0
while True:
    try:
        ns.reserve(keys, 1 << 20, strict=True)
        break
    except kvdepot.FullError:
        refused += 1
        if refused == 1:
            print("full", flush=True)
        assert time.monotonic() - begun < 30
print("free", flush=True)
"""


def test_the_death_of_a_process_in_another_pod_frees_what_it_held() -> None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 5):
        pytest.skip("a kernel older than Linux 6.5 does not tell the end of a foreign process")
    with served(before=SPACE) as server:
        server.notification()

        def start(program: str) -> subprocess.Popen[str]:
            command = [*SPACE, sys.executable, "-c", program, f"unix:{server.socket}"]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        holds = start(HOLDS)
        assert holds.stdout
        assert holds.stdout.readline() == "6\n"
        wants = start(WANTS)
        assert wants.stdout
        assert wants.stdout.readline() == "full\n"
        # With it the only other process of its space.
        holds.send_signal(signal.SIGKILL)
        holds.wait(SECONDS)
        assert wants.stdout.readline() == "free\n"
        assert wants.wait(SECONDS) == 0


def test_the_root_file_system_may_be_read_only(tmp_path: Path) -> None:
    # The shell's last command becomes the server.
    script = (
        'mount --make-rprivate / && for folder in /tmp /dev/shm "$0"; do mount --bind "$folder" '
        '"$folder"; done && mount -o remount,bind,ro / && ! touch /kvr-written 2>/dev/null && '
        'exec "$@"'
    )
    before = ["unshare", "--mount", "sh", "-euc", script, str(tmp_path)]
    arena = ["-o", f"dax.path={tmp_path}/kv.arena", "-o", "dax.capacity=32MiB"]
    with served(*arena, before=before, pipeline="Cache|Dax") as server:
        assert server.notification() == {"READY": "1"}
        assert client(f"unix:{server.socket}") == "stored and loaded\n"
        assert server.end() == 0
    assert not Path("/kvr-written").exists()


@dataclass
class Group:
    """A control group with a memory limit."""

    folder: Path

    def usage(self) -> int:
        """Bytes that count for the group."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            if (file := self.folder / name).exists():
                return int(file.read_text())
        raise AssertionError("no such file")

    def enter(self) -> list[str]:
        """The command that runs another one in the group."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-euc", script, str(self.folder)]


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Two groups of this machine, with version 2 or version 1 of control groups."""
    made: list[Group] = []
    for parent in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        for number in range(2):
            folder = parent / f"kvr-{os.getpid()}-{number}"
            try:
                folder.mkdir()
            except OSError:
                break
            made.append(Group(folder))
        if len(made) == 2 and all((one.folder / "cgroup.procs").exists() for one in made):
            with_usage = [one for one in made if any(one.folder.glob("memory.*sage_in_bytes"))]
            with_usage += [one for one in made if (one.folder / "memory.current").exists()]
            if len(with_usage) == 2:
                break
        for group in made:
            group.folder.rmdir()
        made = []
    if not made:
        pytest.skip("no control group for memory can be made here")
    yield made
    for group in made:
        until = time.monotonic() + 10
        while True:
            try:
                group.folder.rmdir()
                break
            except OSError:
                assert time.monotonic() < until


def test_pages_of_cache_count_for_the_pod_that_touches_them(groups: list[Group]) -> None:
    server_group, client_group = groups
    size = 64 << 20
    with served("-o", f"cache.capacity={size}", before=server_group.enter()) as server:
        server.notification()
        # The server makes all of Cache resident in the background.
        until = time.monotonic() + SECONDS
        while server_group.usage() < size:
            assert time.monotonic() < until, server_group.usage()
        program = (
            "import sys, kvdepot\n"
            "depot = kvdepot.open(sys.argv[1])\n"
            "ns = depot.namespace(model='pod', dtype='float16', block_tokens=16)\n"
            "keys = kvdepot.keys(range(640), block_tokens=16)\n"
            "block = bytes(1 << 20)\n"
            "assert all(ns.put(keys, [block] * 40).wait(30))\n"
            f"folder = {str(client_group.folder)!r}\n"
            "import pathlib\n"
            "for name in ('memory.current', 'memory.usage_in_bytes'):\n"
            "    file = pathlib.Path(folder, name)\n"
            "    if file.exists(): print(file.read_text().strip())\n"
        )
        used = int(client(f"unix:{server.socket}", client_group.enter(), program))
        # 40 MiB were stored; only the interpreter and the package count here.
        assert used < 40 << 20, used


def test_a_limit_below_cache_is_refused_at_the_start(groups: list[Group]) -> None:
    limited = groups[0].folder
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (limited / name).exists():
            (limited / name).write_text(str(192 << 20))
    with served("-o", "cache.capacity=1GiB", before=groups[0].enter()) as server:
        assert server.process.wait(SECONDS) == 2
        log = (server.folder / "log").read_text()
        assert "cache.capacity" in log
        assert "192 MiB" in log
