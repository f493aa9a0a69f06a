"""Start, watch, pause and stop real vLLM servers; nothing survives this process.

A server is a tree of processes (API server, engine core, workers). Each tree
gets a session of its own, and stopping ends whatever is in that session: a
worker that was orphaned half-way is found too. (A mark in the environment would
not do: vLLM's workers write their title over it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

# vLLM's workers are killed a second after SIGTERM anyway (its default
# --shutdown-timeout is 0), so waiting much longer gains nothing.
TERM_SECONDS = 8.0
START_SECONDS = 600.0

_LIVE: list[Server] = []


class ServerError(RuntimeError):
    """A server that did not start, died, or answered with an error."""


def double_of_3fs() -> str | None:
    """What to say where the tier `Ds3fs` would run over a double of 3FS's library
    (`usrbio-double`)."""
    mount = os.environ.get("KVDEPOT_DOUBLE_3FS")
    if mount is None:
        return None
    return f"a double of 3FS's library stands for 3FS: its files are in {mount}, on a local disk"


def free_port() -> int:
    """A free port of 127.0.0.1 that no process gets without asking for it.

    A server binds its port seconds later. Until then the kernel could give a port of its own range
    to a connection of any process.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(max(1024, first - 10_000), first)
    # Several processes choose at the same time.
    for port in random.SystemRandom().sample(below, len(below)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no port from {below.start} to {below.stop} is free")


def die_with_parent() -> None:
    """Have this process killed when its parent ends; runs in a child that was just forked."""
    # PR_SET_PDEATHSIG: were the demo itself killed by SIGKILL, its servers follow.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """One OpenAI-compatible vLLM server."""

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        log: Path,
        arguments: list[str] = (),
        environment: dict[str, str] | None = None,
        kv_space_gib: int = 1,
        python: str = sys.executable,
        say: Callable[[str], None] = print,
    ) -> None:
        """Start it; `wait_ready` says when it answers.

        `arguments` are added to the command line, `kv_space_gib` sizes vLLM's
        own KV cache (GiB). Output goes to `log`.
        """
        self.name = name
        self.port = free_port()
        self.log = log
        self.headers: dict[str, str] = {}
        """What every request carries."""
        self._say = say
        self._paused = False
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "demo",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--block-size", "128",
            "--max-num-seqs", "8", "--enable-prompt-tokens-details",
            *arguments,
        ]  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
            # Left to itself vLLM reserves a core more where a connector is attached,
            # and on few cores then computes twice as fast or half as fast as without.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
            # Without bytecode on disk each of a server's processes compiles all
            # of vLLM and torch again, which doubles the time of a start.
            "PYTHONDONTWRITEBYTECODE": "",
            **(environment or {}),
        }
        # Where it is set (LMCache does so in a process that uses it), counters are summed with
        # those of all servers before.
        env.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self.started = time.monotonic()
        with log.open("ab") as sink:
            self.process = self.launch(command, sink, env)
        _LIVE.append(self)

    def launch(self, command: list[str], sink: BinaryIO, env: dict[str, str]) -> subprocess.Popen:
        """Start the first process of the tree, in a session of its own."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers; `ServerError` with the log's end if it does not."""
        deadline = self.started + seconds
        next_word = self.started + 15
        while True:
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended while it started:\n{self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get("/health")[0] == 200:
                    break
            now = time.monotonic()
            if now > deadline:
                raise ServerError(f"{self.name} did not answer in {seconds:.0f} s:\n{self.tail()}")
            if now > next_word:
                self._say(f"  {self.name}: still starting, {now - self.started:.0f} s")
                next_word = now + 15
            time.sleep(0.5)
        self._say(f"  {self.name}: ready after {time.monotonic() - self.started:.0f} s")

    def tail(self, lines: int = 40) -> str:
        """The last lines of its log."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        """GET `path`: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def post(self, path: str, body: dict, timeout: float = 900.0) -> http.client.HTTPResponse:
        """POST JSON; the caller reads and closes the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Content-Type": "application/json", **self.headers}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode(errors="replace")
            raise ServerError(f"{self.name}: {path} answered {answer.status}: {text[:500]}")
        return answer

    def processes(self) -> list[int]:
        """Every living process of this server's tree."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                # After the name in brackets: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
        return found

    def pause(self) -> None:
        """Stop its processes from running (SIGSTOP), so that it disturbs nobody."""
        if not self._paused:
            self._signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        """Undo `pause`."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Resumed inside, paused again outside."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def stop(self, *, hard: bool = False) -> None:
        """End every process of the tree and wait until none is left.

        `hard` kills at once (SIGKILL), as an out-of-memory killer would.
        """
        if self in _LIVE:
            _LIVE.remove(self)
        if not hard:
            self.resume()
            self._signal(signal.SIGTERM)
            self._await_end(TERM_SECONDS)
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._await_end(1.0)
        self.process.wait()

    def kill_one(self, pid: int) -> None:
        """SIGKILL one process of the tree."""
        os.kill(pid, signal.SIGKILL)

    def _await_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.process.poll()
            if not self.processes():
                return
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def stop_all() -> None:
    """End every server that is still there; safe to call twice."""
    # Who ends this process may not wait for one after the other.
    for server in _LIVE:
        server.resume()
        server._signal(signal.SIGTERM)
    for server in list(_LIVE):
        server.stop()


@contextlib.contextmanager
def no_survivors() -> Iterator[None]:
    """Whatever ends the block (an error, Ctrl-C, SIGTERM, SIGHUP), servers end too."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        # A second Ctrl-C must not interrupt the clean-up.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            stop_all()
        finally:
            signal.signal(signal.SIGINT, interrupt)
            for number, handler in previous.items():
                signal.signal(number, handler)
