"""Servers that are forked off one process, which has imported vLLM once for all of them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from vllm_demo.server import Server, die_with_parent


class Forked:
    """A server's first process, which is no child of this one, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True

    def poll(self) -> int | None:
        """None while it runs; how it ended only its parent knows."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended and select.select([self._fd], [], [], timeout)[0]:
            self._ended = True
            os.close(self._fd)
        return 0 if self._ended else None


class Preloaded:
    """The process that has imported vLLM; it and its servers end with this one."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_forks.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A thread of OpenMP would be missing in each fork.
            env=environment | {"OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,
        )

    def fork(self, arguments: list[str], environment: dict[str, str], log: str) -> Forked:
        assert self._process.stdin
        assert self._process.stdout
        json.dump([arguments, environment, log], self._process.stdin)
        print(file=self._process.stdin, flush=True)
        return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


class ForkedServer(Server):
    """A server that is forked off `preloaded`, which the first one starts."""

    preloaded: Preloaded | None = None

    def launch(self, command: list[str], sink: BinaryIO, env: dict[str, str]) -> Any:
        if ForkedServer.preloaded is None:
            ForkedServer.preloaded = Preloaded(env)
        # Behind the interpreter, `-m` and the module.
        return ForkedServer.preloaded.fork(command[3:], env, sink.name)
