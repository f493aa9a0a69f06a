"""LMCache's own tools over kvdepot. They return 0 on misses: their counts are read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from vllm_demo.server import free_port

from . import mp

LMCACHE = [*forks.command(), "-m", "lmcache.cli.main"]
ENVIRONMENT = {**os.environ, "LMCACHE_DISABLE_BANNER": "1"}
DRAM = ["--l1-size-gb", "0.125", "--eviction-policy", "LRU", "--no-l1-use-lazy"]
PATIENCE_S = 240


def run(*arguments: str, cwd: Path) -> str:
    """What a command of LMCache's writes."""
    done = subprocess.run(
        [*LMCACHE, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(output: str) -> dict[str, Any]:
    """The JSON document between a tool's other lines."""
    begin = output.index("\n{\n") + 1
    found, _ = json.JSONDecoder().raw_decode(output[begin:])
    return dict(found["metrics"])


@pytest.mark.parametrize("surface", list(mp.SURFACES))
def test_every_key_of_its_adapter_benchmark_succeeds(surface: str, tmp_path: Path):
    output = run(
        "bench", "l2", "--l2-adapter", mp.spec(surface, tmp_path), "--format", "json",
        "--num-keys", "8", "--data-size-kb", "256", "--in-flight", "2", "--rounds", "3",
        "--no-skip-verify", "--lookup-max-hit-rate", "1.0",
        cwd=tmp_path,
    )  # fmt: skip
    rows = [row for name, row in metrics(output).items() if name.startswith("op_")]
    assert [row["operation"] for row in rows] == ["Store", "Lookup", "Load"]
    for row in rows:
        assert row["total_success"] == row["total_keys"] == 48, row
        assert row["rounds_timed_out"] == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, Path]]:
    """LMCache's server, which keeps nothing in DRAM, and records its calls; its ports."""
    folder = tmp_path_factory.mktemp("server")
    port, http = free_port(), free_port()
    command = [
        *LMCACHE, "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http),
        *DRAM, "--supported-transfer-mode", "auto", "--shm-name", f"kvdepot-test-{os.getpid()}",
        "--l2-store-policy", "skip_l1", "--l2-adapter", mp.spec("native", folder),
        "--trace-level", "storage", "--trace-output", str(folder / "calls.lct"),
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=folder
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(f"http://127.0.0.1:{http}/healthcheck"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield port, http, folder
    finally:
        end(process)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_the_checksums_of_its_server_benchmark_match(server: tuple[int, int, Path]):
    port, http, folder = server
    output = run(
        "bench", "server", "--mode", "cpu", "--format", "json", "--interval", "0.1",
        "--rpc-url", f"tcp://127.0.0.1:{port}", "--url", f"http://127.0.0.1:{http}",
        "--kvcache-shape-spec", "(2,256,16,4,64):float32:8", "--num-blocks", "256",
        "--num-tokens", "700", "--end", "2",
        cwd=folder,
    )  # fmt: skip
    results = metrics(output)["results"]
    assert results["checksum_ok"] == results["total_requests"] == 2, output
    # Its second pass found the chunks in kvdepot: nothing else has them.
    assert output.count("LOOKUP: 2/2 chunks hit") >= 2, output


def test_its_trace_is_replayed_without_a_failed_record(server: tuple[int, int, Path]):
    _, _, folder = server
    replayed = folder / "replayed"
    replayed.mkdir()
    output = run(
        "trace", "replay", str(folder / "calls.lct"), *DRAM,
        "--l2-adapter", mp.spec("native", replayed),
        cwd=replayed,
    )  # fmt: skip
    counts = dict(re.findall(r"^Records (\w+): +(\d+)$", output, re.MULTILINE))
    assert int(counts.pop("replayed")) > 0, output
    assert counts == {"failed": "0", "skipped": "0"}, output
