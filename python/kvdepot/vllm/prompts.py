"""The requests that vLLM looks up, with the pins they hold and the answers that are kept for them.

vLLM asks again in each step for a request that waits: for KV memory, for a tier's answer, or for a
load of another request. Its own lookup asks for all blocks one by one, so the answer is kept here
until something happens that can change it. Its hits stay pinned, so that none of them is lost.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import kvdepot
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm.compat import LookupResult, OffloadKey, ReqContext
from kvdepot.vllm.jobs import Ident
from kvdepot.vllm.rows import Rows

# Waiting requests keep at most a quarter of a tier pinned: loads and stores need the rest.
PINNED_DIVISOR = 4

# Room in a tier is given in units of this size.
EXTENT_BYTES = 4096

_PLACE = attrgetter("tier", "length")

Matched = tuple[int | None, bool]
"""vLLM's result of a lookup: tokens that can be loaded, None if it has to ask again; and whether
they are loaded between steps."""

Pins = dict[OffloadKey, kvdepot.Pin]


class Answer(NamedTuple):
    """A result that is kept for the next steps."""

    question: tuple[int, int]
    """Tokens that vLLM had computed when it asked, and tokens of the request."""
    matched: Matched
    until: float
    """When it is too old, by `time.monotonic`."""
    loading: bool
    """Whether the request waits for a load of another one."""


class Prompt:
    """A request that is looked up."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.held: Pins = {}
        self.answer: Answer | None = None
        self.tasks: list[kvdepot.Task] = []
        """Tasks whose end may change the answer."""
        self.unannounced = False
        """Whether it waits for blocks that another engine stores: nothing here tells when."""
        self.rest: Iterator[OffloadKey] = iter(())
        """What vLLM asks for next, if it is told of each of these that it is not there."""
        self.sizes: Counter[str] = Counter()
        """Bytes of pins that last longer than a step, by tier."""
        self._counted = 0

    def count_new(self) -> Counter[str]:
        """Bytes by tier of the pins that `sizes` does not have yet."""
        if len(self.held) == self._counted:
            return Counter()
        new = itertools.islice(self.held.values(), self._counted, None)
        sizes: Counter[str] = Counter()
        for (tier, length), blocks in Counter(map(_PLACE, new)).items():
            sizes[tier] += -(-length // EXTENT_BYTES) * EXTENT_BYTES * blocks
        return sizes

    def keep(self, sizes: Counter[str]) -> None:
        """All pins last longer than this step; `sizes` is what `count_new` returned."""
        self.sizes += sizes
        self._counted = len(self.held)

    def release(self) -> Pins:
        """The pins, for the caller to end."""
        held, self.held = self.held, {}
        self.sizes = Counter()
        self._counted = 0
        return held

    def end_answer(self) -> None:
        """vLLM looks the blocks up again."""
        self.answer = None
        self.unannounced = False
        self.tasks = [task for task in self.tasks if not task.done]


class Prompts:
    """The requests that are looked up in this step, and those that wait since an earlier one."""

    def __init__(self, stats: Any | None, unpin: Callable[[Pins], None]) -> None:
        """`stats` are the depot's: without them no pin outlives a step. `unpin` ends pins."""
        tiers = (stats or {"tiers": {}})["tiers"]
        # A tier without a limit has a capacity of 0.
        self._most: dict[str, float] = {
            name: tier["capacity_bytes"] // PINNED_DIVISOR or math.inf
            for name, tier in tiers.items()
        }
        self._unpin = unpin
        self._by_request: dict[str, Prompt] = {}
        # Whether blocks were looked up since `end_step`.
        self._looked_up = False

    def get(self, request: str) -> Prompt | None:
        """The request, if it is looked up in this step or waits."""
        return self._by_request.get(request)

    def begin(self, context: ReqContext, beside: vllm_beside.Beside) -> Prompt:
        """The request of this context, as far as it is known."""
        self._looked_up = True
        prompt = self._by_request.get(context.req_id)
        if prompt is None:
            prompt = self._by_request[context.req_id] = Prompt(Rows(context, beside))
        elif prompt.rows.context is not context:
            rows = Rows(context, beside)
            rows.take_over(prompt.rows)
            prompt.rows = rows
        return prompt

    def leading(
        self,
        keys: Sequence[OffloadKey],
        context: ReqContext,
        look_up: Callable[[OffloadKey, ReqContext], LookupResult],
    ) -> int | None:
        """How many of these blocks are there, from the first on; None while that is not known. Of
        the blocks that one lookup pins, only the first is looked up."""
        count, waits = 0, False
        held: Pins = {}
        for key in keys:
            if key not in held:
                answer = look_up(key, context)
                if answer is LookupResult.RETRY:
                    return None
                if answer is LookupResult.MISS:
                    break
                waits |= answer is not LookupResult.HIT
                prompt = self._by_request.get(context.req_id)
                held = {} if prompt is None else prompt.held
            count += 1
        return None if waits else count

    # ---- kept answers ------------------------------------------------------------------------

    def answer(self, request: str, question: tuple[int, int], now: float) -> Matched | None:
        """The kept answer, if vLLM asks the same and nothing has changed it."""
        prompt = self._by_request.get(request)
        if prompt is None or prompt.answer is None:
            return None
        answer = prompt.answer
        if answer.question != question:
            # Other blocks are pinned then.
            self._unpin(prompt.release())
        elif now < answer.until and not any(task.done for task in prompt.tasks):
            return answer.matched
        prompt.end_answer()
        if answer.matched[0] is not None:
            # Of one that waits, no tier is asked twice.
            prompt.rows.forget_answers()
        return None

    def stored(self, idents: Iterable[Ident]) -> None:
        """Blocks were stored, or will not be: answers to requests that miss them end."""
        names: dict[int, set[bytes]] = {}
        for group, name in idents:
            names.setdefault(group, set()).add(name)
        for prompt in self._by_request.values():
            for row in prompt.rows:
                if not row.missing.isdisjoint(names.get(row.group, ())):
                    prompt.end_answer()
                    row.forget_answer()

    def begin_load(self, request: str, keys: Collection[OffloadKey]) -> None:
        """A request loads these: vLLM lets others that want one of them wait."""
        self._end_sharing(keys, loading=False, but=request)

    def end_load(self, keys: Collection[OffloadKey]) -> None:
        """A load of these has ended, and with it the wait of others that want one of them."""
        self._end_sharing(keys, loading=True)

    def _end_sharing(self, keys: Collection[OffloadKey], *, loading: bool, but: str = "") -> None:
        for request, prompt in self._by_request.items():
            answer = prompt.answer
            if answer is None or answer.loading is not loading or request == but:
                continue
            # Without pins, the blocks that it shares with the load are unknown.
            if (loading and not prompt.held) or not prompt.held.keys().isdisjoint(keys):
                prompt.end_answer()

    # ---- steps -------------------------------------------------------------------------------

    def end_lookups(self, is_waiting: Callable[[str], bool]) -> None:
        """As `end_step`, as soon as a step has had all of its lookups."""
        if self._looked_up:
            self.end_step(is_waiting)

    def end_step(self, is_waiting: Callable[[str], bool]) -> None:
        """End the pins that neither a load took over nor a kept answer needs. `is_waiting` tells
        requests that were told to look up again."""
        self._looked_up = False
        kept = sum((prompt.sizes for prompt in self._by_request.values()), Counter[str]())
        for request, prompt in list(self._by_request.items()):
            prompt.rest = iter(())
            if prompt.answer is not None:
                sizes = prompt.count_new()
                if all(kept[tier] + sizes[tier] <= self._most.get(tier, 0) for tier in sizes):
                    prompt.keep(sizes)
                    kept += sizes
                    continue
                if prompt.answer.loading or prompt.answer.matched[0] is not None:
                    prompt.rows.forget_answers()
                if prompt.answer.matched[0] is not None:
                    prompt.end_answer()
            kept -= prompt.sizes
            self._unpin(prompt.release())
            # What tiers were asked is not asked again while the request waits for it.
            asked = any(row.task is not None for row in prompt.rows)
            if prompt.answer is None and not asked and not is_waiting(request):
                self._drop(request)

    def forget(self, request: str) -> None:
        """The request is admitted, or over."""
        if request in self._by_request:
            self._drop(request)

    def clear(self) -> None:
        """Whatever is known means nothing any more."""
        for request in list(self._by_request):
            self._drop(request)

    def _drop(self, request: str) -> None:
        self._unpin(self._by_request.pop(request).release())
