"""Real vLLM servers for the tests: started by the same code as the demo's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

sys.path.insert(0, str(Path(__file__).parent))

from engine_harness import Engine, Start  # noqa: E402
from vllm_demo.server import Server, no_survivors  # noqa: E402

# A start takes 30 s on a quiet machine and several times that on a busy one.
TIMEOUT_SECONDS = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="engine: vLLM is not installed (make test installs it)")
    for item in items:
        if Path(__file__).parent not in item.path.parents or item.get_closest_marker("unit"):
            continue
        item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(missing)


@pytest.fixture(scope="session")
def models() -> Callable[..., Path]:
    """Directory of a random model, made once and kept in `build`."""

    def make(name: str, *options: str) -> Path:
        directory = ROOT / "build" / "engine-models" / name
        subprocess.run(
            [sys.executable, "-m", "vllm_demo.model", str(directory), *options],
            cwd=ROOT / "examples",
            check=True,
            capture_output=True,
        )
        return directory

    return make


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> Iterator[Start]:
    """Starts servers that end with the module, whatever happens in it."""
    logs = tmp_path_factory.mktemp("logs")
    count = 0

    def go(
        settings: dict[str, Any],
        *arguments: str,
        model: Path | None = None,
        environment: dict[str, str] | None = None,
        ready: bool = True,
    ) -> Engine:
        nonlocal count
        count += 1
        transfer = {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        server = Server(
            f"server {count}",
            model or models("qwen3"),
            log=logs / f"{count}.log",
            arguments=["--max-model-len", "4096", "--kv-transfer-config", json.dumps(transfer)]
            + list(arguments),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                "XDG_RUNTIME_DIR": str(logs),
                "XDG_CACHE_HOME": str(logs / "cache"),
                # What vLLM knows about its models; without it a start takes half as long again.
                "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
                **(environment or {}),
            },
        )
        if ready:
            server.wait_ready()
        return Engine(server)

    with no_survivors():
        yield go


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's arena is."""
    return tmp_path_factory.mktemp("arena") / "arena.kvd"
