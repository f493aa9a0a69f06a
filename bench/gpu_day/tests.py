"""Runs pytest and prints its counts as one row: `python -m gpu_day.tests ARGUMENT...`."""

from __future__ import annotations

import json
import re
import subprocess
import sys


def main() -> int:
    """Run pytest with the arguments, and show its output on stderr."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        for line in run.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            last = line if line.strip() else last
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+?)s?\b[, ]", last)}
    row = {
        "bench": "gpu_day",
        "case": {"tests": " ".join(sys.argv[1:])},
        "metric": "passed",
        "unit": "tests",
        "value": counts.get("passed", 0),
    }
    others = {name: counts.get(name, 0) for name in ("failed", "skipped", "error")}
    print(json.dumps(row | others), flush=True)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
