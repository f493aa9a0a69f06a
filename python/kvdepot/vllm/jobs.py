"""Jobs: what the scheduler's side asks of the workers, what they make of it, what they report.

`kvdepot.vllm.messages` is how vLLM carries it. A **ticket** is one job as kvdepot counts it. vLLM's
own job accounting cannot be used for that: it reports neither failed stores nor jobs that a cache
reset dropped, and reservations and pins must end in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvdepot
from kvdepot.vllm.compat import OffloadKey, ReqContext
from kvdepot.vllm.faults import SafeNamespace

# Stands for "verify, but do not deliver" in the rows of a load.
SKIP = -1

# ---- between the processes -------------------------------------------------------------------


class GroupPlacements(NamedTuple):
    """Where the blocks of one KV group of a job are, or are to be written."""

    group: int
    """Its position among the engine's KV groups."""
    placements: list[bytes | None]
    """One a block, in the order of vLLM's block ids. None: the block is gone, report it as
    undelivered."""
    compared: frozenset[int] = frozenset()
    """In a store, indexes of the blocks that are stored already: vLLM's are compared with them, and
    not written."""


class Difference(NamedTuple):
    """How what vLLM has computed differs from what is stored."""

    largest: float
    """The largest relative difference of a row of keys or values."""
    layers: dict[str, float]
    """The same of each layer that differs by more than the tolerance of its type."""


@dataclass
class WorkerReport:
    """One rank's outcome of one ticket."""

    checksums: list[bytes | None] | None = None
    """Of a store: a checksum a block, None where the copy failed."""
    differences: dict[int, Difference] = field(default_factory=dict)
    """Of a store: by index, of blocks that were compared. Those without could not be."""
    corrupt: list[int] = field(default_factory=list)
    """Of a load: indexes of the blocks that did not verify. Of a store, stored ones that were to be
    compared."""
    undelivered: list[int] = field(default_factory=list)
    """Of a load: indexes of the blocks that were not moved; they may well be sound."""


Reports = dict[int, dict[int, WorkerReport]]
"""ticket -> rank -> report"""


# ---- in the scheduler's process --------------------------------------------------------------

Ident = tuple[int, bytes]
"""A block as kvdepot knows it: KV group of vLLM, 32-byte key."""


@dataclass
class Group:
    """One KV group's namespace and what its blocks look like."""

    position: int
    """Its index among the groups of a job."""
    namespace: SafeNamespace
    part_bytes: list[int]
    """What each rank adds to a block."""
    tokens: int = 1
    """Of a block."""
    window: int | None = None
    """Blocks of a sliding window, which vLLM looks up from the last one back; None for others."""


Groups = dict[int, Group]
"""By vLLM's index of the KV group."""


@dataclass
class LoadTicket:
    """A load that is not reported by all ranks yet."""

    groups: Groups
    """Those of its time: a reset may have replaced them since."""
    request: str
    idents: list[Ident]
    pins: list[kvdepot.Pin | None]
    heard: set[int] = field(default_factory=set)
    """Ranks that have reported."""
    failed: set[int] = field(default_factory=set)
    """Indexes of blocks that some rank could not load."""


Kind = tuple[bytes, tuple[str, ...]]
"""The adapter of a request, and what of images, audio and video stands in its hit."""


@dataclass
class Plan:
    """What is decided for a request with a hit."""

    cut: int
    """Tokens up to which it may be loaded."""
    end: int
    """Tokens of the hit. Blocks between are compared."""
    kind: Kind
    most: float = math.inf
    """Tokens that may be computed though they could be loaded."""
    waits: bool = False
    """Whether it is computed without being compared, until another request has been."""
    admitted: bool = False
    offered: bool = False
    """Whether vLLM has offered all of its blocks for storing."""
    under_way: int = 0
    """Stores whose comparisons are not reported."""
    agreed: int = 0
    """Blocks."""
    failed: bool = False
    unknown: bool = False
    """Whether blocks could not be compared."""
    short: bool = False
    """Whether it was over before all of its blocks were offered."""

    @property
    def whole(self) -> bool:
        """Whether all of the hit is computed, and compared."""
        return self.most == math.inf

    def compares(self, key: OffloadKey, context: ReqContext, tokens: int = 1) -> bool:
        """Whether a block of so many tokens is to be compared. A block that is stored before it is
        full has undefined bytes after its last token."""
        end = context.get_offload_key_position(key)
        return end is not None and self.cut < end <= self.end and end % tokens == 0


@dataclass
class StoreTicket:
    """A store that is not reported by all ranks yet."""

    groups: Groups
    request: str
    idents: list[Ident]
    lengths: list[int]
    reservations: dict[int, kvdepot.Reservation] = field(default_factory=dict)
    """By index."""
    compared: dict[int, kvdepot.Pin] = field(default_factory=dict)
    """By index, the stored blocks that vLLM's are compared with."""
    plan: Plan | None = None
    """Why they are compared (`kvdepot.vllm.probes`)."""
    heard: dict[int, WorkerReport] = field(default_factory=dict)
    """rank -> its report"""
    stale: bool = False
    """Whether a reset has come since: nothing of it is published."""


# ---- in a worker -----------------------------------------------------------------------------


@dataclass
class Part:
    """The blocks of one KV group in a job."""

    group: int
    first: int
    """Index of its first block among all blocks of the job."""
    placements: list[bytes | None]
    rows: npt.NDArray[np.int64]
    """vLLM's block ids, a row for each block; SKIP where vLLM holds a piece already."""
    complete: bool
    """Whether none of them is SKIP. Of a store that is not, none is known to be in its place."""
    compared: frozenset[int] = frozenset()
    """Indexes of the blocks of a store that are compared, and not moved."""

    def movable(self, *, load: bool) -> Sequence[int]:
        """Indexes of the blocks that have a place, and in a store all their bytes."""
        every = range(len(self.rows) if load or self.complete else 0)
        if None not in self.placements and not self.compared:
            return every
        left = self.compared
        return [n for n in every if self.placements[n] is not None and n not in left]

    def comparable(self) -> list[int]:
        """Indexes of the blocks that are compared, and that vLLM has whole."""
        return sorted(self.compared) if self.complete else []

    def chosen(self, indexes: Sequence[int]) -> list[bytes]:
        """The placements of movable blocks."""
        return [found for index in indexes if (found := self.placements[index]) is not None]

    def rows_of(self, indexes: Sequence[int]) -> npt.NDArray[np.int64]:
        """vLLM's block ids of movable blocks."""
        return self.rows if len(indexes) == len(self.rows) else self.rows[list(indexes)]


class Moving(NamedTuple):
    """Blocks of a part that are under way."""

    part: Part
    indexes: Sequence[int]
    """Which of its blocks."""
    move: kvdepot.MoveJob


class Comparing(NamedTuple):
    """Blocks of a part that are being compared."""

    part: Part
    indexes: Sequence[int]
    outcomes: Future[list[Difference | bool | None]]
    """How each differs; False for a stored block that is corrupt, None for one that could not be
    read."""


@dataclass
class Job:
    """A job under way."""

    ticket: int
    load: bool
    parts: list[Part]
    started: float
    moves: list[Moving] = field(default_factory=list)
    comparisons: list[Comparing] = field(default_factory=list)
    failed: bool = False
    """Whether nobody knows what became of it."""

    @property
    def blocks(self) -> int:
        """How many blocks the job has."""
        return sum(len(part.rows) for part in self.parts)

    def vllm_blocks(self, indexes: set[int]) -> set[int]:
        """vLLM's ids of the blocks with these indexes."""
        return {
            block
            for part in self.parts
            for index, row in enumerate(part.rows.tolist())
            if part.first + index in indexes
            for block in row
            if block != SKIP
        }


def unpin(
    groups: Groups, pairs: Iterable[tuple[Ident, kvdepot.Pin | None]], *, served: bool
) -> None:
    """End pins; those that served a load are promoted to the near tier."""
    by_group: dict[int, list[kvdepot.Pin]] = {}
    for (group, _), pin in pairs:
        if pin is not None:
            by_group.setdefault(group, []).append(pin)
    for group, pins in by_group.items():
        groups[group].namespace.unpin(pins, served=served)
