"""LMCache's own server with kvdepot below it, and vLLM's connector to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_demo.server import free_port


class LMCacheServer:
    """`lmcache server`, which can be started again at the same ports with another adapter."""

    command: Sequence[str] = (str(Path(sys.executable).parent / "lmcache"),)

    def __init__(self, folder: Path, l1_gib: float) -> None:
        self.folder = folder
        self.l1_gib = l1_gib
        self.port, self.http = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, adapter: str | None, *options: str) -> None:
        """Start it with this `--l2-adapter` and further options, and wait until it answers."""
        command = [
            *self.command, "server",
            "--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http),
            "--l1-size-gb", str(self.l1_gib), "--eviction-policy", "LRU", "--no-l1-use-lazy",
            "--supported-transfer-mode", "auto", "--shm-name", f"kvdepot-e2e-{os.getpid()}",
            *(() if adapter is None else ("--l2-adapter", adapter)), *options,
        ]  # fmt: skip
        log = self.folder / "lmcache.log"
        environment = {**os.environ, "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder, env=environment
            )
        deadline = time.monotonic() + 300
        while True:
            try:
                self.ask("/healthcheck")
                return
            except OSError as error:
                ended = self.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"lmcache server: {log.read_text()[-4000:]}") from error
                time.sleep(0.2)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def ask(self, path: str, method: str = "GET") -> Any:
        """One answer of its HTTP interface."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def settle(self) -> None:
        """Wait until nothing is on its way to kvdepot or held by a reader."""
        deadline = time.monotonic() + 60
        while self._busy():
            if time.monotonic() > deadline:
                raise RuntimeError(f"lmcache server is still busy: {self.ask('/status')}")
            time.sleep(0.1)

    def empty_dram(self) -> None:
        """Once all of it is in kvdepot, so that only kvdepot has it."""
        self.settle()
        self.ask("/cache/clear", "POST")
        left = self._dram()["total_object_count"]
        if left:
            raise RuntimeError(f"{left} chunks are still in LMCache's DRAM")

    def transfer(self) -> str:
        """vLLM's `--kv-transfer-config` for it."""
        return json.dumps(
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": self.port,
                },
            }
        )

    def _dram(self) -> Any:
        return self.ask("/status")["storage_manager"]["l1_managers"]["_default"]

    def _busy(self) -> bool:
        status = self.ask("/status")["storage_manager"]
        stores = status["store_controllers"].values()
        moving = sum(one["in_flight_task_count"] + one["pending_keys_count"] for one in stores)
        dram = self._dram()
        return bool(moving or dram["write_locked_count"] or dram["read_locked_count"])
