"""A server for the tests of units and pods, started as a service manager starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60


@dataclass
class Manager:
    """The service manager's end of `sd_notify(3)`, and the server."""

    folder: Path
    notified: socket.socket
    process: subprocess.Popen[str]

    @property
    def socket(self) -> Path:
        """The server's socket."""
        return self.folder / "kvdepot.sock"

    def notification(self) -> dict[str, str]:
        """The next state that the server reports."""
        text = self.notified.recv(4096).decode()
        return dict(line.split("=", 1) for line in text.splitlines())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends the server by a signal; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@contextlib.contextmanager
def served(
    *arguments: str,
    before: Sequence[str] = (),
    pipeline: str = "Cache",
    python: str = sys.executable,
    place: str = "",
    **options: Any,
) -> Iterator[Manager]:
    """Starts `kvdepot serve` with a small Cache, by the command `before` if there is one."""
    # Sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as name:
        folder = Path(name)
        # Users other than this one put their sockets there, too.
        folder.chmod(0o777)
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notified.bind(str(folder / "notify"))
        (folder / "notify").chmod(0o777)
        notified.settimeout(SECONDS)
        command = [*before, python, "-m", "kvdepot", "serve", pipeline]
        place = place or str(folder / "kvdepot.sock")
        command += ["-o", "cache.capacity=8MiB", "--socket", place]
        own = {"NOTIFY_SOCKET": str(folder / "notify"), "XDG_RUNTIME_DIR": name}
        own |= {"XDG_CACHE_HOME": f"{name}/cache", "KVDEPOT_LOG": "info"}
        own |= options.pop("env", {})
        log = (folder / "log").open("w")
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=log,
            stderr=log,
            text=True,
            env=os.environ | own,
            **options,
        )
        try:
            yield Manager(folder, notified, process)
        except BaseException:
            print((folder / "log").read_text(), file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()
            notified.close()
            log.close()


CLIENT = """
import sys, kvdepot
depot = kvdepot.open(sys.argv[1])
ns = depot.namespace(model="unit", dtype="float16", block_tokens=16)
keys = kvdepot.keys(range(64), block_tokens=16)
assert all(ns.put(keys, [bytes([n]) * 5000 for n in range(4)]).wait(30))
buffers = [bytearray(5000) for _ in keys]
assert all(ns.get(keys, buffers).wait(30))
assert buffers == [bytes([n]) * 5000 for n in range(4)]
print("stored and loaded")
"""


def client(
    address: str,
    before: Sequence[str] = (),
    program: str = CLIENT,
    python: str = sys.executable,
    env: dict[str, str] | None = None,
) -> str:
    """Runs a client in a process of its own: what it prints, and its last error."""
    command = [*before, python, "-c", program, address]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | (env or {}),
    )  # fmt: skip
    return run.stdout + "".join(run.stderr.splitlines(keepends=True)[-1:])
