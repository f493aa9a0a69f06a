#!/usr/bin/env python3
"""Runs the tests again and again beside two programs that compute and one that writes to the disk,
and prints what failed how often.

    tests/repeat.py N        `make test`, until it has run N times
    tests/repeat.py --each   each test of threads, forks or sockets by itself: 200 times where it
                             takes under 1 s, 50 times under 5 s, 10 times above

What has run is kept in build/repeat, and the same command goes on from there; --again forgets it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "build/repeat"
PYTHON = str(ROOT / ".venv/bin/python")
STEPS = ("test-rust", "test-python")
# Seconds after which a command is taken for one that hangs.
LIMIT = 3600
BUILD = ["cargo", "test", "--quiet", "--workspace", "--exclude", "kvdepot-python", "--no-run"]
# A file says so whose tests may depend on luck.
LUCK = re.compile(
    r"thread|fork|socket|subprocess|child\b|Command|Popen|Tcp(Stream|Listener)|UnixStream|spawn",
    re.IGNORECASE,
)
# pytest's last lines, and those of the runner of the Rust tests: `FAILED crate program: test`.
FAILED = re.compile(
    r"^(?:FAILED|ERROR) (tests/[^\[\s]+(?:\[.*?\](?= - |$))?)"
    r"|^FAILED ((?:documentation|\S+ \S+): .+)$",
    re.MULTILINE,
)
DURATION = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.+)$", re.MULTILINE)


@contextlib.contextmanager
def load() -> Iterator[None]:
    """What the tests run beside; it ends with the block, and with this process."""
    written = STATE / "written"
    writes = f"while :; do dd if=/dev/zero of='{written}' bs=1M count=256 conv=fsync; done"
    commands = [["sh", "-c", "while :; do :; done"]] * 2 + [["sh", "-c", writes]]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen(one, start_new_session=True, **quiet) for one in commands]
    try:
        yield
    finally:
        for one in running:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        written.unlink(missing_ok=True)


class Record:
    """What has run and what has failed, a line of JSON for each."""

    def __init__(self, name: str) -> None:
        self._file = STATE / f"{name}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self._file.open("a") as file:
            print(json.dumps(row), file=file)

    def summary(self, what: str) -> int:
        """Prints it; how many tests have failed."""
        failed = collections.Counter(name for row in self.rows for name in row["failed"])
        print(f"\n{what}; " + ("these have failed:" if failed else "nothing has failed"))
        for name, count in failed.most_common():
            print(f"{count:5} {name}")
        return len(failed)


def run(command: list[str], log: Path, **options: Any) -> list[str]:
    """The names of the tests that fail in a command; its own where it names none."""
    with log.open("w") as sink:
        options |= {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return [f"{' '.join(command)} (longer than {LIMIT} s)"]
        except BaseException:
            # With all that it has started.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                time.sleep(2)
            raise
    if process.returncode == 0:
        return []
    found = [one or other for one, other in FAILED.findall(log.read_text(errors="replace"))]
    return found or [f"{' '.join(command)} (exit status {process.returncode})"]


def suite(times: int) -> int:
    """Runs all of it, until it has run so many times."""
    record = Record("suite")
    while len(record.rows) < times:
        number, failed, began = len(record.rows) + 1, [], time.monotonic()
        for step in STEPS:
            print(f"run {number} of {times}: {step}", flush=True)
            command = ["make", "--no-print-directory", step]
            failed += run(command, STATE / f"{number}-{step}.log", cwd=ROOT)
        record.add(failed=failed, seconds=round(time.monotonic() - began))
    return record.summary(f"{len(record.rows)} runs of {', '.join(STEPS)}")


def rust_tests() -> Iterator[tuple[str, list[str], Path]]:
    """Name, command and folder of each Rust test that may depend on luck."""
    said = subprocess.run(
        [*BUILD, "--message-format", "json"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    for line in said.splitlines():
        built = json.loads(line)
        if not (built.get("profile", {}).get("test") and built.get("executable")):
            continue
        source = Path(built["target"]["src_path"])
        # Of a test program of several files, its folder; of a library, all of it.
        inside = source.parent if source.name in ("main.rs", "lib.rs") else source.with_suffix("")
        files = [source, *inside.rglob("*.rs")]
        if not any(LUCK.search(file.read_text()) for file in files):
            continue
        folder = Path(built["manifest_path"]).parent
        listed = subprocess.run(
            [built["executable"], "--list"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        for name in re.findall(r"^(\S+): test$", listed, re.MULTILINE):
            yield (
                f"{source.relative_to(ROOT)} {name}",
                [built["executable"], "--exact", name],
                folder,
            )


def python_tests() -> Iterator[tuple[str, float]]:
    """Each Python test that may depend on luck, and how many seconds it takes."""
    files = sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if LUCK.search(file.read_text())
    )
    log = STATE / "durations.log"
    run([PYTHON, "-m", "pytest", "-vv", "--durations=0", *files], log, cwd=ROOT)
    if not re.search(r"^=+ .*\d+ passed.* =+$", log.read_text(errors="replace"), re.MULTILINE):
        sys.exit(f"the Python tests did not run to their end: see {log}")
    seconds: collections.Counter[str] = collections.Counter()
    for took, name in DURATION.findall(log.read_text(errors="replace")):
        seconds[name] += float(took)  # type: ignore[assignment]
    yield from seconds.items()


def times(seconds: float) -> int:
    return 200 if seconds < 1 else 50 if seconds < 5 else 10


def listed() -> list[dict[str, Any]]:
    """The tests that run by themselves, found once."""
    file = STATE / "tests.json"
    if not file.exists():
        rows: list[dict[str, Any]] = [
            {"name": name, "seconds": took} for name, took in python_tests()
        ]
        rows += [
            {"name": name, "command": command, "folder": str(folder)}
            for name, command, folder in rust_tests()
        ]
        file.write_text(json.dumps(rows))
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def many(test: dict[str, Any], log: Path) -> tuple[int, int]:
    """Runs a test as often as its time says: how often, and how often it failed."""
    if "command" in test:
        began, failed, wanted, count = time.monotonic(), 0, 1, 0
        while count < wanted:
            failed += bool(run(test["command"], log, cwd=test["folder"]))
            count += 1
            if count == 1:
                wanted = times(time.monotonic() - began)
        return count, failed
    command = [PYTHON, "-m", "pytest", "-q", test["name"]]
    wanted = times(test["seconds"])
    if wanted > 10:
        # Most of a process of pytest's is its start.
        environment = {**os.environ, "KVDEPOT_REPEAT": str(wanted)}
        return wanted, len(run(command, log, cwd=ROOT, env=environment))
    return wanted, sum(bool(run(command, log, cwd=ROOT)) for _ in range(wanted))


def each(seconds: float, only: str) -> int:
    """Runs each test by itself, those that have not run yet, for so many seconds."""
    record, end = Record("each"), time.monotonic() + seconds
    ran = {row["test"] for row in record.rows}
    tests = [test for test in listed() if re.search(only, test["name"])]
    for test in tests:
        if test["name"] in ran or time.monotonic() > end:
            continue
        log = STATE / "each.log"
        count, failed = many(test, log)
        print(f"{count:4} runs, {failed} failed: {test['name']}", flush=True)
        if failed:
            shutil.copy(log, STATE / f"failed-{len(record.rows)}.log")
        record.add(test=test["name"], runs=count, failed=[test["name"]] * failed)
    left = len({test["name"] for test in tests} - {row["test"] for row in record.rows})
    return record.summary(f"{len(record.rows)} tests have run, {left} are left")


def main() -> int:
    about, usage = __doc__.split("\n\n", 1)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=about, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", nargs="?", type=int, help="runs of the suite")
    parser.add_argument("--each", action="store_true", help="each test by itself")
    parser.add_argument("--again", action="store_true", help="forget what has run")
    parser.add_argument("--seconds", type=float, default=8 * 3600.0, help="--each ends after them")
    parser.add_argument("--only", default="", help="a pattern of the names that --each takes")
    given = parser.parse_args()
    if given.each == bool(given.times):
        parser.error("one of N and --each")
    if given.again:
        shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir(parents=True, exist_ok=True)
    # In a background job of a shell, Ctrl-C is ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    # Everything is built before the load begins.
    make = ["make", "--no-print-directory", ".venv/.package-test", ".venv/.model", ".venv/.lmcache"]
    for command in (make, BUILD):
        subprocess.run(command, cwd=ROOT, check=True)
    with load():
        return bool(each(given.seconds, given.only) if given.each else suite(given.times))


if __name__ == "__main__":
    sys.exit(main())
