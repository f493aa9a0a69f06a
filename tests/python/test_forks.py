"""A forked process behaves like one that `python` starts, with and without the imports ahead."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

PROGRAM = """
import os, sys
print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ["SAID"], __name__)
sys.exit(3)
"""


@pytest.fixture(params=["forked", "alone"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    if request.param == "alone":
        monkeypatch.delenv(forks.VARIABLE, raising=False)
        yield forks.command(forks.NOTHING)
        return
    with tempfile.TemporaryDirectory(prefix="kvd") as folder:
        command = [sys.executable, forks.__file__, "serve", folder, forks.NOTHING]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as serving:
            assert serving.stdout
            assert serving.stdout.readline()
            monkeypatch.setenv(forks.VARIABLE, folder)
            yield forks.command(forks.NOTHING)
            serving.kill()


@pytest.mark.parametrize("form", ["-c", "-m", "file"])
def test_a_program_has_what_it_was_given(python: list[str], form: str, tmp_path: Path) -> None:
    file = tmp_path / "said.py"
    file.write_text(PROGRAM)
    given = {"-c": ["-c", PROGRAM], "-m": ["-m", "said"], "file": [str(file)]}[form]
    ran = subprocess.run(
        [*python, "-u", *given, "one", "two"],
        input="in",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"SAID": "so"},
    )
    argv = [{"-c": "-c"}.get(form, str(file)), "one", "two"]
    assert ran.stdout == f"{argv} in {tmp_path} so __main__\n"
    assert (ran.returncode, ran.stderr) == (3, "")


def test_a_signal_reaches_it_and_both_end_alike(python: list[str]) -> None:
    waits = "import signal; print(flush=True); signal.pause()"
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [*python, "-c", waits]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            process.send_signal(number)
            # Nobody is left who would write.
            assert process.stdout.read() == b""
        assert process.returncode == -number
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([*python, "-c", dies]).returncode == -signal.SIGKILL


def test_an_error_is_said(python: list[str]) -> None:
    ran = subprocess.run([*python, "-c", "1 / 0"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("\nZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("python", ["forked"], indirect=True)
def test_what_is_forked_has_a_session_from_the_beginning(python: list[str]) -> None:
    reading, writing = os.pipe()
    streams = (0, writing, 2)
    program = ["-c", "import signal; signal.pause()"]
    process = forks.Process(forks.NOTHING, program, streams=streams, new_session=True)
    os.close(writing)
    assert os.getsid(process.pid) == process.pid
    assert process.wait(0) is process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == process.poll() == -signal.SIGTERM
    assert select.select([reading], [], [])[0]
    assert os.read(reading, 1) == b""
    os.close(reading)
