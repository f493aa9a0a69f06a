"""What identifies a model's weights, cheaply: names, sizes, headers and samples.

Reading tens of gigabytes to hash them would delay every start by minutes. Names
and sizes alone miss the case that hurts, two fine-tunings of the same shape, so
each file is sampled too: of a safetensors file the header and a piece from the
middle of every tensor, of any other file pieces at even distances. A file in
the Hugging Face cache is a link whose target is named after its content; then
the name is enough.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

# A training step changes nearly every value of a tensor it trains, so a few
# from its middle show that it changed; 256 bytes are one sector read anyway.
SAMPLE_BYTES = 256
SAMPLES_OF_OTHER_FILES = 64
# Larger headers do not exist; a corrupt length must not make us read a file.
MAX_HEADER_BYTES = 1 << 28

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def of_directory(directory: Path) -> str:
    """Fingerprint (64 hex digits) of the weights files and JSON files of a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        if path.suffix in WEIGHT_SUFFIXES:
            _add(digest, path.name, of_file(path))
        elif path.name in ("config.json", "adapter_config.json"):
            _add(digest, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
    return digest.hexdigest()


def of_file(path: Path) -> str:
    """Fingerprint (64 hex digits) of one weights file."""
    blob = _content_name(path)
    if blob is not None:
        return hashlib.sha256(b"blob" + blob.encode()).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _add(digest, "size", str(size))
        for offset, length in _pieces(file.fileno(), size, path.suffix):
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


class AdapterFingerprints:
    """Fingerprints of LoRA adapters, computed again when their files change."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[str, int, int], ...], str]] = {}

    def of(self, path: str) -> str:
        """Fingerprint of the adapter at `path`; of its name alone if that is not a directory."""
        directory = Path(path)
        if not directory.is_dir():
            return hashlib.sha256(path.encode()).hexdigest()
        files = sorted(entry for entry in directory.iterdir() if entry.is_file())
        state = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
        known = self._known.get(path)
        if known is None or known[0] != state:
            known = (state, of_directory(directory))
            self._known[path] = known
        return known[1]


def _content_name(path: Path) -> str | None:
    """The content hash that the Hugging Face cache names a file after."""
    if not path.is_symlink():
        return None
    target = Path(os.readlink(path))
    name = target.name
    is_hash = len(name) in (40, 64) and all(c in "0123456789abcdef" for c in name)
    return name if target.parent.name == "blobs" and is_hash else None


def _pieces(descriptor: int, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """(offset, length) of everything that enters the fingerprint of a file."""
    if suffix == ".safetensors" and size >= 8:
        (header_length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        if header_length <= min(size - 8, MAX_HEADER_BYTES):
            yield 0, 8 + header_length
            for start, end in _tensors(os.pread(descriptor, header_length, 8)):
                middle = 8 + header_length + max(start, (start + end - SAMPLE_BYTES) // 2)
                yield middle, min(SAMPLE_BYTES, end - start)
            return
    step = max(SAMPLE_BYTES, size // SAMPLES_OF_OTHER_FILES)
    for offset in range(0, size, step):
        yield offset, SAMPLE_BYTES
    yield max(0, size - SAMPLE_BYTES), SAMPLE_BYTES


def _tensors(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        ranges = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in ranges)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Not a header that we understand; vLLM will say so when it loads the file.
        return []


def _add(digest: hashlib._Hash, name: str, value: str) -> None:
    for text in (name, value):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
