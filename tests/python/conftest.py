"""Depots to test with, and children to test against."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvdepot
import pytest


class Depots:
    """Opens depots under the test's directory, and closes them when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: list[kvdepot.Depot] = []

    def settings(self, pipeline: str, **options: Any) -> dict[str, Any]:
        sizes = {name: options.pop(name, "32MiB") for name in ("cache", "dax")}
        settings: dict[str, Any] = {"lock_wait": 0, "socket": str(self.folder / "s"), **options}
        if "Cache" in pipeline:
            settings["cache"] = {"capacity": sizes["cache"]}
        if "Dax" in pipeline:
            settings["dax"] = {"path": str(self.folder / "arena"), "capacity": sizes["dax"]}
        return settings

    def open(self, pipeline: str = "Cache|Dax", **options: Any) -> kvdepot.Depot:
        depot = kvdepot.open(pipeline, self.settings(pipeline, **options))
        self._opened.append(depot)
        return depot

    def close(self) -> None:
        for depot in self._opened:
            depot.close()


@pytest.fixture
def depots(tmp_path: Path) -> Iterator[Depots]:
    depots = Depots(tmp_path)
    yield depots
    depots.close()


@pytest.fixture
def depot(depots: Depots) -> kvdepot.Depot:
    return depots.open()


@pytest.fixture
def ns(depot: kvdepot.Depot) -> kvdepot.Namespace:
    return depot.namespace(model="m", dtype="float32", block_tokens=16)


@pytest.fixture
def source(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def keys(source: random.Random) -> Callable[[int], list[bytes]]:
    """So many new keys."""
    return lambda count: [source.randbytes(32) for _ in range(count)]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Starts a Python process with a program and arguments; its pipes are open. `python` is what
    stands for the interpreter.

    It ends with the test.
    """
    started: list[subprocess.Popen[Any]] = []

    def start(
        program: str,
        *arguments: object,
        python: Sequence[str] = (sys.executable,),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        path = tmp_path / f"child_{len(list(tmp_path.glob('child_*')))}.py"
        path.write_text(textwrap.dedent(program))
        process = subprocess.Popen(
            [*python, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **{"text": True, **options},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
