"""A vLLM server, as a process that is forked off one that has imported vLLM.

It is vLLM's own all the same: its API server has the arguments and the environment that `python -m`
would give it, and forks its engine core and workers instead of spawning them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Be a server."""
    sys.path.append(str(Path(__file__).parents[2] / "bench"))
    importlib.import_module("identity.engines").look_at_models_here()
    # At its end it would look through all that was imported for garbage, in each process.
    gc.unfreeze = lambda: None
    sys.argv[0] = "api_server"
    # A loader reads LD_LIBRARY_PATH when a program begins, which was long ago.
    if library := os.environ.get("ENGINE_LIBRARY"):
        ctypes.CDLL(library)
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(method and "fork")
    # A signal to an engine core is none to its API server, whose event loop hears of its own there.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()


if __name__ == "__main__":
    main()
    os._exit(0)
