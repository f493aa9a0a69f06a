"""What a request has asked of a depot that may answer late: nobody waits for such an answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

import kvdepot
from kvdepot.vllm.faults import Faults
from kvdepot.vllm.jobs import Ident

# How long an answer that usually comes at once is waited for.
PROMPT_SECONDS = 0.005

# The blocks that were asked for, and where the answer comes; None where nobody could be asked.
Question = tuple[list[Ident], kvdepot.Task | None]


class Questions:
    """Those that were not answered yet, by request and first block."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._asked: dict[str, dict[Ident, Question]] = {}

    def found(
        self, request: str, ident: Ident, ask: Callable[[], Question], may_wait: Callable[[], bool]
    ) -> tuple[list[Ident], int] | None:
        """What was asked for, and how many of the first blocks are stored. None while that is not
        known, and the request may wait: the question stays for the next time."""
        asked = self._asked.setdefault(request, {})
        before = asked.pop(ident, None)
        # vLLM asks on behind a block that is not known yet.
        if before is None and any(ident in idents for idents, _ in asked.values()) and may_wait():
            return None
        question = before or ask()
        idents, task = question
        nothing: list[bool] | None = None
        # Once: in each step of the engine there may be hundreds that are asked for again, and where
        # one answer is late the next will be.
        seconds = 0.0 if before or asked else PROMPT_SECONDS
        answer = task and self._faults.attempt("lookup", nothing, _answer, task, seconds)
        if task and answer is None and may_wait():
            asked[ident] = question
            return None
        return idents, sum(itertools.takewhile(bool, answer or []))

    def forget(self, request: str) -> None:
        """The request is over."""
        self._asked.pop(request, None)

    def clear(self) -> None:
        """What was asked means nothing any more."""
        self._asked.clear()


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


class Arrivals:
    """Blocks that come into the near tier before they can be loaded: those of tiers that the
    workers' lanes do not reach. Each is waited for once by a request."""

    def __init__(self) -> None:
        self._coming: dict[str, dict[Ident, kvdepot.Task | None]] = {}

    def are_due(self, request: str, ident: Ident, may_wait: Callable[[], bool]) -> bool:
        """Whether the request has fetched this block, and waits for it still."""
        task = self._coming.get(request, {}).get(ident)
        return task is not None and not task.done and may_wait()

    def fetch(
        self, request: str, idents: list[Ident], fetch: Callable[[], kvdepot.Task | None]
    ) -> bool:
        """Have blocks brought near, unless this request has; whether they come now."""
        coming = self._coming.setdefault(request, {})
        if idents[0] in coming:
            return False
        task = fetch()
        coming.update((ident, task) for ident in idents if ident not in coming)
        return task is not None

    def forget(self, request: str) -> None:
        """The request is over."""
        self._coming.pop(request, None)

    def clear(self) -> None:
        """What was fetched means nothing any more."""
        self._coming.clear()


def keys_behind(key: OffloadKey, req_context: ReqContext) -> Iterator[OffloadKey]:
    """The keys of a request that come after this one in its KV group."""
    behind = itertools.dropwhile(lambda other: other != key, req_context._offload_key_positions)
    next(behind, None)
    return (other for other in behind if other[-4:] == key[-4:])


def _answer(task: kvdepot.Task, seconds: float) -> list[bool] | None:
    """Which keys are stored, unless that takes longer."""
    try:
        return task.wait(seconds)
    except kvdepot.TimeoutError:
        return None
