"""The package: names, files, configuration files, logs, command, benchmark."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvdepot
import pytest
from kvdepot import bench

Keys = Callable[[int], list[bytes]]


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | variables,
    )


def test_exceptions_form_a_tree() -> None:
    for name in kvdepot.__all__:
        thing = getattr(kvdepot, name)
        assert name == "__version__" or thing.__doc__
        if isinstance(thing, type):
            assert thing.__module__ == "kvdepot"
        if name.endswith("Error"):
            assert issubclass(thing, kvdepot.Error)
    assert issubclass(kvdepot.ConfigError, ValueError)
    assert issubclass(kvdepot.InputError, ValueError)
    assert issubclass(kvdepot.TimeoutError, TimeoutError)
    assert not issubclass(kvdepot.ClosedError, ValueError)


def test_the_package_is_small_and_typed() -> None:
    folder = Path(kvdepot.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "_native.pyi").exists()


def test_an_import_is_quick_and_brings_no_engine() -> None:
    program = (
        "import sys, time; start = time.perf_counter(); import kvdepot;"
        "print(time.perf_counter() - start);"
        "print([name for name in ('torch', 'vllm', 'numpy', 'yaml') if name in sys.modules])"
    )
    runs = [python("-c", program).stdout.splitlines() for _ in range(5)]
    assert {run[1] for run in runs} == {"[]"}
    assert statistics.median(float(run[0]) for run in runs) <= 0.05


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "KvdepotConnector"),
        ("vllm", "KvdepotSpec"),
        ("vllm", "KvdepotTier"),
        ("vllm", "KvdepotTieringConnector"),
        ("lmcache", "KvdepotAdapter"),
        ("lmcache", "KvdepotBackend"),
    ],
)
def test_a_connector_without_its_engine_says_what_is_missing(engine: str, name: str) -> None:
    program = (
        f"import sys; sys.modules[{engine!r}] = None\n"
        f"import kvdepot.{engine}\n"
        f"try: kvdepot.{engine}.{name}\n"
        "except ModuleNotFoundError as missing: print(missing.name.partition('.')[0])"
    )
    assert python("-c", program).stdout.split() == [engine]


@pytest.mark.parametrize(
    "pretend",
    [
        "sys.platform = 'darwin'",
        "sys.platform = 'win32'",
        "import os; u = os.uname(); os.uname = lambda: type(u)((*u[:4], 'riscv64'))",
    ],
)
def test_other_systems_are_told_in_one_sentence(pretend: str) -> None:
    run = python("-c", f"import sys\n{pretend}\nimport kvdepot")
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last == "ImportError: kvdepot runs on Linux on x86-64 and aarch64 only"


@pytest.mark.parametrize("ending", ["yaml", "yml", "json"])
@pytest.mark.parametrize("form", [str, Path, os.fspath])
def test_a_configuration_file(depots: Any, ending: str, form: Callable[[Path], Any]) -> None:
    settings = depots.settings("Cache|Dax", lock_wait="2s")
    path = depots.folder / f"depot.{ending}"
    path.write_text(json.dumps(settings))
    with kvdepot.open(form(path)) as depot:
        assert depot.tiers == ["Cache", "Dax"]
        assert depot.path == settings["dax"]["path"]
        assert depot.socket == settings["socket"]


def test_settings_override_a_file(depots: Any) -> None:
    settings = depots.settings("Cache|Dax")
    path = depots.folder / "depot.yaml"
    path.write_text(
        f"pipeline: Cache|Dax\nsocket: {settings['socket']}\n"
        "cache:\n  capacity: 1MiB\n"
        f"dax:\n  path: {settings['dax']['path']}\n  capacity: 16MiB\n"
    )
    with kvdepot.open(path, {"cache": {"capacity": "4MiB"}, "socket": "off"}) as depot:
        assert depot.socket is None
        assert depot.stats()["tiers"]["Cache"]["capacity_bytes"] == 4 << 20
        assert depot.description == f"Cache 4 MiB | Dax 16 MiB at {depot.path}"
    for wrong, words in [("- 1\n", "mapping"), ("a: [", "YAML"), ("pipline: Cache\n", "pipline")]:
        path.write_text(wrong)
        with pytest.raises(kvdepot.ConfigError, match=words):
            kvdepot.open(path)


def test_paths_may_be_path_objects(depots: Any) -> None:
    settings = depots.settings("Dax")
    settings["dax"]["path"] = Path(settings["dax"]["path"])
    with kvdepot.open("Dax", settings) as depot:
        assert depot.path == str(settings["dax"]["path"])


OPENS = (
    "import kvdepot\n"
    "kvdepot.open('Cache', {'cache': {'capacity': '1MiB'}, 'socket': 'off'}).close()"
)


def test_logs_are_asked_for() -> None:
    quiet = python("-c", OPENS, KVDEPOT_LOG="")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    told = python("-c", OPENS, KVDEPOT_LOG="info")
    assert told.returncode == 0
    assert "INFO" in told.stderr
    assert "depot open" in told.stderr
    assert "Cache 1 MiB" in told.stderr
    wrong = python("-c", OPENS, KVDEPOT_LOG="loud")
    assert wrong.returncode == 1
    assert "ConfigError: KVDEPOT_LOG" in wrong.stderr
    assert '"loud"' in wrong.stderr
    assert "off, error, warn, info, debug or trace" in wrong.stderr


def test_ucms_level_holds_where_kvdepots_is_not_given() -> None:
    told = python("-c", OPENS, UC_LOGGER_LEVEL="INFO")
    assert "depot open" in told.stderr
    for level in ("warning", "critical", "its own word"):
        quiet = python("-c", OPENS, UC_LOGGER_LEVEL=level)
        assert (quiet.returncode, quiet.stderr) == (0, "")
    quiet = python("-c", OPENS, UC_LOGGER_LEVEL="debug", KVDEPOT_LOG="error")
    assert (quiet.returncode, quiet.stderr) == (0, "")


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ("kvdepot.open(PATH, {'cache': {'capacity': '1MiB'}, 'socket': 'off'}).close()", ""),
        # As connectors do.
        ("kvdepot._native._options_of_file(PATH)", 'asked="900 TiB"'),
    ],
)
def test_what_becomes_of_ucms_keys_is_logged(tmp_path: Path, reads: str, says: str) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(
        "ucm_connectors: [{ucm_connector_name: UcmPipelineStore, ucm_connector_config: "
        "{store_pipeline: Cache|Empty, buffer_size: 900TiB, unique_id: x}}]\n"
    )
    program = f"import kvdepot; {reads.replace('PATH', repr(str(path)))}"
    run = python("-c", program, UC_LOGGER_LEVEL="info")
    assert run.returncode == 0
    assert says in run.stderr
    assert 'key="unique_id"' in run.stderr


@pytest.mark.parametrize(
    "reads",
    [
        "kvdepot.open(PATH, {'cache': {'capacity': '1MiB'}, 'socket': 'off'}).close()",
        "kvdepot._native._options_of_file(PATH, {'cache': {'capacity': '1MiB'}})",
    ],
)
def test_a_capacity_beside_ucms_file_is_not_compared_with_the_memory(
    tmp_path: Path, reads: str
) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(
        "ucm_connectors: [{ucm_connector_name: UcmPipelineStore, ucm_connector_config: "
        "{store_pipeline: Cache|Empty, buffer_size: 900TiB}}]\n"
    )
    program = f"import kvdepot; {reads.replace('PATH', repr(str(path)))}"
    run = python("-c", program, UC_LOGGER_LEVEL="info")
    assert run.returncode == 0
    assert "quarter of the available memory" not in run.stderr


def test_a_task_is_logged_twice() -> None:
    program = OPENS.replace(
        ".close()", ".namespace('m', 'f', 1).put([bytes(32)], [b'abc']).wait(30)"
    )
    run = python("-c", program, KVDEPOT_LOG="debug")
    assert run.returncode == 0
    dispatched = next(line for line in run.stderr.splitlines() if "task dispatched" in line)
    finished = next(line for line in run.stderr.splitlines() if "task finished" in line)
    for line in (dispatched, finished):
        for word in ("task=", "op=", "put", "bytes=3", "subtasks=1"):
            assert word in line
    assert "done=1" in finished
    assert re.search(r" ms=\d+(\.\d{1,3})?$", finished), finished


def test_the_command_is_in_the_package(depots: Any, keys: Keys) -> None:
    depot = depots.open("Dax")
    ns = depot.namespace("m", "f", 1)
    ns.put(keys(3), [b"abc"] * 3).wait(30)
    path = depot.path
    depot.close()
    run = python("-m", "kvdepot._cli", "ls", path, "--blocks", "--json")
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["namespace"] for row in rows] == [ns.digest.hex()] * 3
    assert python("-m", "kvdepot._cli", "--help").returncode == 0
    wrong = python("-m", "kvdepot._cli", "lss")
    assert wrong.returncode == 2
    assert "lss" in wrong.stderr


def test_the_package_runs_the_command() -> None:
    run = python("-m", "kvdepot", "doctor", "--help")
    assert run.returncode == 0, run.stderr
    assert "Usage: kvdepot doctor" in run.stdout
    assert python("-m", "kvdepot", "lss").returncode == 2


def test_a_depot_knows_that_it_is_closed(depots: Any) -> None:
    depot = depots.open("Cache")
    assert depot.closed is False
    with kvdepot.open(f"unix:{depot.socket}") as client:
        depot.close()
        assert depot.closed is True
        # Its owner is gone; it is not.
        assert client.closed is False
    assert client.closed is True
    depot.close()
    assert depot.closed is True


def test_the_benchmark_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["index", "--json", "--blocks", "2000", "--rounds", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"]["op"], row["case"]["keys"]) for row in rows] == [
        ("contains", "buffer"),
        ("contains", "list"),
        ("prefix", "buffer"),
        ("prefix", "list"),
    ]
    for row in rows:
        assert row["bench"] == "index"
        assert row["metric"] == "lookups"
        assert row["unit"] == "keys/s"
        assert row["value"] > 100_000
        assert row["limit"] is row["ratio"] is None
        assert row["rounds"] == 2
        assert row["case"]["blocks"] == 2000
    assert bench.main(["index", "--blocks", "2000", "--rounds", "1"]) == 0
    assert "contains" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["index", "--blocks", "1"], ["index", "--rounds", "0"], ["x"]])
def test_the_benchmark_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(wrong)
    assert "usage" in capsys.readouterr().err
