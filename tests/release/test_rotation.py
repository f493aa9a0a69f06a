"""Tokens and certificates of the tier `Peer` are replaced while servers run; no block is lost.

Two hosts run all the time. A third one is started after each step: its connections are new, and so
are those that the others make to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import client
from test_versions import COUNT, PUT, await_all

HOSTS = {"a": "127.0.80.1:7700", "b": "127.0.80.2:7700", "c": "127.0.80.3:7700"}
STAY = ("a", "b")


@contextlib.contextmanager
def host(name: str, folder: Path, *secrets: str) -> Iterator[subprocess.Popen[str]]:
    """A server that is a host of `Peer`; its log is in a file."""
    hosts = ", ".join(f"{one} {address} 64MiB" for one, address in HOSTS.items())
    options = [f"peer.name={name}", "peer.capacity=64MiB", f"peer.hosts={hosts}", *secrets]
    options += [f"peer.path={folder}/{name}.kvd", "cache.capacity=1MiB", "promote=false"]
    command = [sys.executable, "-m", "kvdepot", "serve", "Cache|Peer"]
    command += ["--socket", f"{folder}/{name}.sock"]
    command += [word for option in options for word in ("-o", option)]
    own = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder), "KVDEPOT_LOG": "info"}
    with (folder / f"{name}.log").open("a") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | own,
        )  # fmt: skip
        try:
            assert server.stdout
            assert server.stdout.readline().startswith("serving ")
            yield server
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(90) == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as name:
        yield Path(name)


def reload(server: subprocess.Popen[str], folder: Path, name: str, says: str) -> None:
    """Has a server read its files again, and waits until it has."""
    log = folder / f"{name}.log"
    before = log.read_text().count(says)
    server.send_signal(signal.SIGHUP)
    while log.read_text().count(says) == before:
        assert server.poll() is None


def all_found(folder: Path, *secrets: str) -> None:
    """The third host comes, and every host finds all blocks."""
    with host("c", folder, *secrets):
        for name in HOSTS:
            await_all(f"unix:{folder}/{name}.sock", sys.executable)


def write(path: Path, text: str) -> None:
    """Replaces a file of mode 0600 in one step."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


AGAIN = "credentials read again"
KEPT = "cannot read the credentials again"


def test_a_token_is_replaced_without_a_restart(folder: Path) -> None:
    def secrets(name: str) -> str:
        return f"peer.token_file={folder}/{name}.token"

    for name in HOSTS:
        write(folder / f"{name}.token", "old\n")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(host(name, folder, secrets(name))) for name in STAY}
        with host("c", folder, secrets("c")):
            assert client(f"unix:{folder}/a.sock", program=PUT) == "stored and loaded\n"
        for tokens in ("old\nnew\n", "new\nold\n", "new\n"):
            for name, server in servers.items():
                write(folder / f"{name}.token", tokens)
                reload(server, folder, name, AGAIN)
                # One host is a step ahead, and the third one a step behind.
                all_found(folder, secrets("c"))
            write(folder / "c.token", tokens)
            all_found(folder, secrets("c"))
        # A file without a token changes nothing.
        write(folder / "a.token", "\n")
        reload(servers["a"], folder, "a", KEPT)
        all_found(folder, secrets("c"))
        # Who has the old token alone is not admitted any longer.
        write(folder / "c.token", "old\n")
        with host("c", folder, secrets("c")):
            address = f"unix:{folder}/c.sock"
            assert int(client(address, program=COUNT)) < 32
            assert "different token" in (folder / "c.log").read_text()


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    """An authority, and a certificate of each host that it has signed."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(folder, "req", "-x509", *curve, "-days", "9", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    for host_name, address in HOSTS.items():
        own = f"{name}-{host_name}"
        (folder / f"{own}.ext").write_text(f"subjectAltName=IP:{address.partition(':')[0]}\n")
        openssl(folder, "req", *curve, "-subj", f"/CN={host_name}", "-keyout", f"{own}.key",
                "-out", f"{own}.csr")  # fmt: skip
        openssl(folder, "x509", "-req", "-in", f"{own}.csr", "-CA", f"{name}.pem", "-CAkey",
                f"{name}.key", "-CAcreateserial", "-days", "9", "-extfile", f"{own}.ext",
                "-out", f"{own}.pem")  # fmt: skip


def test_certificates_and_their_authority_are_replaced_without_a_restart(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    for name in ("first", "second"):
        authority(folder, name)

    def install(host_name: str, of: str, *authorities: str) -> None:
        for ending in ("pem", "key"):
            write(
                folder / f"{host_name}.{ending}",
                (folder / f"{of}-{host_name}.{ending}").read_text(),
            )
        text = "".join((folder / f"{one}.pem").read_text() for one in authorities)
        write(folder / f"{host_name}.ca", text)

    def secrets(host_name: str) -> list[str]:
        files = {"tls_certificate": "pem", "tls_key": "key", "tls_ca": "ca"}
        return [f"peer.{option}={folder}/{host_name}.{end}" for option, end in files.items()]

    for name in HOSTS:
        install(name, "first", "first")
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(host(name, folder, *secrets(name))) for name in STAY}
        with host("c", folder, *secrets("c")):
            assert client(f"unix:{folder}/a.sock", program=PUT) == "stored and loaded\n"
        steps = [("first", "first", "second"), ("second", "first", "second"), ("second", "second")]
        for of, *authorities in steps:
            for name, server in servers.items():
                install(name, of, *authorities)
                reload(server, folder, name, AGAIN)
                all_found(folder, *secrets("c"))
            install("c", of, *authorities)
            all_found(folder, *secrets("c"))
