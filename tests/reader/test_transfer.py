"""Messages of two engines, and a reader written from docs/design/transfer.md alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvd_transfer import (
    CLOSE,
    OPEN,
    PING,
    READ,
    WRITE,
    Exchange,
    Initiator,
    WireError,
    read_conversation,
)

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
# What two engines of version 1 said to each other; made by the last test, and never again.
RECORDED = Path(__file__).parent / "fixtures" / "transfer-1.json"
TOKEN = b"between us"
HOME = bytes(n % 251 for n in range(64 << 10))


@pytest.fixture(scope="module")
def exchange() -> Path:
    """The program that is one end of an exchange."""
    if (cargo := shutil.which("cargo")) is None:
        pytest.skip("no cargo to build an engine's process with")
    # With the features that `make test-rust` builds with, so that it has been built there.
    workspace = ["--workspace", "--exclude", "kvdepot-python"]
    said = [cargo, "build", *workspace, "--example", "exchange", "--message-format", "json"]
    done = subprocess.run(said, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    return Path(next(one["executable"] for one in built if one.get("executable")))


@pytest.fixture
def engine(exchange: Path) -> Iterator[subprocess.Popen[str]]:
    command = [str(exchange), "serve", TOKEN.decode()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def address(engine: subprocess.Popen[str]) -> tuple[str, int]:
    assert engine.stdout
    host, port = engine.stdout.readline().strip().split(":")
    return host, int(port)


def content(engine: subprocess.Popen[str]) -> bytes:
    """Its memory, when it ends."""
    said, _ = engine.communicate(timeout=30)
    return bytes.fromhex(said)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_stranger_opens_reads_and_writes(engine: subprocess.Popen[str], checksum: bool) -> None:
    one = Initiator(address(engine), TOKEN)
    assert one.credit > 0
    grant, length, rights = one.open(b"home")
    assert (length, rights) == (len(HOME), 3)
    rows = [(grant, 1000, 50), (grant, 1, 65535), (grant, 0, 7), (grant, 300, 60)]
    frame, body = one.ask(READ, rows, checksum=checksum)
    wanted = b"".join(HOME[offset : offset + size] for _, size, offset in rows)
    assert (frame.status, body) == (0, wanted)
    rows = [(grant, 3, 10), (grant, 5, 0)]
    frame, body = one.ask(WRITE, rows, b"abcdefgh", checksum=checksum)
    assert (frame.status, body) == (0, b"")
    # Nothing of what is refused is done, and the row that was refused is named.
    rows = [(grant, 3, 100), (grant, 5, 65534)]
    frame, _ = one.ask(WRITE, rows, b"xxxxxxxx", checksum=checksum)
    assert (frame.status, frame.first[2]) == (2, 1)
    assert one.ask(PING)[0].status == 0
    assert one.ask(OPEN, body=b"nothing")[0].status == 1
    assert one.ask(CLOSE, [(grant, 0, 0)])[0].status == 0
    assert one.ask(READ, [(grant, 1, 0)])[0].status == 1
    assert content(engine) == b"defgh" + HOME[5:10] + b"abc" + HOME[13:]


def test_bytes_that_do_not_match_are_refused(engine: subprocess.Popen[str]) -> None:
    where = address(engine)
    one = Initiator(where, TOKEN)
    grant, *_ = one.open(b"home")
    good = one.socket.sendall

    def spoilt(said: bytes) -> None:
        good(said[:-1] + bytes([said[-1] ^ 1]))

    one.socket = Spoilt(one.socket, spoilt)  # type: ignore[assignment]
    frame, _ = one.ask(WRITE, [(grant, 4, 0)], b"abcd", checksum=True)
    assert frame.status == 4
    # A head and rows that do not match theirs end the connection.
    with pytest.raises(ConnectionError):
        one.ask(READ, [(grant, 4, 0)], checksum=True)
    assert Initiator(where, TOKEN).ask(PING)[0].status == 0


class Spoilt:
    """A socket whose last byte of each frame is another."""

    def __init__(self, inner: socket.socket, sendall: object) -> None:
        self.inner, self.sendall = inner, sendall

    def recv(self, size: int) -> bytes:
        return self.inner.recv(size)


def test_who_has_another_token_gets_nothing(engine: subprocess.Popen[str]) -> None:
    with pytest.raises(WireError, match="a proof that the target takes"):
        Initiator(address(engine), b"another")


def overheard(exchange: Path, target: tuple[str, int]) -> tuple[bytes, bytes]:
    """What an engine and a target say to each other."""
    said = (bytearray(), bytearray())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [str(exchange), "use", f"127.0.0.1:{port}", TOKEN.decode()]
        with subprocess.Popen(command) as process:
            initiator, _ = server.accept()
            ends = (initiator, socket.create_connection(target))
            pumps = [
                threading.Thread(target=pump, args=(ends[n], ends[1 - n], said[n])) for n in (0, 1)
            ]
            for one in pumps:
                one.start()
            assert process.wait(timeout=60) == 0
            for one in pumps:
                one.join(timeout=60)
            for end in ends:
                end.close()
    return bytes(said[0]), bytes(said[1])


def pump(source: socket.socket, sink: socket.socket, said: bytearray) -> None:
    while some := source.recv(1 << 16):
        said += some
        sink.sendall(some)
    sink.shutdown(socket.SHUT_WR)


def check(exchanges: list[Exchange]) -> None:
    """What the `use` end does, as it is heard."""
    verbs = [one.verb for one in exchanges]
    assert verbs == [OPEN, READ, WRITE, CLOSE, PING]
    assert all(one.status == 0 for one in exchanges)
    opened, read, write, close, _ping = exchanges
    assert opened.body == b"home"
    assert [row[1:] for row in read.rows] == [(100 + n, (4 - n) * 5000) for n in range(5)]
    parts = [HOME[offset : offset + size] for _, size, offset in read.rows]
    assert read.answer == b"".join(parts)
    assert (write.rows, write.body) == (read.rows, read.answer)
    assert {row[0] for row in read.rows} == {opened.grant}
    assert close.rows == [(opened.grant, 0, 0)]


def test_engines_say_what_the_page_says(exchange: Path, engine: subprocess.Popen[str]) -> None:
    there, back = overheard(exchange, address(engine))
    check(read_conversation(there, back, TOKEN))
    assert content(engine) == HOME
    if os.environ.get("KVDEPOT_FIXTURES"):
        recorded = {"token": TOKEN.decode(), "initiator": there.hex(), "target": back.hex()}
        (Path(os.environ["KVDEPOT_FIXTURES"]) / RECORDED.name).write_text(
            json.dumps(recorded, indent=1) + "\n"
        )


def test_what_engines_of_version_1_said_is_understood() -> None:
    recorded = json.loads(RECORDED.read_text())
    there, back = (bytes.fromhex(recorded[side]) for side in ("initiator", "target"))
    token = recorded["token"].encode()
    check(read_conversation(there, back, token))
    # Every byte that the initiator says stands for something.
    for at in range(len(there)):
        flipped = there[:at] + bytes([there[at] ^ 1]) + there[at + 1 :]
        with pytest.raises((WireError, AssertionError)):
            check(read_conversation(flipped, back, token))
    for at in range(len(there)):
        with pytest.raises((WireError, AssertionError)):
            check(read_conversation(there[:at], back, token))
