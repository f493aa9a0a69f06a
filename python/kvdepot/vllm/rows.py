"""The blocks of a request by KV group, and which of them are stored.

vLLM looks blocks up one by one: from the first one on, and in a KV group with a sliding window from
the last one back. Here one question covers many blocks, and each block is in one question.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Container, Iterator
from operator import itemgetter

import kvdepot
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm.compat import OffloadKey, ReqContext, get_offload_group_idx, key_positions
from kvdepot.vllm.jobs import Group, Groups, Ident

GROUP_OF_KEY = itemgetter(slice(-4, None))
"""The bytes of vLLM's key that name its KV group."""


class Row:
    """The blocks of one KV group of a request, in prefix order, and what is known of them."""

    def __init__(self, group: int) -> None:
        self.group = group
        """vLLM's index of the KV group."""
        self.keys: list[OffloadKey] = []
        """vLLM's."""
        self.names: list[bytes] = []
        """Their keys in the group's namespace."""
        self.first = 0
        """The first block of the question that was asked last."""
        self.count = 0
        """Blocks of that question."""
        self.task: kvdepot.Task | None = None
        """Where its answer comes; None once it is there."""
        self.stored: list[bool] = []
        """The answer."""
        self.missing: set[bytes] = set()
        """Names of blocks that vLLM was told are not there. One that is stored may change what it
        can load."""

    def covers(self, at: int) -> bool:
        """Whether the last question has this block in it."""
        return self.first <= at < self.first + self.count

    def range_to_ask(self, at: int, window: int | None, *, whole: bool) -> range:
        """The blocks to ask for with this one: those that vLLM asks for next.

        With a `window` it asks backwards, and stops once a window is stored: the ranges double,
        unless the `whole` row is asked for at once.
        """
        if window is None:
            return range(at, len(self.keys))
        before = self.count if at == self.first - 1 else 0
        size = at + 1 if whole else max(window, 2 * before)
        return range(max(0, at + 1 - size), at + 1)

    def asked(self, blocks: range, task: kvdepot.Task) -> None:
        """A question was asked. An answer for the blocks right behind it stays."""
        if self.task is not None or blocks.stop != self.first:
            self.stored, self.count = [], 0
        self.first, self.count, self.task = blocks.start, self.count + len(blocks), task

    def answered(self, stored: list[bool]) -> None:
        """The answer to the last question came."""
        self.stored = stored + self.stored
        self.task = None

    def is_stored(self, at: int) -> bool:
        """Whether the answer has this block as stored."""
        return self.stored[at - self.first]

    def lost(self, at: int) -> None:
        """A block of the answer turned out to be gone, or to be no block that can be pinned."""
        self.stored[at - self.first] = False

    def run_from(self, at: int, window: int | None) -> range:
        """The stored blocks without a gap from this one on; with a `window` backwards, at most as
        many as it has."""
        index = at - self.first
        if window is None:
            try:
                end = self.stored.index(False, index)
            except ValueError:
                end = len(self.stored)
            return range(at, self.first + end)
        start = index
        while start > max(0, index + 1 - window) and self.stored[start - 1]:
            start -= 1
        return range(self.first + start, at + 1)

    def forget_answer(self) -> None:
        """Blocks are asked for again, unless the answer is still to come."""
        self.missing.clear()
        if self.task is None:
            self.count = 0
            self.stored = []

    def forget_question(self) -> None:
        """Whatever was asked is not waited for."""
        self.task = None
        self.forget_answer()

    def keys_behind(self, at: int, window: int | None) -> Iterator[OffloadKey]:
        """The keys that vLLM asks for after this block."""
        indexes = range(at + 1, len(self.keys)) if window is None else range(at - 1, -1, -1)
        return map(self.keys.__getitem__, indexes)

    def told_missing(self, at: int, window: int | None, storing: Container[Ident]) -> range:
        """The block is not stored; the blocks of which vLLM is told that with this one: behind it
        in a row with a `window`, up to the next that is stored, or is being stored."""
        start = at
        if window is not None and self.task is None and self.covers(at):
            while start > self.first and not self.stored[start - 1 - self.first]:
                if (self.group, self.names[start - 1]) in storing:
                    break
                start -= 1
        self.missing.update(self.names[start : at + 1])
        return range(start, at + 1)


class Rows:
    """The blocks of a request by KV group. While it is served they only grow in number."""

    def __init__(self, context: ReqContext, beside: vllm_beside.Beside) -> None:
        self.context = context
        self._beside = beside
        self._taken = 0
        self._rows: dict[bytes, Row] = {}
        # Blocks that are not among the full ones of their group.
        self._alone: dict[OffloadKey, Row] = {}

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain(self._rows.values(), self._alone.values())

    def find(self, key: OffloadKey) -> tuple[Row, int]:
        """The row of a block, and its index there."""
        positions = key_positions(self.context)
        if len(positions) > self._taken:
            self._take(positions)
        row, end = self._rows.get(GROUP_OF_KEY(key)), positions.get(key)
        if row is not None and end is not None:
            at = end // positions[row.keys[0]] - 1
            if 0 <= at < len(row.keys) and row.keys[at] == key:
                return row, at
        if key not in self._alone:
            row = self._alone[key] = Row(get_offload_group_idx(key))
            row.keys, row.names = [key], self._beside.keys([key], positions)
        return self._alone[key], 0

    def others(self, key: OffloadKey) -> Iterator[tuple[OffloadKey, list[bytes]]]:
        """For each other KV group, a key of it and the names of its blocks that end behind the one
        before this block."""
        positions = key_positions(self.context)
        row, at = self.find(key)
        start = positions[row.keys[at - 1]] if at else 0
        for other in self._rows.values():
            if GROUP_OF_KEY(other.keys[0]) != GROUP_OF_KEY(key):
                yield other.keys[0], other.names[start // positions[other.keys[0]] :]

    def forget_answers(self) -> None:
        """All blocks are asked for again, unless the answer is still to come."""
        for row in self:
            row.forget_answer()

    def take_over(self, before: Rows) -> None:
        """Keep what was asked for the same blocks under another context."""
        self._take(key_positions(self.context))
        same = {group for group, row in self._rows.items() if row.keys == before._keys(group)}
        self._rows.update((group, before._rows[group]) for group in same)

    def _keys(self, group: bytes) -> list[OffloadKey] | None:
        row = self._rows.get(group)
        return None if row is None else row.keys

    def _take(self, positions: dict[OffloadKey, int]) -> None:
        """Sort in the keys that are new."""
        new = list(itertools.islice(positions, self._taken, None))
        self._taken = len(positions)
        start = 0
        while start < len(new):
            group = GROUP_OF_KEY(new[start])
            row = self._rows.get(group)
            if row is None:
                row = self._rows[group] = Row(int.from_bytes(group, "big"))
            begin = len(row.keys)
            tokens = positions[row.keys[0] if begin else new[start]]
            end = _end_of_run(new, start, positions, tokens)
            row.keys += new[start:end]
            start = end
            if positions[row.keys[-1]] != tokens * len(row.keys):
                # vLLM names ends of prompts within a block, too.
                full = [key for key in row.keys[begin:] if positions[key] % tokens == 0]
                row.keys[begin:] = full
            row.names += self._beside.keys(row.keys[begin:], positions)


def _end_of_run(
    keys: list[OffloadKey], start: int, positions: dict[OffloadKey, int], tokens: int
) -> int:
    """End of the run of full blocks, `tokens` tokens each, of the KV group of the block at `start`.

    vLLM names all full blocks of a group in order. If a key is of this group, and ends `tokens`
    times its distance after the first block's end, all keys between are usually of the group, too.
    Keys for the end of a prompt within a block are an exception. Therefore the groups of all keys
    in the run are compared afterwards.
    """
    group, first = GROUP_OF_KEY(keys[start]), positions[keys[start]]

    def is_behind(at: int) -> bool:
        is_here = positions[keys[at]] - first == tokens * (at - start)
        return not is_here or GROUP_OF_KEY(keys[at]) != group

    end = start + bisect.bisect_left(range(start, len(keys)), True, key=is_behind)
    if _are_of(keys[start:end], group):
        return end
    return next((at for at in range(start, end) if GROUP_OF_KEY(keys[at]) != group), end)


def _are_of(keys: list[OffloadKey], group: bytes) -> bool:
    """Whether all keys are of this KV group.

    All keys have the same length, so the groups are compared as bytes of the concatenated keys.
    """
    text, length = b"".join(keys), len(keys[0])
    ends = range(length - len(group), length)
    return len(text) == length * len(keys) and all(
        text[end::length] == group[number : number + 1] * len(keys)
        for number, end in enumerate(ends)
    )


def by_group(
    keys: Collection[OffloadKey], groups: Groups
) -> Iterator[tuple[Group | None, list[OffloadKey]]]:
    """Runs of consecutive keys of one KV group, each with its entry of `groups`.

    The entry is None for a group that is not used.
    """
    members = list(keys)
    if len(groups) == 1 and members:
        # An engine uses either all of its groups or none, so this engine has no other group.
        ((number, group),) = groups.items()
        if get_offload_group_idx(members[0]) == get_offload_group_idx(members[-1]) == number:
            yield group, members
            return
    for _, run in itertools.groupby(members, GROUP_OF_KEY):
        members = list(run)
        yield groups.get(get_offload_group_idx(members[0])), members
