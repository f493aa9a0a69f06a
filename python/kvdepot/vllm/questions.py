"""What a request has asked of a depot that may answer late: nobody waits for such an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

import kvdepot
from kvdepot.vllm.compat import LookupResult, OffloadKey, get_offload_group_idx
from kvdepot.vllm.faults import Faults
from kvdepot.vllm.jobs import Group, Groups, Ident
from kvdepot.vllm.prompts import Prompt
from kvdepot.vllm.rows import Row

# How long an answer that usually comes at once is waited for.
PROMPT_SECONDS = 0.005
# Until a block is asked for again that had no room on its way to the near tier.
AGAIN_SECONDS = 0.05


class Patience:
    """How long requests have been told to look up again. The time that a request with a hit waits
    for room in vLLM's KV cache does not count."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        # In this step.
        self._hits: set[str] = set()
        self._waiting: set[str] = set()

    def seconds(self, request: str, now: float) -> float:
        """How long the request has waited for an answer, from the first call on."""
        return now - self._since.setdefault(request, now)

    def heard(self, request: str, answer: LookupResult) -> LookupResult:
        """The request got this answer, which is returned."""
        if answer is LookupResult.HIT:
            self._hits.add(request)
        elif answer is not LookupResult.MISS:
            self._waiting.add(request)
        return answer

    def waits(self, request: str) -> bool:
        """Whether the request was told to look up again in this step."""
        return request in self._waiting

    def end_step(self) -> None:
        """A step is over: requests that had a hit and were not told to look up again wait for
        room, and not for an answer."""
        for request in self._hits - self._waiting:
            self.forget(request)
        self._hits.clear()
        self._waiting.clear()

    def forget(self, request: str) -> None:
        """The request waits no longer."""
        self._since.pop(request, None)


class Fetch:
    """Blocks that a request has had brought near in one call."""

    def __init__(self, task: kvdepot.Task | None, idents: list[Ident]) -> None:
        """`task` is None where the call has failed."""
        self._task = task
        self._idents = idents
        self._begun = time.monotonic()
        self._dropped: frozenset[Ident] | None = None

    def has_dropped(self, ident: Ident) -> bool:
        """Whether the block had no room on its way to the near tier."""
        if self._task is None or not self._task.done:
            return False
        if self._dropped is None:
            pairs = zip(self._idents, self._task.errors, strict=True)
            self._dropped = frozenset(ident for ident, error in pairs if error == "dropped")
        return ident in self._dropped

    def is_due(self, ident: Ident) -> bool:
        """Whether the block is on its way, or it is too early to ask for it again."""
        if self._task is None:
            return False
        if not self._task.done:
            return True
        is_early = time.monotonic() < self._begun + AGAIN_SECONDS
        return is_early and self.has_dropped(ident)


class Arrivals:
    """Blocks that come into the near tier before they can be loaded: those of tiers that the
    workers' lanes do not reach. Each is waited for once by a request, and asked for again where
    it had no room on its way."""

    def __init__(self) -> None:
        self._coming: dict[str, dict[Ident, Fetch]] = {}

    def are_due(self, request: str, ident: Ident, may_wait: Callable[[], bool]) -> bool:
        """Whether the request has fetched this block, and waits for it still."""
        fetch = self._coming.get(request, {}).get(ident)
        return fetch is not None and fetch.is_due(ident) and may_wait()

    def fetch(
        self,
        request: str,
        idents: list[Ident],
        fetch: Callable[[], kvdepot.Task | None],
        may_wait: Callable[[], bool],
    ) -> bool:
        """Have blocks brought near, unless this request has had them brought; whether they come
        now."""
        coming = self._coming.setdefault(request, {})
        before = coming.get(idents[0])
        if before is not None and not (before.has_dropped(idents[0]) and may_wait()):
            return False
        task = fetch()
        now = Fetch(task, idents)
        for ident in idents:
            if ident not in coming or coming[ident].has_dropped(ident):
                coming[ident] = now
        return task is not None

    def forget(self, request: str) -> None:
        """The request is over."""
        self._coming.pop(request, None)

    def clear(self) -> None:
        """What was fetched means nothing any more."""
        self._coming.clear()


class Questions:
    """Asks the depot for blocks, and for their pins."""

    def __init__(self, faults: Faults, *, late: bool, refused: Callable[[], Set[Ident]]) -> None:
        """`late` says whether some tier answers later than at once; `refused` returns the blocks
        that are stored and must not be served."""
        self._faults = faults
        self._refused = refused
        self.late = late
        self._arrivals = Arrivals()

    def answer(
        self, group: Group, prompt: Prompt, row: Row, at: int, may_wait: Callable[[], bool]
    ) -> LookupResult:
        """HIT for a block that is pinned now, RETRY while the depot has not answered or brings the
        block near, MISS for others."""
        request = prompt.rows.context.req_id
        ident = get_offload_group_idx(row.keys[at]), row.names[at]
        if self._arrivals.are_due(request, ident, may_wait):
            return LookupResult.RETRY
        stored = self._is_stored(group, prompt, row, at, may_wait)
        if stored is None:
            return LookupResult.RETRY
        if not stored:
            return LookupResult.MISS
        left = self._pin(group, prompt, row, at)
        if row.keys[at] in prompt.held:
            return LookupResult.HIT
        if self.late and self._fetch(group, prompt, row, left, may_wait):
            return LookupResult.RETRY
        for index in left:
            if row.keys[index] not in prompt.held:
                row.lost(index)
        return LookupResult.MISS

    def ask_others(self, groups: Groups, prompt: Prompt, key: OffloadKey) -> None:
        """Have the depot learn what vLLM would have taken of the other groups.

        It looks into none of them behind a miss; what of a request is never asked for would not
        be stored again, and the rest is worth nothing without it.
        """
        for other, names in prompt.rows.others(key):
            group = groups.get(get_offload_group_idx(other))
            if group is not None:
                group.namespace.lookup(names)

    def forget(self, request: str) -> None:
        """The request is over."""
        self._arrivals.forget(request)

    def clear(self) -> None:
        """What was fetched means nothing any more."""
        self._arrivals.clear()

    def _is_stored(
        self, group: Group, prompt: Prompt, row: Row, at: int, may_wait: Callable[[], bool]
    ) -> bool | None:
        """Whether a block is stored; None while the depot has not answered and the request may
        wait."""
        seconds = 0.0
        if not row.covers(at):
            prompt.tasks = [task for task in prompt.tasks if not task.done]
            # Waited for once: where one answer is late the next will be.
            seconds = 0.0 if prompt.tasks else PROMPT_SECONDS
            blocks = row.range_to_ask(at, group.window, whole=self.late)
            task = group.namespace.lookup(row.names[blocks.start : blocks.stop])
            if task is None:
                return False
            row.asked(blocks, task)
        if row.task is None:
            return row.is_stored(at)
        nothing: list[bool] | None = None
        answer = self._faults.attempt("lookup", nothing, _answer, row.task, seconds)
        if answer is not None:
            refused = self._refused()
            if refused:
                asked = zip(row.names[row.first :], answer, strict=False)
                answer = [stored and (row.group, name) not in refused for name, stored in asked]
            row.answered(answer)
            return row.is_stored(at)
        if may_wait():
            if row.task not in prompt.tasks:
                prompt.tasks.append(row.task)
            return None
        row.forget_question()
        return False

    def _pin(self, group: Group, prompt: Prompt, row: Row, at: int) -> range:
        """Pin this stored block and those that vLLM asks for next; the blocks to fetch if that
        fails."""
        run = row.run_from(at, group.window)
        keys, names = row.keys[run.start : run.stop], row.names[run.start : run.stop]
        # No more: a pin that finds nothing counts as a miss.
        pins = group.namespace.pin(names, prefix=group.window is None)
        pinned = [pin for pin in pins if pin is not None]
        if group.window is None:
            prompt.held.update(zip(keys, pinned, strict=False))
            return run[len(pinned) :]
        pairs = zip(keys, pins, strict=True)
        prompt.held.update((key, pin) for key, pin in pairs if pin is not None)
        return run

    def _fetch(
        self,
        group: Group,
        prompt: Prompt,
        row: Row,
        blocks: range,
        may_wait: Callable[[], bool],
    ) -> bool:
        """Have blocks brought near that no worker reaches: once a request, and again if dropped."""
        names = row.names[blocks.start : blocks.stop]
        number = get_offload_group_idx(row.keys[0])

        def fetch() -> kvdepot.Task | None:
            task = group.namespace.prefetch(names)
            if task is not None:
                prompt.tasks.append(task)
            return task

        idents = [(number, name) for name in names]
        return self._arrivals.fetch(prompt.rows.context.req_id, idents, fetch, may_wait)


def _answer(task: kvdepot.Task, seconds: float) -> list[bool] | None:
    """Which keys are stored; None where the answer takes longer."""
    try:
        return task.wait(seconds)
    except kvdepot.TimeoutError:
        return None
