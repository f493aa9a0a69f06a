"""Measures vLLM with stored KV data on one CUDA device, with dummy weights of Qwen3-14B's shape.

The benchmark measures the time to the first token of prompts that are computed, hit in vLLM's own
prefix cache, restored by vLLM's CPU offloading, by kvdepot's tiers, or from files after a restart.
Then the benchmark measures the decode rate of a stream while other prompts are computed, stored and
loaded. Each engine is a separate process, and results are printed immediately. vLLM must be
installed for the device (`python bench/vllm_device/install.py --help`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import program
from program import say

from vllm_device.plan import Plan

GIB = 1 << 30
PLAIN = ("computed", "own")
DEPOTS = ("Cache", "Cache|Nvme", "Cache|Posix")
RESTART = "restart"
WAYS = (*PLAIN, "offload", *DEPOTS, RESTART)
QUICK_WAYS = (*PLAIN, "offload", "Cache", "Cache|Posix")
# Tokens of the device's cache beside those that are asked for: a stream, and what is freed late.
SPARE_TOKENS = 6000
SHARE_OF_MEMORY = 0.4
SHARE_OF_DISK = 0.85
SHARED_MEMORY = Path("/dev/shm")
LOG_LINES = 25
QWEN3_14B = {
    "layers": 40,
    "hidden": 5120,
    "heads": 40,
    "kv-heads": 8,
    "head-dim": 128,
    "intermediate": 17_408,
    "vocabulary": 151_936,
}


class ProcessError(Exception):
    """A process of the benchmark has failed, and this is why."""


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = program.parser("vllm_device", __doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="quick run: 4,000 and 10,000 tokens, one at a time, 2 rounds",
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="source of the prompts' KV data; repeatable (default: all)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        action="append",
        help="tokens per prompt, at least 64; repeatable (default: 4000, 10000 and 32000)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        action="append",
        help="requests in flight, 1 to 16; repeatable (default: 1 and 8)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds per number of tokens and of requests (default: 3, or 2 with --quick)",
    )
    parser.add_argument(
        "--decode",
        action=argparse.BooleanOptionalAction,
        help="measure the decode rate while other prompts run (default: yes, except with --quick)",
    )
    parser.add_argument(
        "--decode-tokens",
        type=int,
        default=10_000,
        help="tokens per prompt that runs during --decode, at least 64 (default: 10000)",
    )
    shape = parser.add_argument_group("shape of the model")
    for name, size in QWEN3_14B.items():
        shape.add_argument(
            f"--{name}",
            type=int,
            default=size,
            help=f"{name} in the configuration of the model (default: {size})",
        )
    engine = parser.add_argument_group("engine and tiers")
    engine.add_argument(
        "--batched-tokens",
        type=int,
        default=8192,
        help="maximum number of tokens per step (default: 8192)",
    )
    engine.add_argument(
        "--block-size",
        type=int,
        help="tokens per block of vLLM's own cache (default: vLLM's default)",
    )
    engine.add_argument(
        "--extra",
        type=json.loads,
        default={},
        help="JSON object to add to kv_connector_extra_config of every connector, such as "
        "'{\"blocks_per_chunk\": 4}'",
    )
    engine.add_argument(
        "--host-gib", type=float, help="host memory per tier in GiB (default: as needed)"
    )
    engine.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench-vllm-device"),
        help="folder for the file tiers, on the disk to measure (default: %(default)s)",
    )
    engine.add_argument(
        "--logs", type=Path, help="folder for the logs of the engines (default: logs are deleted)"
    )
    engine.add_argument(
        "--limit",
        type=float,
        default=400.0,
        help="time limit of one process in seconds (default: 400)",
    )
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or ([4000, 10_000] if options.quick else [4000, 10_000, 32_000])
    options.concurrency = sorted(set(options.concurrency or ([1] if options.quick else [1, 8])))
    if options.rounds is None:
        options.rounds = 2 if options.quick else 3
    options.way = options.way or list(QUICK_WAYS if options.quick else WAYS)
    if options.decode is None:
        options.decode = not options.quick
    if min(options.tokens) < 64 or not all(1 <= n <= 16 for n in options.concurrency):
        parser.error("--tokens is at least 64, --concurrency 1 to 16")
    if min(options.rounds, options.layers) < 1 or options.decode_tokens < 64:
        parser.error("--rounds and --layers are at least 1, --decode-tokens at least 64")
    return options


def write_model(folder: Path, options: argparse.Namespace, positions: int) -> None:
    """The configuration of a Qwen3 of this shape; its weights are made up by vLLM."""
    folder.mkdir()
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate,
        "vocab_size": options.vocabulary,
        "max_position_embeddings": positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(shape, indent=1))


def available_memory() -> int:
    """Bytes that this host can give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * GIB


class Bench:
    """All ways, one process after the other."""

    def __init__(self, options: argparse.Namespace, work: Path, folder: Path) -> None:
        self._options = options
        self._work = work
        self._folder = folder
        self._computed: dict[str, float] = {}
        self._failures = 0
        self._token_bytes = options.layers * 2 * options.kv_heads * options.head_dim * 2
        beside = options.decode_tokens if options.decode else 0
        most = max(options.concurrency)
        largest = max(max(options.tokens) * most, beside)
        # Nine prompts beside a stream are computed and stored, and three are loaded.
        held = sum(options.tokens) * most + 12 * beside + 8000
        positions = max(*options.tokens, beside, 4000) + 512
        write_model(work / "model", options, positions)
        least = int((largest + beside + 4000) * self._token_bytes * 1.1) + GIB // 8
        self._host_bytes = min(
            int(held * self._token_bytes * 1.15) + GIB // 2,
            max(int(available_memory() * SHARE_OF_MEMORY), least),
        )
        if options.host_gib:
            self._host_bytes = int(options.host_gib * GIB)
        self._plan = Plan(
            role="plain",
            way="computed",
            model=str(work / "model"),
            vocabulary=options.vocabulary,
            tokens=sorted(set(options.tokens)),
            concurrency=options.concurrency,
            rounds=options.rounds,
            decode_tokens=beside,
            gpu_bytes=(largest + SPARE_TOKENS) * self._token_bytes,
            max_model_len=positions,
            batched_tokens=options.batched_tokens,
            block_size=options.block_size,
        )
        say(
            f"{self._token_bytes / 1024:.0f} KiB of KV a token; {self._plan.gpu_bytes / GIB:.1f} "
            f"GiB on the device, {self._host_bytes / GIB:.1f} GiB in host memory"
        )

    def run(self) -> int:
        """Every way that was asked for; the number of those that failed."""
        ways = self._options.way
        self._attempt(replace(self._plan, role="reference", way="reference"))
        if any(way in PLAIN for way in ways):
            label = " and ".join(way for way in PLAIN if way in ways)
            self._attempt(
                replace(self._plan, way=label, ways=[way for way in PLAIN if way in ways])
            )
        if "offload" in ways:
            # vLLM has it in a file there.
            shared = int(shutil.disk_usage(SHARED_MEMORY).free * 0.9)
            if shared < self._host_bytes:
                say(f"offload: {shared / GIB:.1f} GiB: {SHARED_MEMORY} has no room for more")
            extra = {"cpu_bytes_to_use": min(shared, self._host_bytes)} | self._options.extra
            transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            self._attempt(
                replace(
                    self._plan,
                    role="stored",
                    way="offload",
                    transfer=transfer | {"kv_connector_extra_config": extra},
                )
            )
        for pipeline in DEPOTS:
            restart = pipeline == "Cache|Posix" and RESTART in ways
            if pipeline in ways or restart:
                self._depot(pipeline, measured=pipeline in ways, restart=restart)
        return self._failures

    def _depot(self, pipeline: str, *, measured: bool, restart: bool) -> None:
        """One pipeline of kvdepot's; where it lasts, once more after a restart."""
        place = self._folder / pipeline.replace("|", "-")
        place.mkdir()
        settings: dict[str, Any] = {
            "pipeline": pipeline,
            "on_reset": "verify",
            "cache": {"capacity": self._host_bytes},
        }
        far = pipeline.partition("|")[2].lower()
        if far:
            free = int(shutil.disk_usage(place).free * SHARE_OF_DISK)
            capacity = min(int(self._host_bytes * 1.2) + GIB, free)
            settings[far] = {"path": str(place / far), "capacity": capacity}
        plan = replace(
            self._plan,
            role="stored" if measured else "prime",
            way=f"kvdepot {pipeline}",
            transfer=self._kvdepot(settings),
        )
        if not measured:
            plan = replace(plan, decode_tokens=0)
        stored = self._attempt(plan)
        if restart and stored:
            alone = {name: settings[name] for name in ("on_reset", "posix")}
            # Without the memory before it, where the first round would leave what it has read:
            # every round is from the files.
            transfer = self._kvdepot({"pipeline": "Posix", **alone})
            self._attempt(
                replace(
                    plan,
                    role="restarted",
                    way="kvdepot Posix after a restart",
                    transfer=transfer,
                    decode_tokens=0,
                )
            )
        shutil.rmtree(place, ignore_errors=True)

    def _kvdepot(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            "kv_connector": "KvdepotConnector",
            "kv_connector_module_path": "kvdepot.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings | self._options.extra,
        }

    # ---- processes ---------------------------------------------------------------------------

    def _attempt(self, plan: Plan) -> bool:
        """One process; whether it ended well."""
        say(f"{plan.way}: starts")
        name = plan.way.replace(" ", "-").replace("|", "-")
        log = (self._options.logs or self._work) / f"{name}.log"
        try:
            self._process(plan, log)
        except ProcessError as failed:
            self._failures += 1
            say(f"{plan.way}: FAILED: {failed}")
            with contextlib.suppress(OSError):
                for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
                    print(f"    {line}", file=sys.stderr, flush=True)
            return False
        return True

    def _process(self, plan: Plan, log: Path) -> None:
        reader, writer = os.pipe()
        with log.open("w") as output, os.fdopen(reader) as lines:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "vllm_device.measure", plan.to_json(), str(writer)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writer,),
                    env=self._environment(plan),
                    start_new_session=True,
                )
            finally:
                os.close(writer)
            late = threading.Event()

            def end() -> None:
                late.set()
                kill(process)

            timer = threading.Timer(self._options.limit, end)
            timer.start()
            try:
                for line in lines:
                    self._hear(json.loads(line))
                code = process.wait()
            finally:
                timer.cancel()
                kill(process)
                process.wait()
        if late.is_set():
            raise ProcessError(f"it was ended after {self._options.limit:.0f} s")
        if code:
            raise ProcessError(f"exit status {code}")

    def _environment(self, plan: Plan) -> dict[str, str]:
        given = {
            # The engine's core is in the process that measures.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Block hashes start from it: after a restart they have to be the same.
            "PYTHONHASHSEED": "0",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # The part of vLLM that is carried to a device has no FlashInfer.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        # What the host may know better: it need not have a network at all.
        unless = {
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "VLLM_CPU_KVCACHE_SPACE": str(-(-plan.gpu_bytes // GIB)),
        }
        return unless | os.environ | given

    def _hear(self, message: dict[str, Any]) -> None:
        if "say" in message:
            say(message["say"])
            return
        row = message["row"]
        case = row["case"]
        if row["metric"] == "ttft":
            asked = f"{case['tokens']} {case['concurrency']}"
            if case["way"] == "computed":
                self._computed[asked] = row["value"]
            elif asked in self._computed and row["value"]:
                row["limit"] = self._computed[asked]
                row["ratio"] = round(row["limit"] / row["value"], 2)
        print(json.dumps(row) if self._options.json else line_of(row), flush=True)


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    case = row["case"]
    what = " ".join(
        f"{case[name]} {unit}".strip()
        for name, unit in (("beside", "of"), ("tokens", "tokens"), ("concurrency", "at a time"))
        if name in case
    )
    line = f"{case['way']:<36} {row['metric']:<13} {what:<28} {row['value']:>9} {row['unit']}"
    if row["metric"] == "ttft" and "ratio" in row:
        line += f"  {row['ratio']} times faster than computed"
    if row["metric"] == "decode_rate":
        line += f"  {row['ratio']} of {row['limit']} alone; {row['prompts']} prompts beside it"
    if "cached_tokens" in row:
        line += f"  {row['cached_tokens']} cached"
    served = ", ".join(f"{name} {count}" for name, count in row.get("served", {}).items() if count)
    return f"{line}  ({served})" if served else line


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started; nothing where it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Measure, and print."""
    options = options_of()
    program.unwind_on_signals()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvdepot-") as work,
        tempfile.TemporaryDirectory(prefix="depot-", dir=options.folder.resolve()) as folder,
    ):
        try:
            failures = Bench(options, Path(work), Path(folder)).run()
        except KeyboardInterrupt:
            print("interrupted; the engine has ended", file=sys.stderr)
            return 130
    say(f"done; {failures} processes failed" if failures else "done")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
