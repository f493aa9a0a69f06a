"""What all Python tests share: seeds, and which tests run where."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
from pathlib import Path

import pytest

KINDS = ("unit", "integration", "engine")
TEST_ALL = os.environ.get("KVDEPOT_TEST_ALL") == "1"
FIXED_SEED = 20_260_101


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


@pytest.fixture(autouse=True)
def own_directories(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps sockets and default arenas of tests away from the user's."""
    # Engines are started by fixtures of wider scope, which see to it themselves.
    if not request.node.get_closest_marker("engine"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
