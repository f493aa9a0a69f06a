"""Test processes that are forked from a process which has imported vLLM, torch and LMCache.

These imports take at least ten seconds of processor time, and a run of all tests has some fifty
processes that need them. This file can be run as a program in two ways:

* `serve DIRECTORY KIND ...` imports the modules of each kind, and forks a process for each client
  that connects to the socket `DIRECTORY/KIND`.
* A kind and arguments of `python` (a file, `-c` or `-m`): runs that program in a forked process
  with the environment, working directory and standard streams of this process. Signals are
  forwarded, and this process ends with the same status. If no process serves the kind, `python`
  itself runs the program.

Only a process with a single thread is forked, because a fork has only the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

VLLM = "vllm"
ALL = "all"
NOTHING = "nothing"
# As `all`, for pytest's workers: the terminal sends Ctrl-C to the worker directly.
WORKER = "worker"

# Modules by kind. If a process serves several kinds, the modules of the earlier kinds are imported
# for the later ones, too. vLLM comes first, because it replaces kernels in all imported modules and
# fails with a module that LMCache imports. kvdepot is imported after the fork, because its import
# reads the log level.
MODULES = {
    VLLM: (
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        # Imported by engines when they start.
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.models.gemma3",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.phi3",
        "vllm.model_executor.models.qwen2_vl",
        "vllm.model_executor.models.qwen3",
        "vllm.tokenizers.hf",
        "transformers.models.auto.image_processing_auto",
        "transformers.models.auto.processing_auto",
        "transformers.models.auto.tokenization_auto",
    ),
    ALL: (
        # Imported by the tests; each of pytest's workers collects all of them.
        "transformers.generation.utils",
        "transformers.models.gemma3.modeling_gemma3",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mistral.modeling_mistral",
        "transformers.models.qwen3.modeling_qwen3",
        "lmcache.v1.distributed.l2_adapters",
        "lmcache.v1.distributed.storage_manager",
        "lmcache.v1.multiprocess.http_apis.reconfigure_api",
        "lmcache.v1.storage_backend.storage_manager",
        # Imported by LMCache's commands.
        "lmcache.cli.commands.bench.l2_adapter_bench.command",
        "lmcache.cli.commands.bench.l2_adapter_bench.data",
        "lmcache.cli.commands.bench.l2_adapter_bench.runner",
        "lmcache.cli.commands.bench.server_bench.command",
        "lmcache.cli.commands.trace._driver",
        "lmcache.v1.multiprocess.http_server",
    ),
    NOTHING: (),
}

# Environment variable with the directory of the sockets.
VARIABLE = "KVDEPOT_FORKS"

_started: list[Any] = []
"""The temporary directory that this process created, and the process that serves there."""


def start(*kinds: str) -> bool:
    """Start a process that imports and serves these kinds, and wait until it is ready.

    The process ends with this one. Returns False if it cannot be forked; it then prints the reason.
    """
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="kvd", ignore_cleanup_errors=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {
        # OpenMP starts no threads.
        "OMP_NUM_THREADS": "1",
        # Otherwise each engine compiles the computation of log probabilities, for seconds.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        # For example, transformers copies a model's code to this directory.
        "HF_HOME": folder.name,
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }
    process = subprocess.Popen(
        [sys.executable, "-u", __file__, "serve", folder.name, *kinds],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=variables,
        preexec_fn=_die_with_parent,
    )
    assert process.stdout
    with process.stdout as said:
        if not said.readline():
            process.wait()
            return False
    _started[:] = [folder, process]
    os.environ[VARIABLE] = folder.name
    return True


def is_there(kind: str) -> bool:
    """Whether a process serves this kind."""
    folder = _folder()
    return folder is not None and os.path.exists(f"{folder}/{kind}")


def _folder() -> str | None:
    return os.environ.get(VARIABLE) or (_started[0].name if _started else None)


def command(kind: str = ALL) -> list[str]:
    """The words that replace `python` in a command line."""
    # A start without `site` is faster.
    return [sys.executable, "-S", "-E", __file__, kind]


class Process:
    """A forked process, with the interface of `subprocess.Popen`.

    It is not a child of this process, and is killed when this process ends.
    """

    def __init__(
        self,
        kind: str,
        program: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        streams: Sequence[int] = (0, 1, 2),
        new_session: bool = False,
    ) -> None:
        """`program` has the words that follow `python` in a command line."""
        self.returncode: int | None = None
        request = {
            "program": list(program),
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.getcwd(),
            "new_session": new_session,
        }
        text = json.dumps(request).encode() + b"\n"
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"{_folder()}/{kind}")
        socket.send_fds(self._connection, [text[:1]], list(streams))
        self._connection.sendall(text[1:])
        self.pid = int(self._line())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := self._connection.recv(1)):
            line += byte
        return line

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status, or None if the process still runs after `timeout` seconds."""
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            # No status arrives if the process that waits for it was killed, too.
            self.returncode = int(self._line() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode


# ---- the process that imports -------------------------------------------------------------------


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _serve(directory: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Import the modules, and fork a process for each request. Returns only in these forks, with
    the request."""
    # Ctrl-C is left to the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready = os.dup(1)
    os.dup2(2, 1)  # Standard output is for `ready` alone; imports may print.
    del sys.path[0]
    for kind in kinds:
        _import(kind)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{directory}/{kind}")
        listener.listen(64)
        is_last = kind == kinds[-1]
        if is_last:
            os.write(ready, b"ready\n")
        if is_last or os.fork() == 0:
            os.close(ready)
            if not is_last:
                _die_with_parent()
            return _fork_for(listener)
        listener.close()
    raise AssertionError("no kind is named")


def _import(kind: str) -> None:
    import gc
    import importlib.util

    for name in MODULES[kind]:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # A test that needs the module fails with the same error.
            print(f"{name} is not imported ahead: {error}", file=sys.stderr)
        _look_for_threads(name)
    if kind == VLLM:
        _replace_kernels()
        _look_for_threads("register_triton_kernel_overrides")
    # setproctitle finds the memory of the title by the initial environment, which forks replace.
    if importlib.util.find_spec("setproctitle"):
        importlib.import_module("setproctitle").getproctitle()
    # anyio has a plug-in for pytest. pytest warns if it cannot rewrite the assertions of a plug-in
    # that is already imported.
    if anyio := sys.modules.get("anyio"):
        anyio.__doc__ = f"{anyio.__doc__} PYTEST_DONT_REWRITE"
    gc.collect()
    gc.freeze()


def _look_for_threads(what: str) -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"nothing is forked: {what} starts a thread")


def _replace_kernels() -> None:
    """Replace kernels as each vLLM worker does at its start, once for all forks: vLLM searches all
    modules for them."""
    import importlib

    try:
        platform: Any = importlib.import_module("vllm.platforms").current_platform
        platform.register_triton_kernel_overrides()
    except (ImportError, AttributeError) as error:
        print(f"vLLM's kernels are not replaced ahead: {error}", file=sys.stderr)
    else:
        type(platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def _fork_for(listener: socket.socket) -> dict[str, Any]:
    # The kernel reaps the processes of `_stay_with`.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _fork(connection)
        connection.close()


def _fork(connection: socket.socket) -> dict[str, Any]:
    """Fork the requested process, and wait for its end. Returns only in the fork."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            os._exit(1)
        text += more
    request = json.loads(text)
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.read(reading, 1)
        _stay_with(child, streams, connection)
    connection.close()
    _die_with_parent()
    if request["new_session"]:
        os.setsid()
    for end in (reading, writing):
        os.close(end)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return dict(request)


def _stay_with(child: int, streams: Sequence[int], connection: socket.socket) -> None:
    """Send the client the child's process ID and exit status. Kill the child if the client ends."""
    try:
        for stream in streams:
            os.close(stream)
        connection.sendall(f"{child}\n".encode())
        ended = os.pidfd_open(child)
        if ended not in select.select([ended, connection], [], [])[0]:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{status}\n".encode())
    finally:
        # After an error, the kernel kills a child that still runs (PR_SET_PDEATHSIG).
        os._exit(0)


def _run(request: dict[str, Any]) -> None:
    """Run a program as `python` does."""
    import runpy
    import types

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    what, *arguments = request["program"]
    if what == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.path[:0] = ["", *paths]
        exec(compile(code, "<string>", "exec"), vars(main))
    elif what == "-m":
        sys.argv = arguments
        sys.path[:0] = [os.getcwd(), *paths]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *arguments]
        sys.path[:0] = [os.path.dirname(what), *paths]
        runpy.run_path(what, run_name="__main__")


# ---- the replacement of `python` ----------------------------------------------------------------


def _stand_in(kind: str, words: list[str]) -> None:
    is_worker = kind == WORKER
    # The serving process was started with `-u`, so its forks have it already.
    program = words[1:] if words[0] == "-u" else words
    try:
        process = Process(ALL if is_worker else kind, program)
    except OSError:
        os.execv(sys.executable, [sys.executable, *words])

    def hand_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    if is_worker:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only the fork keeps the standard streams open, so that their other ends detect its end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    status = process.wait()
    assert status is not None
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler.
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "serve":
        _run(_serve(given[0], given[1:]))
    else:
        _stand_in(role, given)
