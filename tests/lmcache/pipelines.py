"""The pipelines that the acceptance tests run over, and what tests do to their media."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULT = "Dax"
PIPELINES = (DEFAULT, "Cache|Nvme", "Cache|Posix")
# Of what arenas alone have: one owner, devices, an index that knows all that is there.
ARENAS = (DEFAULT, "Cache|Nvme")

# Small beside what tests store, so that most is read from the tier behind it.
CACHE = "1MiB"


def last(pipeline: str) -> str:
    """The name of the tier that has everything."""
    return pipeline.rpartition("|")[2]


def settings(pipeline: str, folder: Path, capacity: int) -> dict[str, Any]:
    """The tiers' options, with dots."""
    section = last(pipeline).lower()
    found: dict[str, Any] = {
        "pipeline": pipeline,
        f"{section}.path": str(folder / "arena"),
        f"{section}.capacity": capacity,
    }
    if section == "posix":
        # A busy machine is no file system that hangs.
        found |= {"posix.lookup_timeout": "60s", "posix.timeout": "60s"}
    if pipeline.startswith("Cache|"):
        # With so small a queue to the tier behind, some of a batch would be dropped.
        found |= {"cache.capacity": CACHE, "overload": "wait"}
    return found


def media(folder: Path) -> Iterator[Path]:
    """The files that blocks lie in: an arena, or one a block."""
    arena = folder / "arena"
    if arena.is_file():
        yield arena
    else:
        yield from (path for path in (arena / "blocks").rglob("*") if path.is_file())


def damage(folder: Path, content: bytes, at: int, new: bytes) -> None:
    """Write over what lies `at` bytes into a block of this content."""
    for path in media(folder):
        found = path.read_bytes().find(content)
        if found >= 0:
            with path.open("r+b") as medium:
                medium.seek(found + at)
                medium.write(new)
            return
    raise AssertionError("no medium has that block")
