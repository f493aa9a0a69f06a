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

import forks
import kvd_reader
import pytest
from engine_fleet import make_models, model_directory
from engine_harness import ROOT, assert_same, flip, prompts
from engine_preload import ForkedServer
from server import LMCacheServer
from vllm_demo import measure
from vllm_demo.measure import Answer
from vllm_demo.server import Server, no_survivors

from . import mp, pipelines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="engine: vLLM is not installed (make test installs it)",
    ),
]

ARENA_BYTES = 512 << 20
CHUNK = 256
TOKENS = 1000
CACHED = TOKENS // CHUNK * CHUNK


class LMCache(LMCacheServer):
    """LMCache's server over a pipeline, with either of the two surfaces."""

    command = (*forks.command(), "-m", "lmcache.cli.main")

    def __init__(self, folder: Path, pipeline: str) -> None:
        super().__init__(folder, l1_gib=0.5)
        self.pipeline = pipeline

    def start_with(self, surface: str) -> None:
        tiers = pipelines.settings(self.pipeline, self.folder, ARENA_BYTES)
        if self.pipeline != pipelines.DEFAULT:
            tiers["cache.capacity"] = "64MiB"  # A chunk has 4 MiB.
        given = {"device_path": None, "max_dax_size": None, **tiers}
        self.start(mp.spec(surface, self.folder, **given))

    def rot(self) -> int:
        """Damage chunks of the second prompt; how many before them are whole."""
        blocks = [
            (record, path) for path in pipelines.media(self.folder) for record in chunks_of(path)
        ]
        assert len(blocks) == 2 * CACHED // CHUNK
        if self.pipeline in pipelines.ARENAS:
            # Sequences fall along a prompt: this is the middle one of the second prompt's three.
            rotten, whole = blocks[-2:-1], 1
        else:
            blocks.sort(key=lambda block: block[0].created)
            rotten, whole = blocks[CACHED // CHUNK :], 0
        for record, path in rotten:
            flip(path, record.extents[0][0] + 1234)
        return whole


@pytest.fixture(
    scope="module",
    params=[
        pipelines.DEFAULT,
        *(pytest.param(one, marks=pytest.mark.stress) for one in pipelines.PIPELINES[1:]),
    ],
)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LMCache, Server]]:
    """LMCache's server and vLLM, which start at the same time."""
    make_models([("qwen3",)])
    lmcache = LMCache(tmp_path_factory.mktemp("lmcache"), request.param)
    transfer = json.loads(lmcache.transfer())
    # The test waits until vLLM has noticed that the server went and came; else every 10 s.
    transfer["kv_connector_extra_config"]["lmcache.mp.heartbeat_interval"] = 3.0
    try:
        with no_survivors():
            # Nothing of kvdepot is in its processes: `make test-all` starts them as users do.
            vllm = (ForkedServer if request.param == pipelines.DEFAULT else Server)(
                "vLLM",
                model_directory("qwen3"),
                log=lmcache.folder / "vllm.log",
                arguments=["--max-model-len", "4096", "--no-enable-prefix-caching"]
                + ["--kv-transfer-config", json.dumps(transfer)],
                environment={
                    "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "OMP_NUM_THREADS": "1",
                },
            )
            # It connects when its worker is up, the third of its processes.
            lmcache.start_with("native")
            vllm.wait_ready()
            yield lmcache, vllm
    finally:
        lmcache.stop()


def chunks_of(path: Path) -> list[kvd_reader.Record]:
    """LMCache's chunks in a file, oldest first; the names beside them are far smaller."""
    with path.open("rb") as medium:
        found = kvd_reader.open_medium(medium).blocks()
        blocks = [block for block in found if block.length > 4096]
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
    whole = lmcache.rot()
    # A restart between two heartbeats would go unnoticed, and nobody would register anew.
    wait_until_degraded(vllm, 2)
    lmcache.start_with("adapter")
    wait_until_degraded(vllm, 0)
    served = ask(first)
    assert served.cached_tokens == CACHED
    assert_same(served, computed[0])

    # Its load fails; what lies before it is kept, the rest is computed again.
    served = ask(second)
    assert served.cached_tokens == whole * CHUNK
    assert_same(served, computed[1])
    lmcache.empty_dram()
    served = ask(second)
    assert served.cached_tokens == CACHED
    assert_same(served, computed[1])
