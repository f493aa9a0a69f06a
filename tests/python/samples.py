"""The samples of a page: its fences, and what its source says about each.

A comment directly above a fence, which no reader sees, says how it is run:

    <!-- before: truncate -s 64GiB /dev/dax0.0 -->   a command that makes what the sample stands on
    <!-- after: assert ok == [True] -->              Python that looks at what it did
    <!-- file: worker.py -->                         it is a file, which a later sample runs
    <!-- not run: needs a model -->                  it is checked as far as it can be
    <!-- needs: torch, a model -->                   it is run where these modules are installed,
                                                     and the model, which lies beside it then

Paths of a machine are moved below a directory of the test. GiB become MiB, but for a real model.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvdepot
import pytest
from kvdepot.lmcache import settings as lmcache_settings
from kvdepot.vllm import settings as vllm_settings
from real_model import FILE, REASON, smollm

# It comes with the engines, which `make build` does not install.
yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).parents[2]

# What no tool reads: drawings, and what a command prints.
PROSE = {"", "text", "mermaid"}
SHELL = {"console", "sh", "bash"}
MARKS = {"before", "after", "file", "not run", "needs"}
MODEL = "a model"
# To read its file alone takes most of a minute.
LATER = "the model is read with KVDEPOT_TEST_ALL=1"

PATHS = re.compile(r"/(?:mnt|run|etc|dev/dax)(?=[/\d])[\w./-]*")
SECONDS = 60

# Runs what it is told in one scope, and answers with what went wrong.
DRIVER = """
import io, json, os, sys, traceback
told, answers = sys.stdin, os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
scope = {"__name__": "__main__"}
for line in told:
    name, source = json.loads(line)
    try:
        exec(compile(source, name, "exec"), scope)
        error = ""
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Sample:
    """One fence."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def lacks(self) -> str:
        """Why it cannot be run here; empty where it can."""
        for name in self.marks.get("needs", "").split(", "):
            if name == MODEL and smollm() is None:
                return REASON
            if name == MODEL and os.environ.get("KVDEPOT_TEST_ALL") != "1":
                return LATER
            if name not in ("", MODEL) and importlib.util.find_spec(name) is None:
                return f"{name} is not installed"
        return ""


def pages() -> list[str]:
    """The pages that are for readers, from the repository's root."""
    found = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    return sorted(str(page.relative_to(REPOSITORY)) for page in found)


def samples(page: str, text: str | None = None) -> list[Sample]:
    """The fences of a page, but for those that are prose."""
    lines = iter(enumerate((text or (REPOSITORY / page).read_text()).splitlines(), 1))
    found, marks = [], {}
    for number, line in lines:
        if comment := re.fullmatch(r"<!-- ([a-z ]+): (.*) -->", line):
            marks[comment[1]] = comment[2]
        elif fence := re.fullmatch(r"( *)```(\w*)", line):
            inside = [one.removeprefix(fence[1]) for one in _until_fence(lines)]
            if fence[2] not in PROSE:
                wrong = marks.keys() - MARKS
                assert not wrong, f"{page}:{number}: {wrong}"
                found.append(Sample(page, number, fence[2], "\n".join(inside) + "\n", marks))
            marks = {}
        elif line.strip():
            marks = {}
    return found


def _until_fence(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == "```":
            return
        yield line
    raise AssertionError("a fence without an end")


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console, each with what it prints."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append([line[2:], ""])
        elif _goes_on(found[-1][0]):
            found[-1][0] += "\n" + line
        else:
            found[-1][1] += line + "\n"
    return [(command, printed) for command, printed in found]


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


@dataclass
class Stage:
    """Where the samples of one page are run, one after the other."""

    root: Path
    interpreter: Sequence[str] = (sys.executable,)
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    python: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        tools = self.root / "bin"
        tools.mkdir()
        command = tools / "kvdepot"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdepot "$@"\n')
        command.chmod(0o755)
        self.variables = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.root),
            "XDG_CACHE_HOME": str(self.root / "cache"),
        }

    def small(self, text: str, unit: str = "MiB") -> str:
        """The same with paths of this stage and, for GiB, little data."""

        def moved(path: re.Match[str]) -> str:
            place = self.root / path[0].lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            return str(place)

        return re.sub(r"(\d ?)GiB", r"\1" + unit, PATHS.sub(moved, text))

    def run(self, sample: Sample) -> None:
        """Run a sample; what is marked is only checked."""
        if before := sample.marks.get("before"):
            self.shell(self.small(before))
        # A real model's rows need the space that the page gives them.
        is_real = MODEL in sample.marks.get("needs", "")
        text = self.small(sample.text, "GiB" if is_real else "MiB")
        if is_real and (model := smollm()) and not (self.root / FILE).exists():
            (self.root / FILE).symlink_to(model)
        if name := sample.marks.get("file"):
            (self.root / name).write_text(text)
        elif "not run" in sample.marks or sample.lacks():
            check(sample, text)
            if sample.lacks():
                return
            if sample.language == "console":
                self.console([one for one in commands(text) if one[0].startswith("kvdepot ")])
        elif sample.language == "python":
            self.execute(sample, text)
        elif sample.language == "console":
            self.console(commands(text))
        elif sample.language in SHELL:
            self.shell(text)
        elif sample.language == "yaml":
            path = self.root / "sample.yaml"
            path.write_text(text)
            kvdepot.open(path).close()
        else:
            raise AssertionError(f"nothing runs {sample.language}: say why, by a mark")
        if after := sample.marks.get("after"):
            self.execute(sample, self.small(after))

    def execute(self, sample: Sample, source: str) -> None:
        if self.python is None:
            self.python = self.start([*self.interpreter, "-c", DRIVER], stdin=subprocess.PIPE)
        assert self.python.stdin
        assert self.python.stdout
        # Its lines are those of the page.
        place = (sample.page, "\n" * sample.line + source)
        print(json.dumps(place), file=self.python.stdin, flush=True)
        error = json.loads(self.python.stdout.readline() or '"the process ended"')
        assert not error, f"{sample}: {error}"

    def shell(self, script: str) -> str:
        run = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.root,
            env=self.variables,
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        return run.stdout

    def console(self, run: list[tuple[str, str]]) -> None:
        for command, printed in run:
            if not command.startswith("kvdepot serve "):
                answer = self.shell(command)
                assert not printed or answer == printed
                continue
            server = self.start(["bash", "-euc", f"exec {command}"])
            self.servers.append(server)
            assert server.stdout
            first = server.stdout.readline()
            assert first.startswith("serving "), first
            assert not printed or first == printed

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.variables,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def close(self) -> None:
        """End what runs."""
        try:
            if self.python is not None:
                self.python.communicate(timeout=SECONDS)
                assert self.python.returncode == 0
        finally:
            for server in self.servers:
                server.send_signal(signal.SIGTERM)
                server.communicate(timeout=SECONDS)


def check(sample: Sample, text: str) -> None:
    """Look at the text of a sample that is not run, as far as that goes."""
    if sample.language == "python":
        compile(text, str(sample), "exec")
    elif sample.language == "json":
        check_settings(json.loads(text))
    elif sample.language == "yaml":
        check_settings(yaml.safe_load(text))
    elif sample.language == "ini":
        configparser.ConfigParser().read_string(text)
    elif sample.language in SHELL:
        console = sample.language == "console"
        script = text if not console else "\n".join(one for one, _ in commands(text))
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        words = shlex.split(script, comments=True)
        for word in words:
            if word.startswith("{"):
                check_settings(json.loads(word))
        targets = {words[at + 1] for at, word in enumerate(words) if word == "make"}
        makefile = (REPOSITORY / "Makefile").read_text()
        missing = {one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)}
        assert not missing, f"{sample}: no such target: {missing}"
    elif sample.language == "cpp":
        headers = (REPOSITORY / "crates/capi/include").iterdir()
        declared = "\n".join(header.read_text() for header in headers)
        names = set(re.findall(r"\bkvd_\w+|(?<=kvdepot::)\w+|(?<=\.)\w+(?=\()", text))
        missing = {
            one for one in names - {"data", "size"} if not re.search(rf"\b{one}\b", declared)
        }
        assert not missing, f"{sample}: in no header: {missing}"
    else:
        raise AssertionError(f"nothing checks {sample.language}")


def check_settings(found: Any) -> None:
    """Read what is kvdepot's among the settings of an engine."""
    if isinstance(found, list):
        for one in found:
            check_settings(one)
    if not isinstance(found, dict):
        return
    if found.get("type") == "KvdepotTier":
        vllms = ("type", "module_path", "backpressure")
        own = {name: value for name, value in found.items() if name not in vllms}
        # With kvdepot's connector, which writes this, `weights` need not be given.
        vllm_settings.read_tier({"engine": ""} | own)
    elif "pipeline" in found:
        vllm_settings.read(found)
    elif "kvdepot.lmcache" in map(str, found.values()):
        lmcache_settings.read(found.get("adapter_params", {}))
    elif any(str(name).startswith("storage_plugin.") for name in found):
        own = {name: value for name, value in found.items() if name.startswith("dax.")}
        lmcache_settings.read(own)
    elif found.get("kv_connector") == "KvdepotConnector":
        vllm_settings.read(found.get("kv_connector_extra_config", {}))
    else:
        for one in found.values():
            check_settings(one)
