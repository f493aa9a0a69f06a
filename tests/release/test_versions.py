"""Two releases together: clients and servers, arenas, and hosts of `Peer` that restart one by one.

KVDEPOT_OTHER_PYTHON names an interpreter with the other release installed; `make test-versions`
builds one from BASE. Either the releases understand each other, or one error says which versions
meet, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import client, served

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("KVDEPOT_OTHER_PYTHON", "")
needs_other = pytest.mark.skipif(
    not OTHER, reason="no other release: make test-versions BASE=COMMIT, or KVDEPOT_OTHER_PYTHON"
)
PAIRS = [(sys.executable, OTHER), (OTHER, sys.executable)]

# Row of docs/upgrading.md -> the file and the constant that it is about.
CONSTANTS = {
    "arena": ("crates/arena/src/format/superblock.rs", r"pub const VERSION: u32 = (\d+);"),
    "file of a block": ("crates/arena/src/format/file_header.rs", r"const VERSION: u32 = (\d+);"),
    "attribute": ("crates/arena/src/format/file_note.rs", r"const VERSION: u8 = (\d+);"),
    "session in a depot": ("crates/session/src/manifest.rs", r"const VERSION: u8 = (\d+);"),
    "exported session file": ("crates/session/src/file/format.rs", r"const VERSION: u32 = (\d+);"),
    "measured copy kernels": ("crates/media/src/copy_kernel.rs", r"const VERSION: u32 = (\d+);"),
    "socket of a": ("crates/service/src/frame/hello.rs", r"const VERSION: u32 = (\d+);"),
    "[transfer engine]": ("crates/transfer/src/wire/mod.rs", r"const VERSION: u16 = (\d+);"),
    "calls of the tier": ("crates/transfer/src/peer_tier/messages.rs", r"VERSION: u8 = (\d+);"),
    "placements": ("crates/store/src/placement.rs", r"const VERSION: u32 = (\d+);"),
}


@pytest.mark.unit
@pytest.mark.parametrize("row", CONSTANTS)
def test_the_page_has_the_versions_of_the_code(row: str) -> None:
    file, pattern = CONSTANTS[row]
    found = re.search(pattern, (ROOT / file).read_text())
    assert found, file
    lines = (ROOT / "docs/upgrading.md").read_text().splitlines()
    (line,) = (one for one in lines if one.startswith(f"| {row}"))
    assert line.split("|")[2].strip() == found[1]


def understood(printed: str) -> bool:
    """Whether the other release was understood; if not, an error names both versions."""
    if re.search(r"protocol version \d+, this release uses \d+; use the same release", printed):
        return False
    assert printed == "stored and loaded\n", printed
    return True


@needs_other
@pytest.mark.parametrize(("server", "user"), PAIRS)
def test_a_client_of_the_other_release_is_served_or_refused_by_name(server: str, user: str) -> None:
    with served(python=server) as manager:
        manager.notification()
        address = f"unix:{manager.socket}"
        understood(client(address, python=user))
        # Whatever became of it, the server's own release is served.
        assert client(address, python=server) == "stored and loaded\n"


STORES = """
import sys, kvdepot
settings = {"cache": {"capacity": "4MiB"}, "socket": "off"}
settings["dax"] = {"path": sys.argv[1], "capacity": "32MiB"}
depot = kvdepot.open("Cache|Dax", settings)
ns = depot.namespace(model="versions", dtype="float16", block_tokens=16)
first, last = FIRST, LAST
keys = kvdepot.keys(range(16 * last), block_tokens=16)
blocks = [bytes([n]) * 5000 for n in range(last)]
buffers = [bytearray(5000) for _ in range(first)]
assert all(ns.get(keys[:first], buffers).wait(30)), "lost"
assert buffers == blocks[:first], "changed"
assert all(ns.put(keys[first:], blocks[first:]).wait(30))
depot.close()
print("stored and loaded")
"""


def stores(first: int, last: int) -> str:
    """A program that loads the first blocks of an arena, and stores further ones."""
    return STORES.replace("FIRST", str(first)).replace("LAST", str(last))


@needs_other
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_an_arena_is_upgraded_and_goes_back(before: str, after: str, tmp_path: Path) -> None:
    arena = str(tmp_path / "kv.arena")
    assert client(arena, program=stores(0, 4), python=before) == "stored and loaded\n"
    printed = client(arena, program=stores(4, 8), python=after)
    is_understood = "format version" not in printed
    if is_understood:
        assert printed == "stored and loaded\n"
    # The way back: what both have stored, or what was there before.
    first = 8 if is_understood else 4
    assert client(arena, program=stores(first, 12), python=before) == "stored and loaded\n"


HOSTS = {"a": "127.0.79.1:7700", "b": "127.0.79.2:7700", "c": "127.0.79.3:7700"}
# Blocks are spread over the hosts, and each host looks for all of them.
PUT = """
import sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="peers", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range(16 * 32), block_tokens=16)
assert all(ns.put(keys, [bytes([n]) * 20000 for n in range(32)]).wait(30))
print("stored and loaded")
"""
COUNT = """
import sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="peers", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range(16 * 32), block_tokens=16)
buffers = [bytearray(20000) for _ in keys]
loaded = ns.get(keys, buffers).wait(30)
assert all(b == bytes([n]) * 20000 for n, (b, ok) in enumerate(zip(buffers, loaded)) if ok)
print(sum(loaded))
"""


@contextlib.contextmanager
def host(name: str, folder: Path, python: str) -> Iterator[str]:
    """A server that is a host of `Peer`: its address."""
    hosts = ", ".join(f"{one} {address} 64MiB" for one, address in HOSTS.items())
    options = [f"peer.name={name}", "peer.capacity=64MiB", f"peer.hosts={hosts}"]
    options += [f"peer.path={folder}/{name}.kvd", "cache.capacity=1MiB", "promote=false"]
    command = [python, "-m", "kvdepot", "serve", "Cache|Peer", "--socket", f"{folder}/{name}.sock"]
    command += [word for option in options for word in ("-o", option)]
    own = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own)
    try:
        assert server.stdout
        assert server.stdout.readline().startswith("serving ")
        yield f"unix:{folder}/{name}.sock"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(90) == 0


def count(address: str, python: str) -> int:
    """The number of blocks that a host finds, its own and those of others."""
    return int(client(address, program=COUNT, python=python))


def await_all(address: str, python: str) -> None:
    """Waits until a host finds all blocks: another one may have been unreachable just now."""
    until = time.monotonic() + 60
    while (found := count(address, python)) < 32:
        assert time.monotonic() < until, f"{found} of 32 blocks"


@needs_other
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_hosts_of_peer_restart_one_by_one_and_lose_nothing(before: str, after: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as name:
        folder = Path(name)
        running = {one: contextlib.ExitStack() for one in HOSTS}
        release = dict.fromkeys(HOSTS, before)
        addresses = {
            one: stack.enter_context(host(one, folder, before)) for one, stack in running.items()
        }
        try:
            stored = client(addresses["a"], program=PUT, python=before)
            assert stored == "stored and loaded\n"
            for one in HOSTS:
                await_all(addresses[one], before)
            for one in HOSTS:
                running[one].close()
                running[one] = contextlib.ExitStack()
                release[one] = after
                addresses[one] = running[one].enter_context(host(one, folder, after))
                # Its own blocks at least; all, where the releases understand each other.
                assert count(addresses[one], after) > 0
            for one in HOSTS:
                await_all(addresses[one], after)
        finally:
            for stack in running.values():
                stack.close()
