"""A vLLM server in a process that is forked from a process which has imported vLLM.

The server is vLLM's own. Its API server has the arguments and the environment that `python -m`
would pass, and forks its engine core and workers instead of spawning them.
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
    """Run the server."""
    sys.path.append(str(Path(__file__).parents[2] / "bench"))
    importlib.import_module("identity.engines").look_at_models_here()
    # vLLM calls this at the end of each process; the collector would then search all imports.
    gc.unfreeze = lambda: None
    sys.argv[0] = "api_server"
    # The loader reads LD_LIBRARY_PATH only at the start of a program, before the fork.
    if library := os.environ.get("ENGINE_LIBRARY"):
        ctypes.CDLL(library)
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(method and "fork")
    # An engine core must not report its signals to the event loop of the API server, whose wakeup
    # descriptor it inherits.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()


if __name__ == "__main__":
    main()
    os._exit(0)
