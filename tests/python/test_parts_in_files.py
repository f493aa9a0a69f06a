"""Blocks in parts over a directory of files: a file is published once all parts have arrived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvd_reader
import kvdepot

PART = 10_000
LENGTH = 2 * PART


def settings(tmp_path: Path) -> dict[str, Any]:
    posix = {"path": str(tmp_path / "blocks"), "capacity": "64MiB"}
    return {"cache": {"capacity": "1MiB"}, "posix": posix}


def namespace(depot: kvdepot.Depot) -> kvdepot.Namespace:
    return depot.namespace(model="m", dtype="float32", block_tokens=16, world="tp2")


def test_a_block_whose_other_rank_never_arrived_is_in_no_file(
    tmp_path: Path, keys: Callable[[int], list[bytes]]
) -> None:
    names = whole, _half = keys(2)
    with kvdepot.open("Cache|Posix", settings(tmp_path)) as depot:
        assert depot.socket is not None
        ns = namespace(depot)
        held = [one for one in ns.reserve(names, LENGTH, parts=2) if one is not None]
        assert len(held) == 2
        sums: list[list[bytes]] = [[], []]
        # Two ranks, one process each; the second one ends before it has written the second block.
        for part in (0, 1):
            with kvdepot.attach(depot.socket, lanes=1) as rank:
                mine = held[: 2 - part]
                data = [bytes([part + 1]) * PART] * len(mine)
                job = rank.store([one.placement for one in mine], data, part=part)
                assert job.wait(30)
                for found, checksum in zip(sums, job.checksums, strict=False):
                    assert checksum is not None
                    found.append(checksum)
        assert not any(ns.contains(names)), "no part alone is to be seen"
        assert ns.commit(held[:1], sums[:1]) == [True]
        ns.abort(held[1:])
        assert depot.drain(30)
        assert ns.contains(names) == [True, False]

    (file,) = (tmp_path / "blocks" / "blocks").glob("*/*")
    with file.open("rb") as medium:
        reader = kvd_reader.BlockFile(medium)
        (record,) = reader.blocks()
        assert (record.key, record.parts, reader.fault(record)) == (whole, 2, None)
        # The one that is written behind has its leaves, part for part.
        parts = [bytes([part + 1]) * PART for part in (0, 1)]
        assert reader.leaves == [kvd_reader.xxh3_128(part) for part in parts]

    # Another instance, with nothing in its memory.
    with kvdepot.open("Cache|Posix", settings(tmp_path)) as depot:
        ns = namespace(depot)
        assert ns.contains(names) == [True, False]
        (pin,) = (pin for pin in ns.pin(names) if pin is not None)
        assert pin.length == LENGTH
        assert depot.socket is not None
        with kvdepot.attach(depot.socket, lanes=1, write=False) as rank:
            for part in (0, 1):
                out = bytearray(PART)
                job = rank.load([pin.placement], [out], part=part)
                assert job.wait(30)
                assert job.results == [True]
                assert out == bytes([part + 1]) * PART
        ns.unpin([pin])
