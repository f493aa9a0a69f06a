"""An independent reader of kvdepot's arena format, written from docs/format.md alone.

It shares no code with kvdepot: a block that both find, and find whole, shows that the document
says everything. It reads the medium and writes nothing.

    python tests/reader/kvd_reader.py arena.kvd            # one JSON object per block
    python tests/reader/kvd_reader.py arena.kvd --verify   # bad blocks, then the totals
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import xxhash
from blake3 import blake3

GRANULE = 4096
PAGE = 4096
SUPERBLOCKS = (0, 4096)
DIRECTORY, DIRECTORY_ENTRY, DIRECTORY_ENTRIES = 16 << 10, 512, 96
TABLE, RECORD = 64 << 10, 128
LEAF = 1 << 20
PARTS_MAX = 4096
SUMS_MAX = 249
TABLE_PART = 0xFFFF_FFFF
LIVE, DEAD = 1, 2


class NotAnArenaError(Exception):
    """The medium holds no arena that this reader knows."""


@dataclass(frozen=True)
class Superblock:
    uuid: bytes
    capacity: int
    records: int
    data: int
    generation: int


@dataclass(frozen=True)
class Record:
    slot: int
    live: bool
    parts: int
    created: int
    sequence: int
    namespace: bytes
    key: bytes
    extents: tuple[tuple[int, int], ...]
    length: int
    checksum: bytes

    def as_json(self) -> dict[str, object]:
        return {
            "namespace": self.namespace.hex(),
            "key": self.key.hex(),
            "length": self.length,
            "parts": self.parts,
            "sequence": self.sequence,
            "created": self.created,
            "extents": [list(extent) for extent in self.extents],
            "checksum": self.checksum[::-1].hex(),
        }


def xxh3_64(data: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


def xxh3_128(data: bytes) -> bytes:
    """The digest as the format stores it: the reverse of the canonical order."""
    return xxhash.xxh3_128_digest(data)[::-1]


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def decode_superblock(page: bytes) -> Superblock | None:
    if len(page) < PAGE or page[:8] != b"KVDEPOT\0":
        return None
    if struct.unpack_from("<Q", page, 4088)[0] != xxh3_64(page[:4088]):
        return None
    version, record_length = struct.unpack_from("<II", page, 8)
    if version != 1 or record_length != RECORD:
        return None
    uuid = page[16:32]
    capacity, table, records, data, generation = struct.unpack_from("<QQQQQ", page, 32)
    align = 2 << 20 if capacity >= 64 << 20 else GRANULE
    sound = (
        capacity % GRANULE == 0
        and capacity >= 256 << 10
        and table == TABLE
        and 1 <= records <= 2**32 - 2
        and data == round_up(TABLE + RECORD * records, align)
        and data + GRANULE <= capacity
    )
    return Superblock(uuid, capacity, records, data, generation) if sound else None


def decode_record(entry: bytes, slot: int, superblock: Superblock) -> Record | None:
    """The record in a slot; None when it is empty or damaged."""
    if len(entry) < RECORD or entry == bytes(RECORD):
        return None
    seed = int.from_bytes(superblock.uuid[:8], "little") ^ slot
    if struct.unpack_from("<Q", entry, 120)[0] != xxh3_64(entry[:120], seed):
        return None
    state, count, parts, created, sequence = struct.unpack_from("<BBHIQ", entry, 0)
    packed = [value for value in struct.unpack_from("<4Q", entry, 64) if value]
    extents = tuple(
        ((value & (1 << 40) - 1) * GRANULE, (value >> 40) * GRANULE) for value in packed
    )
    length = struct.unpack_from("<Q", entry, 96)[0]
    sound = (
        state in (LIVE, DEAD)
        and 1 <= count == len(extents)
        and 1 <= parts <= PARTS_MAX
        and 0 < length <= sum(size for _, size in extents)
        and all(size > 0 for _, size in extents)
        and all(
            superblock.data <= offset and offset + size <= superblock.capacity
            for offset, size in extents
        )
        and not any(
            overlap(one, other)
            for index, one in enumerate(extents)
            for other in extents[index + 1 :]
        )
    )
    if not sound:
        return None
    return Record(
        slot=slot,
        live=state == LIVE,
        parts=parts,
        created=created,
        sequence=sequence,
        namespace=entry[16:32],
        key=entry[32:64],
        extents=extents,
        length=length,
        checksum=entry[104:120],
    )


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


class Arena:
    """An arena opened for reading."""

    def __init__(self, medium: BinaryIO) -> None:
        self.medium = medium
        copies = [decode_superblock(self.read(offset, PAGE)) for offset in SUPERBLOCKS]
        found = [copy for copy in copies if copy is not None]
        if not found:
            raise NotAnArenaError("no superblock of format version 1 verifies")
        # The last of equal generations, which is B.
        self.superblock = sorted(found, key=lambda copy: copy.generation)[-1]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the medium, fewer beyond its end."""
        self.medium.seek(offset)
        return self.medium.read(length)

    def namespaces(self) -> dict[str, str]:
        """What the directory says the digests stand for."""
        described = {}
        for index in range(DIRECTORY_ENTRIES):
            entry = self.read(DIRECTORY + index * DIRECTORY_ENTRY, DIRECTORY_ENTRY)
            if struct.unpack_from("<Q", entry, 504)[0] == xxh3_64(entry[:504]):
                text = entry[16:504].split(b"\0", 1)[0]
                described[entry[:16].hex()] = text.decode("utf-8", "replace")
        return described

    def records(self) -> Iterator[Record]:
        """The records that are whole and possible, live and dead, by slot."""
        table = self.read(TABLE, RECORD * self.superblock.records)
        for slot in range(self.superblock.records):
            record = decode_record(
                table[slot * RECORD : (slot + 1) * RECORD], slot, self.superblock
            )
            if record is not None:
                yield record

    def blocks(self) -> list[Record]:
        """The blocks by the recovery rules, by rising sequence."""
        claimed = bytearray((self.superblock.capacity - self.superblock.data) // GRANULE)
        identities: set[tuple[bytes, bytes]] = set()
        blocks = []
        for record in sorted(self.records(), key=lambda record: (-record.sequence, record.slot)):
            granules = [
                slice(
                    (offset - self.superblock.data) // GRANULE,
                    (offset + size - self.superblock.data) // GRANULE,
                )
                for offset, size in record.extents
            ]
            identity = (record.namespace, record.key)
            outranked = identity in identities or any(any(claimed[part]) for part in granules)
            if record.live and not outranked:
                blocks.append(record)
            identities.add(identity)
            for part in granules:
                claimed[part] = b"\1" * (part.stop - part.start)
        return blocks[::-1]

    def payload(self, record: Record) -> bytes:
        """A block's payload, shorter than it should be where the medium ends early."""
        room = b"".join(self.read(offset, size) for offset, size in record.extents)
        return room[: record.length]

    def fault(self, record: Record) -> str | None:
        """Why a block does not verify; None when it does."""
        payload = self.payload(record)
        if len(payload) != record.length:
            return "the medium ends before the payload"
        if record.parts == 1:
            matches = part_checksum(record, 0, payload) == record.checksum
            return None if matches else "payload checksum"
        begin = record.length - 32 * record.parts
        if begin < 0 or begin % 64:
            return "no room for the part table"
        table = payload[begin:]
        if keyed(record, TABLE_PART, len(table), [xxh3_128(table)]) != record.checksum:
            return "part table checksum"
        for index, (offset, length, checksum) in enumerate(part_table(table)):
            if offset + length > begin:
                return f"part {index} lies outside the payload"
            if part_checksum(record, index, payload[offset : offset + length]) != checksum:
                return f"part {index} checksum"
        return None


class BlockFile(Arena):
    """A file of the tier `Posix`: one block behind its header."""

    def __init__(self, medium: BinaryIO) -> None:
        self.medium = medium
        page = self.read(0, PAGE)
        sealed = len(page) == PAGE and xxh3_64(page[:4088]) == int.from_bytes(page[4088:], "little")
        if not sealed or page[:8] != b"KVDBLOCK":
            raise NotAnArenaError("no block's file")
        version, header = struct.unpack_from("<II", page, 8)
        if (version, header) != (1, PAGE):
            raise NotAnArenaError(f"version {version}")
        length, checksum, created, parts = struct.unpack_from("<Q16sQH", page, 64)
        room = round_up(PAGE + length, GRANULE)
        if medium.seek(0, 2) != room:
            raise NotAnArenaError("longer or shorter than its header says")
        self.record = Record(
            slot=0,
            live=True,
            parts=parts,
            created=created,
            sequence=0,
            namespace=page[16:32],
            key=page[32:64],
            extents=((PAGE, room - PAGE),),
            length=length,
            checksum=checksum,
        )
        macs, count = struct.unpack_from("<HI", page, 98)
        if macs not in {0, parts}:
            raise NotAnArenaError(f"{macs} MACs of {parts} parts")
        if macs + count > SUMS_MAX:
            raise NotAnArenaError(f"{count} leaves, and room for {SUMS_MAX - macs}")
        sums = [page[at : at + 16] for at in range(104, 104 + 16 * (macs + count), 16)]
        self.macs, self.leaves = sums[:macs], sums[macs:]
        self.check_leaves()

    def blocks(self) -> list[Record]:
        return [self.record]

    def parts(self) -> list[tuple[int, int, bytes]]:
        """Offset, length and checksum of each part, from a table that verifies."""
        record = self.record
        if record.parts == 1:
            return [(0, record.length, record.checksum)]
        table = self.payload(record)[-32 * record.parts :]
        sum_of_table = keyed(record, TABLE_PART, len(table), [xxh3_128(table)])
        return part_table(table) if sum_of_table == record.checksum else []

    def check_leaves(self) -> None:
        """Recorded leaves are as many as the payload has, and compose to its checksums."""
        parts = self.parts()
        if not self.leaves or not parts:
            return
        counts = [-(-length // LEAF) for _, length, _ in parts]
        if len(self.leaves) != sum(counts):
            raise NotAnArenaError(f"{len(self.leaves)} leaves are recorded of {sum(counts)}")
        rest = iter(self.leaves)
        for index, ((_, length, checksum), count) in enumerate(zip(parts, counts, strict=True)):
            if keyed(self.record, index, length, list(islice(rest, count))) != checksum:
                raise NotAnArenaError("the leaves do not compose to the payload's checksum")

    def is_proven(self, secret: bytes) -> bool:
        """Whether each part has the MAC that this secret gives it."""
        payload, each = self.payload(self.record), enumerate(self.parts())
        parts = [(part, payload[at : at + length]) for part, (at, length, _) in each]
        return self.macs == [mac(self.record, part, data, secret) for part, data in parts]

    def fault(self, record: Record) -> str | None:
        """As of an arena's block, with the first rotten leaf where leaves are recorded."""
        payload, rest = self.payload(record), iter(self.leaves)
        for offset, length, _ in self.parts():
            for at in range(offset, offset + length, LEAF):
                leaf = payload[at : min(at + LEAF, offset + length)]
                if xxh3_128(leaf) != next(rest, xxh3_128(leaf)):
                    return f"leaf at {at}"
        return super().fault(record)


def open_medium(medium: BinaryIO) -> Arena:
    """What the medium begins like."""
    begins = medium.read(8)
    return BlockFile(medium) if begins == b"KVDBLOCK" else Arena(medium)


def part_table(table: bytes) -> list[tuple[int, int, bytes]]:
    return list(struct.iter_unpack("<QQ16s", table))


def keyed(record: Record, part: int, length: int, digests: list[bytes]) -> bytes:
    """Digests under an identity: the form that part and table checksums share."""
    head = record.namespace + record.key + struct.pack("<IIQ", part, record.parts, length)
    return xxh3_128(head + b"".join(digests))


def mac(record: Record, part: int, data: bytes, secret: bytes) -> bytes:
    """The keyed checksum of a part."""

    def key(what: str) -> bytes:
        derived = blake3(derive_key_context=f"kvdepot mac 1 {what}")
        return derived.update(secret + record.namespace).digest()

    leaves = [data[at : at + LEAF] for at in range(0, len(data), LEAF)]
    sums = [blake3(leaf, key=key("leaf")).digest()[:16] for leaf in leaves]
    head = record.namespace + record.key + struct.pack("<IIQ", part, record.parts, len(data))
    return blake3(head + b"".join(sums), key=key("part")).digest()[:16]


def part_checksum(record: Record, part: int, data: bytes) -> bytes:
    leaves = [xxh3_128(data[at : at + LEAF]) for at in range(0, len(data), LEAF)]
    return keyed(record, part, len(data), leaves)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Reads a kvdepot arena by its documentation.")
    parser.add_argument("path", type=Path, help="a file that holds an arena, or a block")
    parser.add_argument("--verify", action="store_true", help="check every payload")
    options = parser.parse_args(arguments)
    with options.path.open("rb") as medium:
        try:
            arena = open_medium(medium)
        except NotAnArenaError as error:
            print(f"{options.path}: {error}", file=sys.stderr)
            return 2
        blocks = arena.blocks()
        if not options.verify:
            for block in blocks:
                print(json.dumps(block.as_json()))
            return 0
        bad = 0
        for block in blocks:
            if fault := arena.fault(block):
                bad += 1
                print(json.dumps({**block.as_json(), "fault": fault}))
        print(json.dumps({"blocks": len(blocks), "bad": bad}))
        return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
