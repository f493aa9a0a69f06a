"""Writes records and payloads into an arena by docs/format.md alone, for the compat tests."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

from kvd_reader import (
    GRANULE,
    RECORD,
    TABLE,
    TABLE_PART,
    Arena,
    Record,
    keyed,
    part_checksum,
    round_up,
    xxh3_64,
    xxh3_128,
)

GENERATION_SHIFT = 40


def encode_record(record: Record, uuid: bytes) -> bytes:
    packed = [(size // GRANULE) << 40 | offset // GRANULE for offset, size in record.extents]
    packed += [0] * (4 - len(packed))
    state = 1 if record.live else 2
    head = struct.pack(
        "<BBHIQ", state, len(record.extents), record.parts, record.created, record.sequence
    )
    body = head + record.namespace + record.key + struct.pack("<4QQ", *packed, record.length)
    body += record.checksum
    seed = int.from_bytes(uuid[:8], "little") ^ record.slot
    return body + struct.pack("<Q", xxh3_64(body, seed))


def split_payload(record: Record, parts: list[bytes]) -> tuple[bytes, bytes]:
    """The payload of a block of several parts, and the record's checksum for it."""
    payload, entries = b"", b""
    for index, part in enumerate(parts):
        entries += struct.pack("<QQ", len(payload), len(part))
        entries += part_checksum(record, index, part)
        payload += part
    payload = payload.ljust(round_up(len(payload), 64), b"\0")
    return payload + entries, keyed(record, TABLE_PART, len(entries), [xxh3_128(entries)])


@dataclass
class Forge:
    """An arena on disk that nobody has open."""

    path: Path

    def survey(self) -> tuple[list[Record], list[Record]]:
        """The blocks, and all records."""
        with self.path.open("rb") as medium:
            arena = Arena(medium)
            return arena.blocks(), list(arena.records())

    def write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as medium:
            medium.seek(offset)
            medium.write(data)

    def flip(self, offset: int) -> None:
        with self.path.open("r+b") as medium:
            medium.seek(offset)
            byte = medium.read(1)[0]
            medium.seek(offset)
            medium.write(bytes([byte ^ 0x40]))

    def write_record(self, record: Record) -> Record:
        with self.path.open("rb") as medium:
            uuid = Arena(medium).superblock.uuid
        self.write(TABLE + RECORD * record.slot, encode_record(record, uuid))
        return record

    def vacant(self, count: int) -> tuple[int, list[int]]:
        """An unused slot, and offsets of unused granules from the arena's end downwards."""
        with self.path.open("rb") as medium:
            arena = Arena(medium)
            superblock, records = arena.superblock, list(arena.records())
        used = {record.slot for record in records}
        slot = next(slot for slot in range(superblock.records) if slot not in used)
        taken = {
            granule
            for record in records
            for offset, size in record.extents
            for granule in range(offset, offset + size, GRANULE)
        }
        free = [
            offset
            for offset in range(superblock.capacity - GRANULE, superblock.data - 1, -GRANULE)
            if offset not in taken
        ]
        return slot, free[:count]

    def add_block(self, like: Record, key: bytes, parts: list[bytes]) -> Record:
        """Publishes a block scattered backwards over single granules, up to four of them."""
        draft = replace(like, key=key, parts=len(parts), live=True, sequence=like.sequence + 1)
        if len(parts) == 1:
            payload, checksum = parts[0], part_checksum(draft, 0, parts[0])
        else:
            payload, checksum = split_payload(draft, parts)
        granules = round_up(len(payload), GRANULE) // GRANULE
        slot, offsets = self.vacant(2 * granules)
        # Every second free granule, so that no two extents touch.
        extents = tuple((offset, GRANULE) for offset in offsets[::2])
        for index, (offset, size) in enumerate(extents):
            self.write(offset, payload[index * size : (index + 1) * size])
        return self.write_record(
            replace(draft, slot=slot, extents=extents, length=len(payload), checksum=checksum)
        )
