"""Real vLLM servers for the tests: started by the same code as the demo's."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fleet import Fleet
from vllm_demo.server import no_survivors

# A start takes 45 s on a quiet machine and several times that on a busy one.
TIMEOUT_SECONDS = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="engine: vLLM is not installed (make test installs it)")
    for item in items:
        if Path(__file__).parent not in item.path.parents or item.get_closest_marker("unit"):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(missing)


entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """What is installed stays: to look for plug-ins takes 50 ms, for each name that a namespace
    gets and each engine that begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        yield


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The servers that modules name in `SERVERS`; they end with the session, whatever happens."""
    items = request.session.items
    modules = dict.fromkeys(item.module for item in items if not item.get_closest_marker("skip"))
    plans = [plan for module in modules for plan in getattr(module, "SERVERS", ())]
    with no_survivors():
        yield Fleet(plans, tmp_path_factory.mktemp("fleet"))
