"""From an installed package to the first hit, and to a hit after a restart: times in milliseconds.

Runs in an environment that has only the package. A server opens a depot, one process stores blocks,
another one loads them; then the server restarts and the blocks are loaded from the file.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COMMAND = Path(sys.executable).with_name("kvdepot")
BLOCKS, BYTES = 64, 1 << 20

# Both programs begin with this, and end with the number of blocks that they have stored or found.
OPEN = """
import sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="first/hit", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range({blocks} * 16), block_tokens=16)
"""
STORE = """
stored = ns.put(keys, [bytes([n]) * {bytes} for n in range({blocks})]).wait()
print(sum(stored)); depot.close()
"""
LOAD = """
buffers = [bytearray({bytes}) for _ in keys]
loaded = ns.get(keys, buffers).wait()
right = [one == bytes([n]) * {bytes} for n, one in enumerate(buffers)]
print(sum(a and b for a, b in zip(loaded, right))); depot.close()
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of a depot in `folder`: its address."""
    socket = folder / "kvdepot.sock"
    arguments = ["-o", "cache.capacity=96MiB", "-o", "dax.capacity=256MiB"]
    arguments += ["-o", f"dax.path={folder / 'arena.kvd'}", "--socket", str(socket)]
    server = subprocess.Popen(
        [COMMAND, "serve", "Cache|Dax", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        line = server.stdout.readline()
        assert line.startswith("serving "), line
        yield f"unix:{socket}"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def process(program: str, address: str) -> None:
    """Runs a program in a process of its own, which counts all blocks."""
    text = (OPEN + program).format(blocks=BLOCKS, bytes=BYTES)
    run = subprocess.run(
        [sys.executable, "-c", text, address], capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == [str(BLOCKS)], run.stdout + run.stderr


def main() -> None:
    """The program."""
    times: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        times[name] = round(1000 * (time.monotonic() - begun), 1)

    with tempfile.TemporaryDirectory(prefix="kvdepot-", dir="/tmp") as name:
        folder = Path(name)
        # Sockets and caches of this user stay as they are.
        os.environ |= {"XDG_RUNTIME_DIR": name, "XDG_CACHE_HOME": f"{name}/cache"}
        with timed("import"):
            subprocess.run([sys.executable, "-c", "import kvdepot"], check=True)
        begun = time.monotonic()
        with served(folder) as address:
            times["serve"] = round(1000 * (time.monotonic() - begun), 1)
            with timed("store"):
                process(STORE, address)
            with timed("first hit"):
                process(LOAD, address)
            subprocess.run([COMMAND, "stat", address], check=True, stdout=subprocess.DEVNULL)
        with served(folder) as address, timed("hit after a restart"):
            process(LOAD, address)
        arena = folder / "arena.kvd"
        subprocess.run([COMMAND, "verify", arena], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([COMMAND, "rm", arena, "--yes"], check=True, stdout=subprocess.DEVNULL)
        assert not arena.exists()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
