"""The transfer engine's wire, from docs/design/transfer.md alone: an initiator, and a listener.

It shares no code with kvdepot. `Initiator` connects to an engine, opens, reads and writes;
`read_conversation` takes what two engines said to each other apart, and checks all of it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash
from blake3 import blake3

MAGIC = b"kvdxfer\0"
VERSION = 1
HELLO = struct.Struct("<8sHHI16s32s")
CHALLENGE = struct.Struct("<8sHHI16s32s")
HEAD = struct.Struct("<BBHIQQ")
ROW = struct.Struct("<IIQ")
OPENED = struct.Struct("<QQII")
OPEN, READ, WRITE, CLOSE, PING, CALL = range(1, 7)
CHECKSUM = 1
STATUS = ("done", "unknown", "range", "rights", "checksum", "failed", "closing")
ROWS_MAX, BYTES_MAX, NAME_MAX = 1000, 64 << 20, 1024
Row = tuple[int, int, int]


class WireError(Exception):
    """What was said breaks a rule of the page."""


def must(holds: bool, rule: str) -> None:
    if not holds:
        raise WireError(rule)


def xxh3_128(data: bytes) -> bytes:
    """Low half first."""
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")


def mac(token: bytes, turn: int, *parts: bytes) -> bytes:
    key = blake3(token, derive_key_context="kvdepot transfer token 1").digest()
    return blake3(bytes([turn]) + b"".join(parts), key=key).digest()


@dataclass(frozen=True)
class Frame:
    verb: int
    flags: int
    status: int
    count: int
    number: int
    size: int
    first: Row

    @staticmethod
    def unpack(head: bytes) -> Frame:
        verb, flags, status, count, number, size = HEAD.unpack_from(head)
        return Frame(verb, flags, status, count, number, size, ROW.unpack_from(head, HEAD.size))

    def pack(self) -> bytes:
        numbers = (self.verb, self.flags, self.status, self.count, self.number, self.size)
        return HEAD.pack(*numbers) + ROW.pack(*self.first)


class Initiator:
    """One connection to an engine."""

    def __init__(self, address: tuple[str, int], token: bytes, lane: int = 0) -> None:
        self.socket = socket.create_connection(address, timeout=30)
        hello = HELLO.pack(MAGIC, VERSION, 0, lane, os.urandom(16), os.urandom(32))
        self.socket.sendall(hello)
        challenge = self.take(CHALLENGE.size)
        magic, version, greeting, self.credit, self.target, _ = CHALLENGE.unpack(challenge)
        must((magic, version, greeting) == (MAGIC, VERSION, 0), "a greeting that goes on")
        mine = mac(token, 1, hello, challenge)
        self.socket.sendall(mine)
        proof = self.take(32)
        must(proof != bytes(32), "a proof that the target takes")
        must(proof == mac(token, 2, hello, challenge, mine), "the target has the token")
        self.number = 0

    def take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            some = self.socket.recv(size - len(data))
            if not some:
                raise ConnectionError("the connection has ended")
            data += some
        return bytes(data)

    def ask(
        self, verb: int, rows: Iterable[Row] = (), body: bytes = b"", *, checksum: bool = False
    ) -> tuple[Frame, bytes]:
        rows = list(rows)
        self.number += 1
        first = rows[0] if rows else (0, 0, 0)
        flags = CHECKSUM if checksum else 0
        frame = Frame(verb, flags, 0, len(rows), self.number, len(body), first)
        said = frame.pack() + b"".join(ROW.pack(*row) for row in rows[1:])
        if checksum:
            said += xxh3_128(said)
        said += body
        if checksum and verb == WRITE:
            said += xxh3_128(body)
        self.socket.sendall(said)
        return self.answer(frame)

    def answer(self, asked: Frame) -> tuple[Frame, bytes]:
        frame = Frame.unpack(self.take(40))
        must((frame.verb, frame.number) == (asked.verb, asked.number), "an answer in its turn")
        body = self.take(frame.size)
        if frame.status == 0 and asked.verb == READ and asked.flags & CHECKSUM:
            must(self.take(16) == xxh3_128(body), "the bytes match their checksum")
        return frame, body

    def open(self, name: bytes) -> tuple[int, int, int]:
        """The grant's number, how long it is, and its rights."""
        frame, body = self.ask(OPEN, body=name)
        must(frame.status == 0, f"{name!r} is {STATUS[frame.status]}")
        length, _lasts, rights, zero = OPENED.unpack(body)
        must(zero == 0, "zero behind the rights")
        return frame.first[0], length, rights


class Bytes:
    """What one side has said, taken from its beginning on."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        must(self.at + size <= len(self.data), "whole frames")
        self.at += size
        return self.data[self.at - size : self.at]

    def is_over(self) -> bool:
        return self.at == len(self.data)


@dataclass(frozen=True)
class Exchange:
    verb: int
    rows: list[Row]
    body: bytes
    status: int
    answer: bytes
    grant: int


def read_conversation(initiator: bytes, target: bytes, token: bytes) -> list[Exchange]:
    """All that was asked and answered on one connection, every rule of the page checked."""
    there, back = Bytes(initiator), Bytes(target)
    hello, challenge = there.take(HELLO.size), back.take(CHALLENGE.size)
    magic, version, zero, *_ = HELLO.unpack(hello)
    must((magic, version, zero) == (MAGIC, VERSION, 0), "an initiator's greeting")
    magic, version, greeting, credit, *_ = CHALLENGE.unpack(challenge)
    must((magic, version, greeting) == (MAGIC, VERSION, 0) and credit > 0, "a target's greeting")
    mine = there.take(32)
    must(mine == mac(token, 1, hello, challenge), "the initiator's MAC")
    must(back.take(32) == mac(token, 2, hello, challenge, mine), "the target's MAC")
    exchanges: list[Exchange] = []
    while not there.is_over():
        exchanges.append(read_exchange(there, back, len(exchanges) + 1))
    must(back.is_over(), "no answers to nothing")
    return exchanges


def read_exchange(there: Bytes, back: Bytes, number: int) -> Exchange:
    head = there.take(40)
    asked = Frame.unpack(head)
    must(asked.number == number and asked.status == 0, "requests are counted from 1 on")
    must(asked.flags == 0 or asked.verb in (READ, WRITE), "flags of reads and writes alone")
    must(asked.flags in (0, CHECKSUM), "flags of the page")
    must(asked.size <= (NAME_MAX if asked.verb == OPEN else BYTES_MAX), "bytes of the page")
    rest = there.take(max(asked.count - 1, 0) * ROW.size)
    least, most = {READ: (1, ROWS_MAX), WRITE: (1, ROWS_MAX), CLOSE: (1, 1)}.get(asked.verb, (0, 0))
    must(least <= asked.count <= most, "rows of its verb")
    must(asked.count > 0 or asked.first == (0, 0, 0), "zeros where there is no row")
    rows = [asked.first][: asked.count] + list(ROW.iter_unpack(rest))
    if asked.flags & CHECKSUM:
        must(there.take(16) == xxh3_128(head + rest), "head and rows match their checksum")
    body = there.take(asked.size)
    total = sum(length for _, length, _ in rows)
    if asked.verb == WRITE:
        must(total == asked.size, "as many bytes as the rows have")
        if asked.flags & CHECKSUM:
            must(there.take(16) == xxh3_128(body), "the bytes match their checksum")
    frame = Frame.unpack(back.take(40))
    must((frame.verb, frame.number, frame.count) == (asked.verb, number, 0), "its answer")
    answer = back.take(frame.size)
    if frame.status == 0 and asked.verb == READ:
        must(len(answer) == total, "the bytes of all rows")
        if asked.flags & CHECKSUM:
            must(back.take(16) == xxh3_128(answer), "the bytes match their checksum")
    return Exchange(asked.verb, rows, body, frame.status, answer, frame.first[0])
