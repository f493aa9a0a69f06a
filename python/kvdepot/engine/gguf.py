"""Where a GGUF file has its tensors: as much of the format as a fingerprint needs.

Little-endian, versions 2 and 3: magic, version, counts; each key with its value; each tensor's
name, shape, type and offset; then, aligned, the tensors.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple, TypeAlias

Data: TypeAlias = bytes | memoryview | mmap.mmap

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# Bytes of a value, by its type's number; texts and arrays are of no fixed length.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
U32 = 4
# More than files have: a torn count must not keep us busy.
TENSORS_MAX = 1 << 20


class Tensor(NamedTuple):
    """A tensor's name, and where in the file its bytes begin."""

    name: bytes
    begin: int


def read(data: Data) -> tuple[int, list[Tensor]]:
    """Bytes before the first tensor, and the tensors by place.

    Raises ValueError for what is no such file.
    """
    try:
        return _read(data)
    except (struct.error, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"no GGUF file: {error!r}") from error


def _read(data: Data) -> tuple[int, list[Tensor]]:
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    if bytes(data[:4]) != MAGIC or version not in VERSIONS or tensors > TENSORS_MAX:
        raise ValueError("no GGUF file of version 2 or 3, little-endian")
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
    placed = [tensor._replace(begin=begin + tensor.begin) for tensor in found]
    return begin, sorted(placed, key=lambda tensor: tensor.begin)


def _text(data: Data, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError(f"a text of {length} bytes at {at} of {len(data)}")
    return bytes(data[at + 8 : end]), end


def _skip(data: Data, at: int, kind: int) -> int:
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
