"""The server's command line: what it takes, refuses, and says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp.server.app")

from kvdepot.llama_cpp import server_options
from llama_cpp.server.settings import Settings


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """The server's process, which has to end by itself."""
    command = [sys.executable, "-m", "kvdepot.llama_cpp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        server_options.parse(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.unit
def test_help_names_all_flags_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        server_options.parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in Settings.model_fields)
    assert "default: /cache/kvdepot/llama_cpp" in text
    assert "default: 10GiB for a new directory" in text


@pytest.mark.unit
def test_flags_go_on_to_the_server_and_its_model(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    given = ["--model", str(model), "--n_ctx", "4096", "--port", "8011", "--flash_attn", "true"]
    options = server_options.parse([*given, "--depot", "d", "--capacity", "3GiB"])
    assert (options.depot, options.capacity, options.server.port) == ("d", "3GiB", 8011)
    assert [(one.model, one.n_ctx, one.flash_attn) for one in options.models] == [
        (str(model), 4096, True)
    ]


@pytest.mark.unit
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    good = ["--model", str(model)]
    cases = {
        (): "--model: is required",
        ("--model", "/nowhere/m.gguf"): "--model: '/nowhere/m.gguf' is not a file",
        ("--model", str(tmp_path)): f"--model: {str(tmp_path)!r} is not a file",
        (*good, "--n_ctx", "-1"): "--n_ctx: -1 is not allowed",
        (*good, "--cache", "true"): "--cache: true enables llama-cpp-python's own cache",
        (*good, "--capacity", "many"): "--capacity: 'many' is not a size such as 64GiB",
        (*good, "--depot", "unix:/s", "--capacity", "1GiB"): "use --capacity only with a directory",
        (*good, "--no_such", "1"): "unrecognized arguments: --no_such 1",
        ("--config_file", str(tmp_path / "none.json")): "none.json",
    }
    for arguments, message in cases.items():
        assert message in refused(capsys, *arguments)
    empty = tmp_path / "models.json"
    empty.write_text('{"models": []}')
    assert "config_file: models is empty" in refused(capsys, "--config_file", str(empty))


def test_a_start_that_fails_says_why(server_model: Path, tmp_path: Path) -> None:
    good = ["--model", str(server_model), "--depot", str(tmp_path / "depot")]
    nobody = run("--model", str(server_model), "--depot", f"unix:{tmp_path}/none.sock")
    assert nobody.returncode == 1
    assert f"--depot: 'unix:{tmp_path}/none.sock' cannot be opened" in nobody.stderr
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(server_model.read_bytes()[:1000])
    wrong = run("--model", str(torn), *good[2:])
    assert wrong.returncode == 1
    last = wrong.stderr.splitlines()[-1]
    assert last.startswith("kvdepot: cannot serve the model: ")
    assert str(torn) in last
    file = tmp_path / "file"
    file.write_text("not a directory")
    assert run(*good[:3], str(file)).returncode == 1


def test_the_help_names_the_default_directory_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches/50%b")
    monkeypatch.setenv("COLUMNS", "200")
    assert "(default: /caches/50%b/kvdepot/llama_cpp)" in server_options.parser().format_help()
