"""What identifies a model's weights, cheaply: names, sizes, headers and samples.

Reading tens of gigabytes to hash them would delay every start by minutes. Names
and sizes alone miss the case that hurts, two fine-tunings of the same shape, so
each file is sampled too: of a safetensors file the header and a piece from the
middle of every tensor, of any other file pieces at even distances. A file in
the Hugging Face cache is a link whose target is named after its content; then
the name is enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

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
    """Fingerprints of the LoRA adapters that the engine computes with.

    The engine loads an adapter's files when it first sees its id, or for
    `load_inplace`, and goes on with what it loaded when they change. It may
    also drop it and load it again, unseen from here: once the files have
    changed, nobody can tell which ones a block was computed with.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[_State | None, str]] = {}

    def of(self, adapter: Any) -> str:
        """Fingerprint for one request with `adapter`, one of vLLM's LoRARequests.

        A random one, so that its blocks are never found again, for files that
        are not on this host or have changed since they were loaded.
        """
        state = _state(adapter.lora_path)
        known = self._known.get(adapter.lora_int_id)
        if known is None or (adapter.load_inplace and known[0] != state):
            fingerprint = ""
            if state is not None:
                with contextlib.suppress(OSError):
                    fingerprint = of_directory(Path(state[0]))
            known = self._known[adapter.lora_int_id] = (state, fingerprint)
        elif known[0] != state:
            known = self._known[adapter.lora_int_id] = (None, "")
        return known[1] or secrets.token_hex(32)


def key_under(block_hash: bytes, adapter: bytes | None) -> bytes:
    """The key of a block that was computed under an adapter with this fingerprint, or none.

    vLLM's hash covers the adapter's name and path, not its files.
    """
    return block_hash if adapter is None else hashlib.sha256(block_hash + adapter).digest()


_State: TypeAlias = tuple[str, tuple[tuple[str, int, int], ...]]
"""A directory, and name, size and time of its files."""


def _state(path: str) -> _State | None:
    try:
        directory = _adapter_directory(path)
        files = sorted(entry for entry in directory.iterdir() if entry.is_file())
        stats = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    return str(directory), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _adapter_directory(path: str) -> Path:
    """Where vLLM takes an adapter's files from: a path, or a model id of the Hugging Face hub."""
    directory = Path(os.path.expanduser(path) if path.startswith("~") else path).absolute()
    if path.startswith(("/", "~")) or directory.exists():
        return directory
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true"):
        from huggingface_hub import try_to_load_from_cache

        # No id at all is a ValueError; vLLM says so to the request.
        with contextlib.suppress(ValueError):
            found = try_to_load_from_cache(path, "adapter_config.json")
            if isinstance(found, str):
                return Path(found).parent
    return directory


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
