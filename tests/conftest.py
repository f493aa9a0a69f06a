"""What all Python tests share: seeds, and which tests run where."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import re
import resource
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from _pytest import runner

KINDS = ("unit", "integration", "engine")
TEST_ALL = os.environ.get("KVDEPOT_TEST_ALL") == "1"
FIXED_SEED = 20_260_101


# What servers and caches of a run have there at most.
SHM, SHM_BYTES = Path("/dev/shm"), 256 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Gives tests, and the processes that they start, what they take for granted."""
    # Ignored in a job of a shell's background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Many systems allow a process more files than it has at first.
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 1 << 16)), most))
    os.umask(0o022)
    os.environ.update(LC_ALL="C.UTF-8", TZ="UTC")
    # Each process would compile all that it imports of vLLM and torch: half a minute.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    time.tzset()


def pytest_sessionstart(session: pytest.Session) -> None:
    free = shutil.disk_usage(SHM).free
    if free < SHM_BYTES and not hasattr(session.config, "workerinput"):
        pytest.exit(f"{SHM} has {free >> 20} MiB free; the tests need {SHM_BYTES >> 20} MiB", 1)


# Folders whose tests import an engine.
ENGINES = [Path(__file__).with_name(name) for name in ("engine", "lmcache")]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Forks the workers off one process that has imported what each of them collects."""
    asked = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    pairs = [pair for one in asked for path in ENGINES for pair in ((one, path), (path, one))]
    if not any(inner.is_relative_to(outer) for inner, outer in pairs):
        return
    # A fork cannot use a device that its parent has seen.
    if not Path("/dev/nvidiactl").exists() and forks.start(forks.VLLM, forks.ALL):
        for spec in specs:
            spec.python = shlex.join(forks.command(forks.WORKER))


# What a file imports whose tests start servers of an engine.
SERVERS = re.compile(
    r"^from (engine_fleet import .*Fleet|vllm_demo\.server import .*Server\b)", re.MULTILINE
)


@functools.cache
def starts_servers(path: Path) -> bool:
    return bool(SERVERS.search(path.read_text()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side, by file: all that start servers, which take both cores, are one worker's."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "servers" if starts_servers(config.rootpath / file) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not starts_servers(item.path))
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            folder = item.path.relative_to(Path(__file__).parent).parts[0]
            item.add_marker(folder if folder in KINDS else "integration")
        if item.get_closest_marker("stress") and not TEST_ALL:
            item.add_marker(pytest.mark.skip(reason="stress: runs with KVDEPOT_TEST_ALL=1"))
        if item.get_closest_marker("gpu") and not cuda_device():
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device"))


@functools.cache
def cuda_device() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Runs each test KVDEPOT_REPEAT times in this process: tests/repeat.py sets it."""
    times = int(os.environ.get("KVDEPOT_REPEAT", 1))
    for _ in range(times - 1):
        # What belongs to the file stays, and nothing of the test.
        runner.runtestprotocol(item, nextitem=item.parent, log=True)  # type: ignore[arg-type]
    return None


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed: KVDEPOT_SEED, else fixed, else fresh with KVDEPOT_TEST_ALL=1."""
    if given := os.environ.get("KVDEPOT_SEED"):
        value = int(given)
    else:
        value = secrets.randbits(32) if TEST_ALL else FIXED_SEED
    # Shown with a failure, so that it can be replayed.
    print(f"replay: KVDEPOT_SEED={value} python -m pytest '{request.node.nodeid}'")
    return value


@pytest.fixture
def rounds() -> int:
    """How often a randomised test repeats: once, or many times with KVDEPOT_TEST_ALL=1."""
    return 50 if TEST_ALL else 1


@pytest.fixture
def descriptors() -> Callable[[], set[tuple[str, str]]]:
    """What this process has open: each descriptor's number, and what it stands for.

    A test subtracts what was open before it: what earlier tests have left may close meanwhile.
    """

    def list_them() -> set[tuple[str, str]]:
        gc.collect()
        found = set()
        for number in os.listdir("/proc/self/fd"):
            # The directory itself is no longer open.
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"/proc/self/fd/{number}")
                found.add((number, target.removesuffix(" (deleted)")))
        return found

    return list_them


def environment_kept() -> Iterator[None]:
    """Takes back what tests, or engines in this process, set: vLLM sets LD_PRELOAD, for one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# What the fixtures of a file set stays for its tests alone.
file_environment = pytest.fixture(environment_kept, scope="module", autouse=True)
test_environment = pytest.fixture(environment_kept, autouse=True)


@pytest.fixture(autouse=True)
def own_directories(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keeps sockets and default arenas of tests away from the user's."""
    # Engines are started by fixtures of wider scope, which see to it themselves.
    if request.node.get_closest_marker("engine"):
        yield
        return
    # A socket's path has at most 107 bytes, and that of the test's directory has half of them.
    with tempfile.TemporaryDirectory(prefix="kvd", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield
