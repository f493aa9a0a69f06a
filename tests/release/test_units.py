"""systemd's units: their syntax, their options, and the protocols between systemd and the server.

systemd itself does not run here. Its side of `sd_notify(3)` is played by a socket.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest
import yaml
from served import CLIENT, Manager, client, served

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/systemd"
UNITS = sorted(
    path.name for path in FOLDER.glob("kvdepot.*") if path.suffix in (".service", ".socket")
)
COMMAND = "/opt/kvdepot/bin/kvdepot"


def read(name: str) -> dict[str, dict[str, list[str]]]:
    """The sections of a unit; a name may stand several times."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(heading[1], {})
        elif line and not line.startswith("#"):
            option, _, value = line.partition("=")
            section.setdefault(option, []).append(value)
    return found


SERVICE = read("kvdepot.service")["Service"]


def verify(systemd_analyze: str, folder: Path) -> str:
    """What systemd finds wrong with the units in `folder`."""
    units = [folder / name for name in UNITS]
    run = subprocess.run(
        [systemd_analyze, "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr if run.returncode else run.stderr


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a command that exists here."""
    for name in UNITS:
        (tmp_path / name).write_text((FOLDER / name).read_text().replace(COMMAND, "/bin/true"))
    drop_in = tmp_path / "kvdepot.service.d"
    drop_in.mkdir()
    for name in ("device", "socket"):
        shutil.copy(FOLDER / f"kvdepot-{name}.conf", drop_in / f"{name}.conf")
    return tmp_path


def test_systemd_accepts_the_units(systemd_analyze: str, units: Path) -> None:
    assert verify(systemd_analyze, units) == ""
    service = units / "kvdepot.service"
    service.write_text(service.read_text().replace("[Service]", "[Service]\nProtectAll=yes"))
    assert "ProtectAll" in verify(systemd_analyze, units)


def test_the_service_is_exposed_little(systemd_analyze: str, tmp_path: Path) -> None:
    help_text = subprocess.run([systemd_analyze, "--help"], capture_output=True, text=True).stdout
    if "--offline" not in help_text:
        pytest.skip("this systemd-analyze judges running services only")
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    shutil.copy(FOLDER / "kvdepot.service", folder)
    (tmp_path / "opt/kvdepot/bin").mkdir(parents=True)
    (tmp_path / "opt/kvdepot/bin/kvdepot").write_text("#!/bin/sh\n")
    command = [systemd_analyze, "security", "--offline=true", f"--root={tmp_path}"]
    run = subprocess.run(
        [*command, "--threshold=25", "kvdepot.service"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-400:]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*-*.conf")))
def test_drop_ins_have_sections(name: str) -> None:
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(FOLDER / name)
    assert set(parser.sections()) <= {"Unit", "Service"}
    assert parser.sections()


def test_the_command_of_the_service_has_these_options() -> None:
    (line,) = SERVICE["ExecStart"]
    words = line.split()
    assert words[:2] == [COMMAND, "serve"]
    page = (ROOT / "docs/cli.md").read_text()
    serve = page.partition("## `kvdepot serve`")[2].partition("\n## ")[0]
    options = [word for word in words if word.startswith("-")]
    assert options
    assert all(f"{option} <" in serve for option in options)
    config, place = words[words.index("--config") + 1], words[words.index("--socket") + 1]
    assert config == f"/etc/kvdepot/{FOLDER.joinpath('kvdepot.yaml').name}"
    (runtime,) = SERVICE["RuntimeDirectory"]
    assert Path(place).parent == Path("/run") / runtime


def test_the_service_ends_after_its_queues() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    close = re.search(r"^\| `close_timeout` \| duration \| (\d+)s ", page, re.MULTILINE)
    assert close
    assert int(SERVICE["TimeoutStopSec"][0]) > int(close[1])


def test_the_configuration_is_valid_and_fits_the_service() -> None:
    text = (FOLDER / "kvdepot.yaml").read_text()
    settings = yaml.safe_load(text)
    kvdepot.check(settings.pop("pipeline"), settings, options_only=True)
    (state,) = SERVICE["StateDirectory"]
    assert settings["nvme"]["path"].startswith(f"/var/lib/{state}/")
    # Engines of other users are members of the group.
    assert settings["socket_mode"] == "0660"
    assert SERVICE["Group"] == ["kvdepot"]
    assert int(SERVICE["RuntimeDirectoryMode"][0], 8) & 0o050 == 0o050


def test_the_server_says_when_it_is_ready_and_when_it_stops() -> None:
    with served() as manager:
        assert manager.notification() == {"READY": "1"}
        # Ready is: a client that connects now is served.
        assert client(f"unix:{manager.socket}") == "stored and loaded\n"
        manager.process.send_signal(signal.SIGTERM)
        assert manager.notification() == {"STOPPING": "1"}
        assert manager.process.wait(60) == 0
        assert not manager.socket.exists()


def test_a_server_that_stops_writes_its_queue_back() -> None:
    with served("-o", "dax.capacity=32MiB", pipeline="Cache|Dax") as manager:
        manager.notification()
        assert client(f"unix:{manager.socket}") == "stored and loaded\n"
        assert manager.end() == 0
        (arena,) = (manager.folder / "cache/kvdepot").glob("arena*.kvd")
        command = [sys.executable, "-m", "kvdepot", "stat", "--json", arena]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert json.loads(run.stdout)["blocks"] == 4, run.stderr


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket as systemd's unit makes it. Its path is short."""
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(f"{folder}/kvdepot.sock")
        os.chmod(made.getsockname(), 0o660)
        made.listen(64)
        yield made
        made.close()


def activated(passed: socket.socket, of: str = "$$", place: str = "") -> Any:
    """A server that gets the socket from its service manager (`sd_listen_fds(3)`)."""
    script = f'export LISTEN_PID={of} LISTEN_FDS=1; exec "$@" 3<&{passed.fileno()}'
    options = {"before": ["bash", "-euc", script, "bash"], "pass_fds": (passed.fileno(),)}
    return served(place=place or passed.getsockname(), **options)


def test_clients_wait_at_the_socket_of_the_service_manager(listening: socket.socket) -> None:
    path = Path(listening.getsockname())
    with activated(listening) as manager:
        manager.notification()
        assert client(f"unix:{path}") == "stored and loaded\n"
        assert manager.end() == 0
    # It belongs to the service manager, and the next server finds who waits there.
    assert path.is_socket()
    waiting = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"unix:{path}"], stdout=subprocess.PIPE, text=True
    )
    with activated(listening) as manager:
        manager.notification()
        assert waiting.communicate(timeout=60)[0] == "stored and loaded\n"
        assert manager.end() == 0
    assert path.is_socket()


def test_a_socket_that_is_not_the_server_s_is_refused(listening: socket.socket) -> None:
    def refused(manager: Manager) -> str:
        assert manager.process.wait(60) == 2
        return (manager.folder / "log").read_text()

    with activated(listening, place="/tmp/kvr-other.sock") as manager:
        assert "the socket of the service manager" in refused(manager)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as idle, activated(idle) as manager:
        assert "not a listening socket" in refused(manager)


def test_the_socket_of_another_process_is_left_to_it(listening: socket.socket) -> None:
    with activated(listening, of="1") as manager:
        # It would bind the path itself, at which the other one listens.
        assert manager.process.wait(60) == 2
        assert "no other server listens" in (manager.folder / "log").read_text()


def test_the_socket_unit_is_that_of_the_service() -> None:
    unit = read("kvdepot.socket")["Socket"]
    (line,) = SERVICE["ExecStart"]
    assert unit["ListenStream"] == [line.split()[-1]]
    assert unit["SocketGroup"] == SERVICE["Group"]
    settings = yaml.safe_load((FOLDER / "kvdepot.yaml").read_text())
    assert unit["SocketMode"] == [settings["socket_mode"]]


def allowed_calls(systemd_analyze: str) -> set[str]:
    """The system calls of the service's filter."""

    def expand(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        shown = subprocess.run(
            [systemd_analyze, "syscall-filter", name], capture_output=True, text=True, check=True
        )
        lines = [line.strip() for line in shown.stdout.splitlines()[1:]]
        found = [expand(line) for line in lines if line and not line.startswith("#")]
        return set().union(*found)

    # systemd adds what it needs to start a program.
    names = [*SERVICE["SystemCallFilter"][0].split(), "@default"]
    return set().union(*map(expand, names))


def test_the_server_makes_no_call_that_its_filter_refuses(
    systemd_analyze: str, tmp_path: Path
) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    trace = tmp_path / "trace"
    tiers = [f"posix.path={tmp_path}/posix", "posix.capacity=64MiB", "dax.capacity=32MiB"]
    tiers.append("nvme.capacity=32MiB")
    options = [word for tier in tiers for word in ("-o", tier)]
    # -D: the server itself is the child of this process.
    before = [strace, "-D", "-f", "-qq", "-o", str(trace)]
    with served(*options, pipeline="Cache|Dax|Nvme|Posix", before=before) as manager:
        manager.notification()
        assert client(f"unix:{manager.socket}") == "stored and loaded\n"
        manager.end()
    calls = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.MULTILINE))
    assert {"memfd_create", "io_uring_setup", "mincore"} <= calls
    assert calls <= allowed_calls(systemd_analyze)
