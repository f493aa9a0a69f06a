"""Real vLLM, LMCache's own connector and server, and kvdepot below: end to end.

LMCache's DRAM level is emptied before each answer that is judged, so what vLLM did not compute came
out of kvdepot. (LMCache's in-process connector does not support the CPU, and is not run.)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "engine")]

import kvd_reader  # noqa: E402
from engine_harness import assert_same, flip, prompts  # noqa: E402
from vllm_demo import measure  # noqa: E402
from vllm_demo.measure import Answer  # noqa: E402
from vllm_demo.server import Server, free_port, no_survivors  # noqa: E402

from . import mp  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="engine: vLLM is not installed (make test installs it)",
    ),
]

CHUNK = 256
TOKENS = 1000
CACHED = TOKENS // CHUNK * CHUNK


class LMCache:
    """LMCache's server over an arena; it can be started again at the same port, with either of the
    two surfaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.http = free_port(), free_port()
        self.arena = folder / "arena"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, surface: str) -> None:
        command = [
            str(Path(sys.executable).parent / "lmcache"), "server",
            "--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http),
            "--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--no-l1-use-lazy",
            "--supported-transfer-mode", "auto", "--shm-name", f"kvdepot-e2e-{os.getpid()}",
            "--l2-adapter", mp.spec(surface, self.folder, max_dax_size=0.5),
        ]  # fmt: skip
        log = self.folder / "lmcache.log"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder
            )
        deadline = time.monotonic() + 300
        while True:
            try:
                self.ask("/healthcheck")
                return
            except OSError:
                assert self.process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def empty_dram(self) -> None:
        """Once all of it is in kvdepot, so that only kvdepot has it."""
        deadline = time.monotonic() + 60
        while self.busy():
            assert time.monotonic() < deadline, self.ask("/status")
            time.sleep(0.2)
        self.ask("/cache/clear", "POST")
        assert self.dram()["total_object_count"] == 0

    def dram(self) -> Any:
        return self.ask("/status")["storage_manager"]["l1_managers"]["_default"]

    def busy(self) -> bool:
        status = self.ask("/status")["storage_manager"]
        stores = status["store_controllers"].values()
        moving = sum(one["in_flight_task_count"] + one["pending_keys_count"] for one in stores)
        dram = self.dram()
        return bool(moving or dram["write_locked_count"] or dram["read_locked_count"])


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCache]:
    server = LMCache(tmp_path_factory.mktemp("lmcache"))
    try:
        server.start("native")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def vllm(lmcache: LMCache) -> Iterator[Server]:
    model = ROOT / "build" / "engine-models" / "qwen3"
    subprocess.run(
        [sys.executable, "-m", "vllm_demo.model", str(model)],
        cwd=ROOT / "examples",
        check=True,
        capture_output=True,
    )
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": lmcache.port,
        },
    }
    with no_survivors():
        server = Server(
            "vLLM",
            model,
            log=lmcache.folder / "vllm.log",
            arguments=["--max-model-len", "4096", "--no-enable-prefix-caching"]
            + ["--kv-transfer-config", json.dumps(transfer)],
            environment={"VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache")},
        )
        server.wait_ready()
        yield server


def chunks_of(arena: Path) -> list[kvd_reader.Record]:
    """LMCache's chunks in an arena, oldest first; the names beside them are far smaller."""
    with arena.open("rb") as medium:
        blocks = [block for block in kvd_reader.Arena(medium).blocks() if block.length > 4096]
    return sorted(blocks, key=lambda block: block.sequence)


def reconnections(server: Server) -> int:
    """How often a part of the connector has found LMCache's server again: scheduler and worker."""
    return server.log.read_text(errors="replace").count("resuming normal operation")


def test_hits_come_out_of_kvdepot_also_after_a_restart_and_beside_rot(
    lmcache: LMCache, vllm: Server
):
    first, second = prompts(2, TOKENS, seed=51)

    def ask(prompt: list[int]) -> Answer:
        return measure.ask(vllm, prompt)

    computed = [ask(prompt) for prompt in (first, second)]
    assert [answer.cached_tokens for answer in computed] == [0, 0]
    lmcache.empty_dram()
    for prompt, reference in zip((first, second), computed, strict=True):
        served = ask(prompt)
        assert served.cached_tokens == CACHED
        assert_same(served, reference)

    lmcache.empty_dram()
    lmcache.stop()
    blocks = chunks_of(lmcache.arena)
    assert len(blocks) == 2 * CACHED // CHUNK
    # Sequences fall along a prompt: this is the middle one of the second prompt's three.
    rotten = blocks[-2]
    flip(lmcache.arena, rotten.extents[0][0] + 1234)
    before = reconnections(vllm)
    lmcache.start("adapter")
    deadline = time.monotonic() + 120
    while reconnections(vllm) < before + 2:
        assert time.monotonic() < deadline, vllm.tail()
        time.sleep(0.2)
    served = ask(first)
    assert served.cached_tokens == CACHED
    assert_same(served, computed[0])

    # Its load fails; what lies before it is kept, the rest is computed again.
    served = ask(second)
    assert served.cached_tokens == CHUNK
    assert_same(served, computed[1])
    lmcache.empty_dram()
    served = ask(second)
    assert served.cached_tokens == CACHED
    assert_same(served, computed[1])
