"""The demo itself: what it writes, and that nothing of it survives Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_harness import ROOT


def demo(directory: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm_demo"),
        *("--work", str(directory / "work"), "--json", str(directory / "demo.json")),
        *arguments,
    ]


def servers_under(directory: Path) -> list[int]:
    """Processes of servers that serve a model in `directory`, and of their sessions."""
    sessions = set()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found.append((int(entry.name), int(fields[3]), fields[0]))
                if str(directory).encode() in (entry / "cmdline").read_bytes():
                    sessions.add(int(fields[3]))
            except OSError:
                continue
    return [pid for pid, session, state in found if session in sessions and state not in "ZX"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_survives_an_interruption(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        demo(tmp_path, "--prompts", "1000:1"),
        cwd=ROOT / "examples",
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "starting: " in line:
            break
    # In the middle of a start there are several processes, some just forked.
    time.sleep(12)
    assert servers_under(tmp_path)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert servers_under(tmp_path) == []


@pytest.mark.stress
def test_the_table_and_its_json(tmp_path: Path) -> None:
    done = subprocess.run(
        demo(tmp_path, "--prompts", "1000:2", "2040:1"),
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["identical_tokens"]
    assert figures["max_logprob_difference"] <= 1e-3
    assert figures["cached_tokens_hit"] == figures["cached_tokens_restart"] == 2 * 896
    assert figures["cached_tokens_hit_2k"] == 1920
    for key in ("full", "own_cache", "hit", "restart", "miss", "baseline_miss"):
        assert figures[f"{key}_ms"] > 0
    assert figures["miss_path_ms"] > 0
    assert figures["miss_cpu_ms"] > 0
