#!/usr/bin/env python3
"""Compares how many faults the tests catch at two commits of this repository.

    tests/mutants.py BEFORE AFTER    40 mutants of BEFORE, each at both commits
    tests/mutants.py --table         what was found so far

The mutants are those of `cargo mutants --list`, in an order that the hash of BEFORE decides; one
that does not build at AFTER, or whose code is not there any more, is replaced by the next. A mutant
is judged by the Rust tests of its crate, of the crates above it, and by tests/python if the Python
package contains the crate; the first failure ends it. What AFTER does not catch is judged at BEFORE
too: whatever AFTER catches cannot make it the worse one. What was judged is kept in
build/mutants/judged.jsonl, and the same command goes on from there. Needs cargo-mutants
(`cargo install cargo-mutants --locked`), and .venv of this tree with torch (`make package
.venv/.model`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "build/mutants"
JUDGED = STATE / "judged.jsonl"
COUNT = 40
# Seconds after which a command is taken for one that hangs.
LIMIT = 3600
PYTHON = "kvdepot-python"
# The first has no Rust tests, the second those of house rules.
NO_RUST_TESTS = {PYTHON, "kvdepot-dev"}
# Crates of tests and benchmarks.
NO_PRODUCT = ("dev", "testkit", "peers")
FAILED = re.compile(r"^test (\S+) \.\.\. FAILED|^FAILED (tests/\S+)|^(error\S*:? .*)", re.MULTILINE)


def output(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


class Side:
    """One of the two commits: a work tree, its build, and its Python package."""

    def __init__(self, name: str, commit: str) -> None:
        self.name, self.tree = name, STATE / name
        self.commit = output(["git", "rev-parse", f"{commit}^{{commit}}"], ROOT).strip()
        if not self.tree.exists():
            clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT)]
            subprocess.run([*clone, str(self.tree)], check=True)
            switch = ["git", "checkout", "--quiet", "--detach", self.commit]
            subprocess.run(switch, cwd=self.tree, check=True)
        if output(["git", "rev-parse", "HEAD"], self.tree).strip() != self.commit:
            sys.exit(f"{self.tree} is of another commit: remove it, and {JUDGED}")
        self.restore()
        self.log = STATE / f"{name}.log"

    def restore(self) -> None:
        subprocess.run(["git", "checkout", "--quiet", "--", "."], cwd=self.tree, check=True)

    def run(self, command: list[str], **variables: str) -> bool:
        """Whether a command ends well in time; its output is in the log."""
        own = {
            "CARGO_TARGET_DIR": str(STATE / f"target-{self.name}"),
            "CARGO_PROFILE_DEV_DEBUG": "0",
        }
        with self.log.open("w") as sink:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env={**os.environ, **own, **variables},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(LIMIT) == 0
            except subprocess.TimeoutExpired:
                print(f"longer than {LIMIT} s", file=sink)
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def said(self) -> str:
        found = FAILED.search(self.log.read_text(errors="replace"))
        return next(filter(None, found.groups()))[:200] if found else "no name, see the log"

    def judge(self, mutant: dict[str, Any] | None, crates: list[str], has_python: bool) -> str:
        """`caught: …`, `survived`, `unbuildable` or `gone`; without a mutant, of the commit."""
        self.restore()
        if mutant:
            patch = ["patch", "--silent", "--fuzz=0", "--no-backup-if-mismatch", mutant["file"]]
            done = subprocess.run(
                patch, input=mutant["diff"], cwd=self.tree, text=True, capture_output=True
            )
            if done.returncode:
                (self.tree / f"{mutant['file']}.rej").unlink(missing_ok=True)
                self.restore()
                return "gone"
        try:
            return self._judge(crates, has_python)
        finally:
            self.restore()

    def _judge(self, crates: list[str], has_python: bool) -> str:
        # The mutant's own crate first, which catches most of them.
        for some in filter(None, (crates[:1], crates[1:])):
            test = ["cargo", "test", *(word for one in some for word in ("-p", one))]
            if not self.run([*test, "--no-run"]):
                return "unbuildable"
            # Stops behind the first program that fails.
            if not self.run(test):
                return f"caught: {self.said()}"
        if not has_python:
            return "survived"
        site, wheels = STATE / f"site-{self.name}", STATE / f"wheels-{self.name}"
        for folder in (site, wheels):
            shutil.rmtree(folder, ignore_errors=True)
        tools, python = ROOT / ".venv/bin", str(ROOT / ".venv/bin/python")
        build = [str(tools / "maturin"), "build", "--profile", "dev", "--quiet"]
        if not self.run([*build, "--interpreter", python, "--out", str(wheels)]):
            return "unbuildable"
        wheel = str(next(wheels.glob("*.whl")))
        put = [str(tools / "uv"), "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        if not self.run([*put, "--python", python, wheel]):
            return "unbuildable"
        tests = [python, "-m", "pytest", "-x", "-q", "-m", "not alone", "tests/python"]
        # Before the package of .venv.
        return "survived" if self.run(tests, PYTHONPATH=str(site)) else f"caught: {self.said()}"


def crates_above(tree: Path) -> dict[str, set[str]]:
    """Each crate with those that are built upon it, and itself."""
    told = json.loads(output(["cargo", "metadata", "--format-version=1", "--no-deps"], tree))
    needs = {
        one["name"]: {need["name"] for need in one["dependencies"] if need["kind"] is None}
        for one in told["packages"]
    }
    above = {name: {name} for name in needs}
    for _ in needs:
        for name, of in needs.items():
            for lower in of & above.keys():
                above[lower] |= above[name]
    return above


def drawn(before: Side) -> list[dict[str, Any]]:
    """All that cargo-mutants proposes, in the order of the draw; it is made once."""
    file = STATE / f"drawn-{before.commit[:12]}.json"
    if not file.exists():
        mutants = ["cargo", "mutants", "--list", "--json", "--diff", "--workspace"]
        others = [word for one in NO_PRODUCT for word in ("--exclude", f"crates/{one}/**")]
        rows = json.loads(output([*mutants, *others], before.tree))
        rows.sort(key=lambda row: row["name"])
        random.Random(before.commit).shuffle(rows)
        wanted = [{name: row[name] for name in ("name", "file", "diff")} for row in rows]
        file.write_text(json.dumps(wanted))
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def judged() -> list[dict[str, Any]]:
    return [json.loads(line) for line in JUDGED.read_text().splitlines()] if JUDGED.exists() else []


def counts(row: dict[str, Any]) -> bool:
    return row["after"] not in ("unbuildable", "gone")


def table() -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for row in filter(counts, judged()):
        print(f"{row['mutant']}\n    after:  {row['after']}")
        if before := row.get("before"):
            print(f"    before: {before}")
        outcomes[row["after"].split(":")[0]] += 1
        outcomes["survived at AFTER, caught at BEFORE"] += str(before).startswith("caught")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))


def compare(before: Side, after: Side) -> None:
    above, mutants = crates_above(before.tree), drawn(before)
    rows = {row["mutant"]: row for row in judged()}
    for place, mutant in enumerate(mutants):
        if sum(map(counts, rows.values())) >= COUNT:
            break
        if mutant["name"] in rows:
            continue
        own = "kvdepot-" + Path(mutant["file"]).parts[1]
        # Itself first.
        crates = sorted(above[own] - NO_RUST_TESTS, key=lambda name: (name != own, name))
        has_python = PYTHON in above[own]
        row: dict[str, Any] = {"mutant": mutant["name"], "place": place}
        for side in (after, before):
            began = time.monotonic()
            row[side.name] = side.judge(mutant, crates, has_python)
            row[f"{side.name}_s"] = round(time.monotonic() - began)
            print(f"{place} {side.name}: {row[side.name]} ({mutant['name']})", flush=True)
            if row[side.name] != "survived":
                break
        rows[mutant["name"]] = row
        with JUDGED.open("a") as file:
            print(json.dumps(row), file=file)


def main() -> None:
    about, more = __doc__.split("\n\n", 1)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="BEFORE and AFTER")
    parser.add_argument("--table", action="store_true", help="only print what was found")
    parser.add_argument("--sound", action="store_true", help="judge both commits as they are")
    given = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    if not given.table:
        if len(given.commits) != 2:
            parser.error("BEFORE and AFTER")
        names = ("before", "after")
        sides = [Side(name, one) for name, one in zip(names, given.commits, strict=True)]
        if given.sound:
            every = sorted(crates_above(sides[0].tree).keys() - NO_RUST_TESTS)
            for side in sides:
                print(f"{side.name}: {side.judge(None, every, has_python=True)}", flush=True)
            return
        compare(*sides)
    table()


if __name__ == "__main__":
    main()
