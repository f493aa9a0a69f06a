"""What identifies a model's weights: names, sizes, headers and a sample, or all of their bytes.

Reading tens of gigabytes to hash them would delay every start by minutes. Names and sizes alone
miss the case that hurts, two fine-tunings of the same shape. So a file is sampled: its header, one
page of each MiB, and at least one of each tensor. A change that lies between those pages, a few
rows of an embedding for example, goes unnoticed; `full` reads everything. A file in the Hugging
Face cache is a link whose target is named after its content; then the name is enough.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvdepot
from kvdepot.engine import files, gguf

SAMPLED, FULL = "sampled", "full"
PAGE_BYTES = 4096
SAMPLED_BYTES = 1 << 20
# Spreads the pages, so that no regular pattern of changes lies between them.
STRIDE = 2654435761
# Larger headers do not exist; a corrupt length must not make us read a file.
MAX_HEADER_BYTES = 1 << 28
# Files up to this size are read whole.
SMALL_BYTES = 64 << 10

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

CONFIG_FILES = ("config.json", "params.json")
# What the program that wrote a configuration says of itself.
OF_THE_WRITER = ("_name_or_path", "transformers_version")
TOKENIZER_FILES = (
    "tokenizer* vocab* merges.txt special_tokens_map.json added_tokens.json tekken.json *.model "
    "*.tiktoken"
)
# Files of a model's directory that no keys and values depend on.
HARMLESS_FILES = {
    "blocks are named by token ids": TOKENIZER_FILES,
    "how prompts are written, and how tokens are drawn": "*.jinja chat_template* "
    "generation_config.json",
    "engines hand over what they made of it, which counts": " ".join(CONFIG_FILES),
    "for people": "*.md *.txt *.rst *.pdf *.png *.jpg *.jpeg *.gif *.svg *.ipynb LICENSE* NOTICE* "
    "README* .git* .DS_Store",
    "other programs' working files": "*.lock *.tmp *.incomplete *.metadata",
}
# They count where something that is no text is put in.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "audio_preprocessor_config.json",
)
# Folders with more of them.
PROCESSOR_FOLDERS = ("speech_tokenizer", "whisper-large-v3")


def mode_of(setting: str) -> str:
    """How files are read, for a setting `sampled`, `full` or a text that names the weights."""
    return FULL if setting == FULL else SAMPLED


def directory_of(
    model: str, revision: str | None = None, caches: Sequence[str | None] = (None,)
) -> Path | None:
    """Where a model's files are: its directory, or a Hugging Face cache's for its revision.

    None for a model that is in neither, and for one that is a single file.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        return None
    found = []
    for cache in caches:
        # It raises many kinds of errors for a name that is none, for example a URL.
        with contextlib.suppress(Exception):
            from huggingface_hub import snapshot_download

            snapshot = snapshot_download(
                model, revision=revision, cache_dir=cache, local_files_only=True
            )
            found.append(Path(snapshot))
    with_weights = [one for one in found if has_weights(one)]
    return next(iter(with_weights or found), None)


def of_directory(
    directory: Path, mode: str = SAMPLED, *, code: bool = True, config: bool = False
) -> str:
    """Fingerprint (64 hex digits) of the files of a model's or an adapter's directory.

    `code` is whether Python files count, which an engine runs only if it trusts them; `config` is
    whether the model's configuration does, for an engine that does not hand it over. Raises OSError
    where a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files_of(directory):
        if path.suffix != ".py" or code:
            _add(digest, path.name, of_file(path, mode))
    for name in CONFIG_FILES if config else ():
        with contextlib.suppress(FileNotFoundError):
            _add(digest, name, _of_config((directory / name).read_bytes()))
    return digest.hexdigest()


def _of_config(text: bytes) -> str:
    """Digest of a model's configuration, without what its writer says of itself."""
    with contextlib.suppress(ValueError):
        config = json.loads(text)
        if isinstance(config, dict):
            config = {name: value for name, value in config.items() if name not in OF_THE_WRITER}
        text = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


def files_of(directory: Path) -> list[Path]:
    """The files of a model's directory that count, in order."""
    left_out = " ".join(HARMLESS_FILES.values()).split()
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.name not in PROCESSOR_FILES
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in left_out)
    ]


def processor_files_of(directory: Path) -> list[Path]:
    """The files of a model's directory that say how images, audio and video are read, in order."""
    found = [directory / name for name in PROCESSOR_FILES]
    for folder in PROCESSOR_FOLDERS:
        inside = sorted((directory / folder).glob("*"))
        found += [path for path in inside if path.suffix not in WEIGHT_SUFFIXES]
    return [path for path in found if path.is_file()]


def of_processor(directory: Path) -> str:
    """Fingerprint (64 hex digits) of the files that say how images, audio and video are read."""
    digest = hashlib.sha256()
    for path in processor_files_of(directory):
        if path.parent == directory:
            _add(digest, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        else:
            _add(digest, f"{path.parent.name}/{path.name}", of_file(path, FULL))
    return digest.hexdigest()


def tokenizer_files_of(directory: Path) -> list[Path]:
    """The files of a model's directory that say how tokens are written, in order."""
    names = TOKENIZER_FILES.split()
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in names)
    ]


def of_tokenizer(directory: Path) -> str:
    """Fingerprint (64 hex digits) of a tokenizer's files, for models that read them."""
    digest = hashlib.sha256()
    for path in tokenizer_files_of(directory):
        _add(digest, path.name, of_file(path, FULL))
    return digest.hexdigest()


def has_weights(directory: Path) -> bool:
    """Whether there are files of weights in a directory."""
    return any(path.suffix in WEIGHT_SUFFIXES for path in directory.iterdir())


def of_file(path: Path, mode: str = SAMPLED) -> str:
    """Fingerprint (64 hex digits) of one file; `mode` is `sampled` or `full`."""
    blob = content_name(path)
    if blob is not None:
        return hashlib.sha256(b"blob" + blob.encode()).hexdigest()
    if mode == FULL:
        return hashlib.sha256(b"full" + _full(path).encode()).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _add(digest, "size", str(size))
        for offset, length in _pieces(file.fileno(), size, path.suffix):
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


def changed_since(paths: Sequence[Path], seconds: float) -> Path | None:
    """The first of these files that changed after a time in seconds since the epoch, or the link on
    its path or the directory that changed; None if nothing did.

    A new owner or mode counts as a change.
    """
    for path in paths:
        if content_name(path) is not None and "snapshots" in path.parent.resolve().parts:
            # The name identifies the content, and the engine may have fetched the file just now.
            links = _links(path.parent)
        elif path.stat().st_ctime > seconds:
            return path
        else:
            links = _links(path)
            directory = path.parent.stat()
            # A new entry in a directory sets both times, and a move of the directory only one.
            if directory.st_ctime > seconds >= directory.st_mtime:
                return path.parent
        for link in links:
            if link.lstat().st_ctime > seconds:
                return link
    return None


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links on the path of a file or directory, also of the links' targets."""
    for part in (path, *path.parents):
        # The kernel sets the times of a link in /proc when the link is first accessed.
        if part.is_symlink() and not part.is_relative_to("/proc"):
            yield part
            yield from _links(part.parent / part.readlink())


def content_name(path: Path) -> str | None:
    """The content hash that the Hugging Face cache names a file after."""
    if not path.is_symlink():
        return None
    target = Path(os.readlink(path))
    name = target.name
    is_hash = len(name) in (40, 64) and all(c in "0123456789abcdef" for c in name)
    return name if target.parent.name == "blobs" and is_hash else None


def _full(path: Path) -> str:
    """SHA-256 of a file, from the cache if the file is what it was."""
    stat = path.stat()
    state = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    cache = (
        files.cache_directory()
        / "weights"
        / hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(cache.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        now = os.fstat(file.fileno())
    after = [now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    if after != state:
        raise kvdepot.ConfigError(
            f"weights: {str(path)!r} changed during the read; restart the engine"
        )
    with contextlib.suppress(OSError):
        files.write(cache, json.dumps({"state": state, "sha256": digest.hexdigest()}))
    return digest.hexdigest()


def _pieces(descriptor: int, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """(offset, length) of everything that enters the fingerprint of a file."""
    if size <= SMALL_BYTES:
        yield 0, size
        return
    if suffix == ".safetensors":
        # Fewer bytes if the file was truncated after its size was read.
        header_length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if header_length <= min(size - 8, MAX_HEADER_BYTES):
            begin = 8 + header_length
            yield 0, begin
            at = begin
            for start, end in _tensors(os.pread(descriptor, header_length, 8)):
                yield from _pages(begin + start, min(begin + end, size))
                at = max(at, begin + end)
            # What no tensor claims.
            yield from _pages(min(at, size), size)
            return
    # Whatever it is called: some programs name files after their content.
    with contextlib.suppress(ValueError):
        begin, tensors = gguf.read_file(descriptor)
        yield 0, begin
        ends = [tensor.begin for tensor in tensors[1:]] + [size]
        for tensor, end in zip(tensors, ends, strict=True):
            yield from _pages(tensor.begin, min(end, size))
        return
    yield 0, PAGE_BYTES
    yield from _pages(0, size)
    yield size - PAGE_BYTES, PAGE_BYTES


def _pages(start: int, end: int) -> Iterator[tuple[int, int]]:
    """A page of each MiB of a range, at least one of the whole."""
    for number, first in enumerate(range(start, end, SAMPLED_BYTES)):
        last = min(first + SAMPLED_BYTES, end)
        # Whole pages of the file where there are any.
        low = -(-first // PAGE_BYTES)
        count = last // PAGE_BYTES - low
        if count > 0:
            yield (low + number * STRIDE % count) * PAGE_BYTES, PAGE_BYTES
        else:
            yield first, min(PAGE_BYTES, last - first)


def _tensors(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        ranges = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in ranges)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Not a header that we understand; the engine will say so when it loads the file.
        return []


def _add(digest: hashlib._Hash, name: str, value: str) -> None:
    for text in (name, value):
        data = os.fsencode(text)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
