"""Where a GGUF file has its tensors: as much of the format as a fingerprint needs.

Little-endian, versions 2 and 3: magic, version, counts; each key with its value; each tensor's
name, shape, type and offset; then, aligned, the tensors.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# Bytes of a value, by its type's number; texts and arrays are of no fixed length.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
U32 = 4
# More than files have: a torn count or length must not keep us busy.
COUNT_MAX = 1 << 20
# Of the header, tokenizers of some hundred thousand tokens have some MiB.
HEADER_BYTES = (1 << 20, 8 << 20, 64 << 20)


class Tensor(NamedTuple):
    """A tensor's name, and where in the file its bytes begin."""

    name: bytes
    begin: int


def read_file(descriptor: int) -> tuple[int, list[Tensor]]:
    """The same of a file. Raises ValueError for what is no such file, and OSError."""
    for length in HEADER_BYTES:
        data = os.pread(descriptor, length, 0)
        if data[:4] != MAGIC:
            break
        try:
            return read(data)
        except ValueError:
            if len(data) < length:
                raise
    raise ValueError("not a GGUF file")


def read(data: bytes) -> tuple[int, list[Tensor]]:
    """Bytes before the first tensor, and the tensors by place.

    Raises ValueError for what is no such file.
    """
    try:
        return _read(data)
    except (struct.error, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a valid GGUF file: {error!r}") from error


def _read(data: bytes) -> tuple[int, list[Tensor]]:
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    if bytes(data[:4]) != MAGIC or version not in VERSIONS or max(keys, tensors) > COUNT_MAX:
        raise ValueError("not a little-endian GGUF file of version 2 or 3")
    at, alignment = 24, ALIGNMENT
    for _ in range(keys):
        key, at = _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        if key == b"general.alignment" and kind == U32:
            (alignment,) = struct.unpack_from("<I", data, at + 4)
        at = _skip(data, at + 4, kind)
    found = []
    for _ in range(tensors):
        name, at = _text(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        (offset,) = struct.unpack_from("<Q", data, at + 4 + 8 * dimensions + 4)
        at += 4 + 8 * dimensions + 4 + 8
        found.append(Tensor(name, offset))
    begin = -(-at // max(1, alignment)) * max(1, alignment)
    if begin > len(data) and found:
        raise ValueError(f"tensors start at {begin}, after the end of the file")
    placed = [tensor._replace(begin=begin + tensor.begin) for tensor in found]
    return begin, sorted(placed, key=lambda tensor: tensor.begin)


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError(f"a string of {length} bytes at offset {at} exceeds {len(data)} bytes")
    return bytes(data[at + 8 : end]), end


def _skip(data: bytes, at: int, kind: int) -> int:
    """Where the value of this type that begins at `at` ends."""
    if kind == TEXT:
        (length,) = struct.unpack_from("<Q", data, at)
        return at + 8 + int(length)
    if kind != ARRAY:
        return at + SCALARS[kind]
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item in SCALARS:
        return at + SCALARS[item] * int(count)
    for _ in range(count):
        # A place behind the end ends the loop: nothing can be read there.
        at = _skip(data, at, item)
    return at
