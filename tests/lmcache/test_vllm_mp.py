"""Real vLLM, LMCache's own connector and server, and kvdepot below: end to end.

LMCache's DRAM level is emptied before each answer that is judged, so what vLLM did not compute came
out of kvdepot. (LMCache's in-process connector does not support the CPU, and is not run.)
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import kvd_reader
import pytest
from engine_fleet import make_models, model_directory
from engine_harness import ROOT, assert_same, flip, prompts
from server import LMCacheServer
from vllm_demo import measure
from vllm_demo.measure import Answer
from vllm_demo.server import Server, no_survivors

from . import mp

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


class LMCache(LMCacheServer):
    """LMCache's server over an arena, with either of the two surfaces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, l1_gib=0.5)
        self.arena = folder / "arena"

    def start_with(self, surface: str) -> None:
        self.start(mp.spec(surface, self.folder, max_dax_size=0.5))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LMCache, Server]]:
    """LMCache's server and vLLM, which start at the same time."""
    make_models([("qwen3",)])
    lmcache = LMCache(tmp_path_factory.mktemp("lmcache"))
    transfer = json.loads(lmcache.transfer())
    # The test waits until vLLM has noticed that the server went and came; else every 10 s.
    transfer["kv_connector_extra_config"]["lmcache.mp.heartbeat_interval"] = 3.0
    try:
        with no_survivors():
            vllm = Server(
                "vLLM",
                model_directory("qwen3"),
                log=lmcache.folder / "vllm.log",
                arguments=["--max-model-len", "4096", "--no-enable-prefix-caching"]
                + ["--kv-transfer-config", json.dumps(transfer)],
                environment={"VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache")},
            )
            # It connects when its worker is up, the third of its processes.
            lmcache.start_with("native")
            vllm.wait_ready()
            yield lmcache, vllm
    finally:
        lmcache.stop()


def chunks_of(arena: Path) -> list[kvd_reader.Record]:
    """LMCache's chunks in an arena, oldest first; the names beside them are far smaller."""
    with arena.open("rb") as medium:
        blocks = [block for block in kvd_reader.Arena(medium).blocks() if block.length > 4096]
    return sorted(blocks, key=lambda block: block.sequence)


def wait_until_degraded(vllm: Server, wanted: int) -> None:
    """Until so many of scheduler and worker, whose heartbeats are apart, do without LMCache."""
    deadline = time.monotonic() + 120
    while True:
        log = vllm.log.read_text(errors="replace")
        left, came_back = map(log.count, ("entering degraded mode", "resuming normal operation"))
        if left - came_back == wanted:
            return
        assert time.monotonic() < deadline, vllm.tail()
        time.sleep(0.2)


def test_hits_come_out_of_kvdepot_also_after_a_restart_and_beside_rot(
    both: tuple[LMCache, Server],
):
    lmcache, vllm = both
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
    # A restart between two heartbeats would go unnoticed, and nobody would register anew.
    wait_until_degraded(vllm, 2)
    lmcache.start_with("adapter")
    wait_until_degraded(vllm, 0)
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
