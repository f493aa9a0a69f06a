"""Imports vLLM once, and forks a server for each line of its input.

A server is three processes or more, and most of what each takes to start is its imports. A server
of these is vLLM's own all the same: its API server is forked with the arguments and the environment
that `python -m` would give it, and forks its engine core and workers instead of spawning them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Be a server, in a process that was just forked for it."""
    os.setsid()
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull) as nothing, open(log, "ab") as sink:
        os.dup2(nothing.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["api_server", *arguments]
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(method and "fork")
    # A signal to an engine core is none to its API server, whose event loop hears of its own there.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    importlib.import_module(MODULES[1]).main()


def main() -> None:
    """Import vLLM, and fork a server for each line of arguments."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What vLLM logs while it is imported is no answer.
    for module in MODULES:
        importlib.import_module(module)
    sys.path.append(str(Path(__file__).parents[2] / "bench"))
    importlib.import_module("identity.engines").look_at_models_here()
    # It looks for the title's place behind the environment that the program began with.
    importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()
    # Only threads that do nothing could be missed by a fork: there are none.
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "vLLM starts threads when imported"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            os.close(answers)
            _run(*json.loads(line))
            os._exit(0)
        os.write(answers, f"{pid}\n".encode())


if __name__ == "__main__":
    main()
