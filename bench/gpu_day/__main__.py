"""Measures everything that needs a GPU, the most important first: `make gpu-day`.

Each slot runs only if its expected duration fits into the rest of --seconds, and its rows are
written to a file in --out as soon as they are measured. The machine needs Python and a CUDA driver.
Parts that `make gpu-pack` packed elsewhere are installed from --pack. Slots whose modules are
missing are skipped, and the table at the end names what is missing. Exit status 1 if a slot failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import program
from program import say
from vllm_device.install import unpack

from gpu_day.slots import SLOTS, Slot

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
# A slot that was measured before is expected to take so much longer.
MARGIN = 1.25
# Between SIGTERM and SIGKILL.
CLEANUP_SECONDS = 10.0
MOCK_DRIVER = ROOT / "crates/testkit/cuda/double.c"


@dataclass(frozen=True)
class Ended:
    """How a slot ended."""

    slot: str
    seconds: float
    rows: int
    state: str
    """`done`, or why not."""

    @property
    def is_failure(self) -> bool:
        """True if the slot ran and did not end well."""
        return self.state.startswith("failed")


def device_name() -> str | None:
    """The name of the first CUDA device; `None` without a driver or without a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(number), 0):
        return None
    return name.value.decode() if not driver.cuDeviceGetName(name, 100, number) else None


def expected_seconds(slot: Slot, device: str, runs: Path) -> float:
    """Duration of the slot on this device: the last measured one, or the slot's own estimate."""
    last = None
    for file in sorted(runs.glob("*-gpu-day.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if row["bench"] == "gpu_day" and row["metric"] == "slot_seconds":
                case = row["case"]
                if (case["slot"], case["device"]) == (slot.name, device) and case["done"]:
                    last = float(row["value"])
    return slot.seconds if last is None else last * MARGIN


class Day:
    """The slots on one machine."""

    def __init__(
        self, options: argparse.Namespace, device: str, rows: IO[str], deadline: float
    ) -> None:
        self._options = options
        self._device = device
        self._rows = rows
        self._deadline = deadline
        self._environment = environment(options)
        self._missing: dict[str, bool] = {}
        self.cut: Callable[[], None] = lambda: None
        """Ends the present slot, as its timer does when the time is over."""

    def run(self) -> list[Ended]:
        """Run each slot that fits, in order."""
        ended = []
        for slot in SLOTS:
            if self._options.slot and slot.name not in self._options.slot:
                continue
            ended.append(self._attempt(slot))
            say(f"{slot.name}: {ended[-1].state}, {ended[-1].rows} rows")
        return ended

    def _attempt(self, slot: Slot) -> Ended:
        missing = [module for module in slot.modules if self._is_missing(module)]
        if missing:
            return Ended(slot.name, 0, 0, f"skipped: no module {', '.join(missing)}")
        left = self._deadline - time.monotonic()
        device = self._device
        expected = expected_seconds(slot, device, self._options.runs)
        if not self._options.rehearse and expected > left:
            return Ended(
                slot.name, 0, 0, f"skipped: takes {expected:.0f} s, and {max(left, 0):.0f} s remain"
            )
        say(f"{slot.name}: {slot.about} (some {expected:.0f} s; {left:.0f} s remain)")
        begun = time.monotonic()
        rows, state = self._measure(slot, left)
        taken = time.monotonic() - begun
        case = {"slot": slot.name, "device": device, "done": state == "done"}
        self._write(
            {
                "bench": "gpu_day",
                "case": case,
                "metric": "slot_seconds",
                "unit": "s",
                "value": round(taken, 1),
            }
        )
        return Ended(slot.name, taken, rows, state)

    def _measure(self, slot: Slot, left: float) -> tuple[int, str]:
        command = slot.rehearsal if self._options.rehearse else slot.command
        log = self._options.logs / f"{slot.name}.log"
        rows = 0
        cut = threading.Event()
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )

            def end() -> None:
                cut.set()
                kill(process)

            self.cut = end
            timer = threading.Timer(max(left, 1), end)
            timer.start()
            try:
                assert process.stdout
                for line in process.stdout:
                    try:
                        row = json.loads(line)
                    except ValueError:
                        output.write(line)
                        continue
                    self._write(row | {"slot": slot.name})
                    rows += 1
                code = process.wait()
            finally:
                timer.cancel()
                kill(process)
                process.wait()
        if cut.is_set():
            return rows, "failed: the time was over; the rows until then were kept"
        if code:
            return rows, f"failed: exit status {code}, see {log}"
        return rows, "done"

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        os.fsync(self._rows.fileno())

    def _is_missing(self, module: str) -> bool:
        if module not in self._missing:
            check = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
            command = [sys.executable, "-c", check, module]
            ran = subprocess.run(command, env=self._environment, cwd=ROOT, check=False)
            self._missing[module] = ran.returncode != 0
        return self._missing[module]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment of all slots."""
    paths = [str(BENCH), str(ROOT / "examples"), str(ROOT / "tests/python")]
    paths += [str(ROOT / "tests/engine")]
    if options.site.is_dir():
        paths.insert(0, str(options.site.resolve()))
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    given = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The packed part of vLLM has no FlashInfer.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if options.rehearse:
        driver = mock_driver(options.work)
        given |= {
            "KVDEPOT_CUDA_LIBRARY": str(driver),
            "KVDEPOT_CUDA_DOUBLE": "instant",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
    return os.environ | given


def mock_driver(work: Path) -> Path:
    """Build the CUDA driver that runs on the CPU."""
    library = work / "cuda-double.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-pthread", "-o", str(library), str(MOCK_DRIVER)]
    subprocess.run(command, check=True)
    return library


def install(options: argparse.Namespace) -> None:
    """Install the parts of --pack, once."""
    parts = sorted(options.pack.glob("part*.tar.xz"))
    marker = options.site / ".parts"
    names = "\n".join(f"{part.name} {part.stat().st_size}" for part in parts)
    if not parts or (marker.is_file() and marker.read_text() == names):
        return
    say(f"installing {len(parts)} parts of {options.pack} into {options.site}")
    unpack(options.pack, options.site)
    marker.write_text(names)


def kill(process: subprocess.Popen[str]) -> None:
    """End a slot's process with all its descendants; nothing if it has ended.

    After SIGTERM, the benchmarks end their engines and remove their files.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLEANUP_SECONDS)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = program.parser("gpu_day", __doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        help="time limit of all slots together, in seconds (default: 540; with --rehearse: 3600)",
    )
    parser.add_argument(
        "--slot",
        action="append",
        choices=[slot.name for slot in SLOTS],
        help="slot to run; repeatable (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="print the slots, and exit")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every slot with small models on the CPU and with a mock CUDA driver",
    )
    parser.add_argument(
        "--pack",
        type=Path,
        default=ROOT / "build/gpu-pack",
        help="folder with the files part*.tar.xz (default: build/gpu-pack)",
    )
    parser.add_argument(
        "--site",
        type=Path,
        default=ROOT / "build/gpu-site",
        help="folder to install --pack into (default: build/gpu-site)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=BENCH / "runs",
        help="folder for the file with the rows (default: bench/runs)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=BENCH / "runs",
        help="folder with the rows of earlier days, for the expected durations "
        "(default: bench/runs)",
    )
    options = parser.parse_args(arguments)
    options.work = ROOT / "build/gpu-day"
    options.logs = options.out / "logs" if options.out != BENCH / "runs" else options.work
    if options.seconds is None:
        options.seconds = 3600.0 if options.rehearse else 540.0
    if options.seconds <= 0:
        parser.error("--seconds is above 0")
    return options


def main() -> int:
    """Run the slots, and print the table."""
    options = options_of()
    device = "rehearsal" if options.rehearse else device_name()
    if options.list:
        for slot in SLOTS:
            expected = expected_seconds(slot, device or "", options.runs)
            print(f"{slot.name:<16}{expected:>5.0f} s  {slot.about}")
        return 0
    if device is None:
        print(
            "no CUDA device: the driver (libcuda.so.1) is missing or reports none; "
            "--rehearse runs the slots on the CPU",
            file=sys.stderr,
        )
        return 1
    program.unwind_on_signals()
    for folder in (options.out, options.work, options.logs):
        folder.mkdir(parents=True, exist_ok=True)
    install(options)
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    today = datetime.now(UTC).date().isoformat()
    # A rehearsal's figures are no results.
    folder = options.work if options.rehearse else options.out
    file = folder / f"{today}-{slug}-gpu-day.jsonl"
    try:
        with file.open("a") as rows:
            ended = Day(options, device, rows, program.STARTED + options.seconds).run()
    except KeyboardInterrupt:
        print(f"interrupted; rows until then: {file}", file=sys.stderr)
        return 130
    for one in ended:
        print(f"{one.slot:<16}{one.seconds:>6.0f} s{one.rows:>5} rows  {one.state}")
    print(f"rows: {file}")
    return 1 if any(one.is_failure for one in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
