"""The document's own reader reads arenas that earlier versions left behind, byte for byte."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path

import pytest
from kvd_reader import Arena, Record

pytestmark = pytest.mark.unit

FIXTURES = Path(__file__).parents[2] / "crates" / "service" / "tests" / "fixtures"
FIELDS = ["model", "dtype", "block_tokens", "weights", "layout", "group", "world", "hash", "salt"]


def unpack(packed: bytes) -> io.BytesIO:
    """The file of which `kvdepot_testkit::runs` says how it is packed."""
    assert packed[:8] == b"KVDRUNS1"
    medium = io.BytesIO(bytes(struct.unpack_from("<Q", packed, 8)[0]))
    at = 16
    while at < len(packed):
        offset, times, length = struct.unpack_from("<QII", packed, at)
        at += 16
        medium.seek(offset)
        medium.write(packed[at : at + length] * times)
        at += length
    return medium


def digest(fields: dict[str, object]) -> bytes:
    """Of a namespace, by the format's document."""
    hashed = hashlib.sha256()
    for name in FIELDS:
        if name in fields:
            value = str(fields[name]).encode()
            hashed.update(struct.pack("<Q", len(name)) + name.encode())
            hashed.update(struct.pack("<Q", len(value)) + value)
    return hashed.digest()[:16]


def parts(arena: Arena, record: Record) -> list[bytes]:
    payload = arena.payload(record)
    if record.parts == 1:
        return [payload]
    table = payload[record.length - 32 * record.parts :]
    entries = struct.iter_unpack("<QQ16s", table)
    return [payload[offset : offset + length] for offset, length, _ in entries]


@pytest.mark.parametrize("form", [1])
def test_every_block_is_read_as_it_was_written(form: int) -> None:
    arena = Arena(unpack((FIXTURES / f"arena-{form}.runs").read_bytes()))
    promised = json.loads((FIXTURES / f"arena-{form}.json").read_text())["blocks"]
    found = {(record.namespace, record.key): record for record in arena.blocks()}
    assert len(found) == len(promised)
    assert max(len(record.extents) for record in found.values()) > 2
    for block in promised:
        record = found[digest(block["namespace"]), bytes.fromhex(block["key"])]
        assert arena.fault(record) is None
        here = [(len(part), hashlib.sha256(part).hexdigest()) for part in parts(arena, record)]
        assert here == [(part["bytes"], part["sha256"]) for part in block["parts"]]
