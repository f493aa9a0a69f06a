"""The index side, in the scheduler's process: what is a hit, what is stored where.

The two-phase protocol under vLLM's calls:

* `lookup` answers HIT only for a block that it holds pinned. A pin goes over to the load in
  `prepare_load`, or ends with the step, or with an answer that is kept (`kvdepot.vllm.prompts`).
* `prepare_store` reserves. A reservation ends by commit or abort when all ranks
  have reported, whatever vLLM does with its own job meanwhile.
* A block that did not verify leaves the index when the first rank says so. One
  that was not moved stays, and nothing is looked up for a while.
* The depot's errors are misses and refusals here (`kvdepot.vllm.faults`).
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm import settings as vllm_settings
from kvdepot.vllm.compat import (
    CacheHitSource,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
    key_positions,
)
from kvdepot.vllm.faults import ERRORS, Faults, SafeDepot, SafeNamespace
from kvdepot.vllm.jobs import (
    GroupPlacements,
    Groups,
    Ident,
    LoadTicket,
    Plan,
    Reports,
    StoreTicket,
    WorkerReport,
    unpin,
)
from kvdepot.vllm.messages import HOST_RETRY_SECONDS, RETRY_SECONDS, Placements
from kvdepot.vllm.metrics import Collector, on_path
from kvdepot.vllm.probes import Probes
from kvdepot.vllm.prompts import Answer, Matched, Pins, Prompts
from kvdepot.vllm.questions import Patience, Questions
from kvdepot.vllm.roles import Role, is_prefilled
from kvdepot.vllm.rows import by_group
from kvdepot.vllm.storing import Ends, Offered
from kvdepot.vllm.tiers import INDEXED, SOURCES, say_smaller

logger = init_logger("vllm.kvdepot.manager")

NO_PROBES = vllm_settings.ProbeSettings()

# Reports come one or two steps after the one that they are about.
STEPS_WITHOUT_GROUPS = 1000

# How long an answer is kept that others may change unseen: engines that store into a shared tier.
SHARED_SECONDS = 1.0
# The same for a prompt that another engine is known to store.
PREFILLED_SECONDS = 0.02

_PLACE = attrgetter("tier", "length")
_TIER = attrgetter("tier")

# A member of an enumeration is found slowly, and there is one such answer a block.
HIT, MISS = LookupResult.HIT, LookupResult.MISS


class KvdepotManager(OffloadingManager):
    """vLLM's offloading manager over a depot."""

    def __init__(
        self,
        depot: kvdepot.Depot,
        ranks: int,
        lookup_wait_seconds: float,
        on_reset: str = vllm_settings.VERIFY,
        *,
        writers: int | None = None,
        shared: bool = False,
        engine_block_bytes: int = 0,
        probing: vllm_settings.ProbeSettings = NO_PROBES,
    ) -> None:
        """`ranks` is the number of workers, the first `writers` of which each contribute a part
        to a block: all of them unless the KV of each is the same. A `shared` depot is a service's,
        and other engines use it too. `engine_block_bytes` is what a depot holds of a vLLM block."""
        self.faults = Faults(logger)
        self.depot = SafeDepot(depot, self.faults)
        self._shared = shared
        self._engine_block_bytes = engine_block_bytes
        self.collector = Collector(self.depot)
        self._near = depot.tiers[0]
        # Who has the index, or a tier, is asked without waiting for the answer.
        late = shared or any(tier not in INDEXED for tier in depot.tiers)
        self.probes = Probes(probing, self.collector, self._look_up_again)
        self._questions = Questions(self.faults, late=late, refused=lambda: self.probes.refused)
        self._socket = depot.socket
        self._ranks = ranks
        self.writers = ranks if writers is None else writers
        """How many parts a block has."""
        self._lookup_wait = lookup_wait_seconds
        self._on_reset = on_reset
        self._groups: Groups = {}
        self._renew: Callable[[str], Groups] | None = None
        self.role = Role()
        self.alone = False  # Whether vLLM has no other connector; the connector says it.
        self.paused = False
        """Whether vLLM waits for its work to end: metrics are brought up to date afterwards."""
        self.withheld = False  # Nothing is looked up or stored: vLLM holds KV of other weights.
        self.stored: Callable[[SafeNamespace, list[bytes]], None] = lambda namespace, keys: None
        """Called with what was stored."""
        self._steps_without_groups: int | None = 0
        self._whole: Callable[[OffloadKey, str], bool] | None = None
        self.epoch: str | None = None
        """Random text that a reset has put into the namespaces; None before the first."""
        self._prompts = Prompts(self.depot.stats(), self._unpin)
        # Requests whose other KV groups the depot was asked for in this step.
        self._others_asked: set[str] = set()
        self._tickets: dict[int, LoadTicket | StoreTicket] = {}
        self._storing: dict[Ident, int] = {}
        self._patience = Patience()
        self._beside: dict[str, vllm_beside.Beside] = {}
        self._sources: dict[str, dict[OffloadKey, str]] = {}
        self.ends = Ends()
        self._next_ticket = itertools.count(1)
        self._lookups_after = 0.0

    # ---- set up by the connector ---------------------------------------------------------

    def set_groups(self, groups: Groups, renew: Callable[[str], Groups] | None = None) -> None:
        """From now on blocks of these KV groups are looked up and stored.

        `renew` makes the same groups with namespaces of another epoch.
        """
        self.forget_answers()
        self._storing.clear()
        self._groups = self.probes.use(groups)
        self._renew = renew
        self._steps_without_groups = None

    def _look_up_again(self) -> None:
        """What was found for requests means something else."""
        self.forget_answers()
        if self.probes.quarantined:
            self._groups = {}

    @property
    def hittable(self) -> Groups:
        """The KV groups whose blocks are looked up and served now. Any thread may ask."""
        loads = self.role.loads and not self.withheld and not self.probes.doubtful
        return self._groups if loads else {}

    def set_whole(self, whole: Callable[[OffloadKey, str], bool]) -> None:
        """`whole` says whether vLLM still has all its blocks of a request's stored block."""
        self._whole = whole

    def set_beside(self, request: str, beside: vllm_beside.Beside) -> None:
        """What the request's blocks depend on beside their tokens."""
        self._beside[request] = beside

    def say_sizes(self, engine_blocks: int) -> None:
        """One line where vLLM's own prefix cache, of so many blocks, holds more than the depot."""
        say_smaller(self.depot.stats(), engine_blocks * self._engine_block_bytes)

    # ---- reading ---------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT for a block that stays pinned until it is loaded or its request stops waiting."""
        prompt = self._prompts.get(req_context.req_id)
        if prompt is not None:
            if key in prompt.held:
                return HIT
            if key == next(prompt.rest, None):
                return MISS
            prompt.rest = iter(())
        return self._patience.heard(req_context.req_id, self._lookup(key, req_context))

    def leading_hits(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int | None:
        """As `lookup` of one of these blocks after the other, for less: how many are there, from
        the first on; None while that is not known."""
        return self._prompts.leading(keys, req_context, self.lookup)

    def _lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = req_context.req_id
        prompt = self._prompts.begin(req_context, self.beside(request))
        if self.withheld or not self.role.loads or time.monotonic() < self._lookups_after:
            return LookupResult.MISS
        number = get_offload_group_idx(key)
        group = self._groups.get(number)
        if group is None:
            waits = self._steps_without_groups is not None and self._may_wait(request)
            return LookupResult.RETRY if waits else LookupResult.MISS
        row, at = prompt.rows.find(key)
        ident = number, row.names[at]
        found = self._questions.answer(group, prompt, row, at, lambda: self._may_wait(request))
        if found is LookupResult.HIT:
            return found
        if found is LookupResult.RETRY:
            # vLLM asks again, whatever it is told of the blocks behind this one.
            prompt.rest = row.keys_behind(at, group.window)
            return found
        if len(self._groups) > 1 and request not in self._others_asked:
            self._others_asked.add(request)
            self._questions.ask_others(self._groups, prompt, key)
        storing = self._storing if self._may_wait(request) else {}
        missing = row.told_missing(at, group.window, storing)
        if ident in storing:
            return LookupResult.HIT_PENDING
        # Blocks of a prompt that another engine has computed may still be on the way.
        params = req_context.kv_transfer_params
        if is_prefilled(params, alone=self.alone) and self._may_wait(request):
            prompt.unannounced = True
            row.forget_answer()
            prompt.rest = row.keys_behind(at, group.window)
            return LookupResult.RETRY
        prompt.rest = iter(row.keys[missing.start : at][::-1])
        if not row.covers(at):
            # Without an answer for this block there is none for those that vLLM asks for next.
            prompt.rest = row.keys_behind(at, group.window)
        return MISS

    @on_path
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Placements:
        """Hand the pins over to a load."""
        ticket = next(self._next_ticket)
        request = req_context.req_id
        load = LoadTicket(self._groups, request, [], [])
        sources = self._sources.setdefault(request, {})
        prompt = self._prompts.get(request)
        held = prompt.held if prompt is not None else {}
        groups: list[GroupPlacements] = []
        for group, members in by_group(keys, self._groups):
            names = self._names(members, req_context)
            number = get_offload_group_idx(members[0])
            load.idents += zip(itertools.repeat(number), names, strict=False)
            if group is None:
                # Not used any more since the lookup: the worker reports the blocks of such a group.
                load.pins += [None] * len(members)
                continue
            self.ends.after(req_context, group.position, members, names)
            pins = [held.pop(key, None) for key in members]
            if not all(pins):
                # One that is gone has no place: the worker reports it, and it is computed.
                lost = [index for index, pin in enumerate(pins) if pin is None]
                found = group.namespace.pin([names[index] for index in lost])
                for index, late in zip(lost, found, strict=True):
                    pins[index] = late
                members = [key for key, pin in zip(members, pins, strict=True) if pin]
            load.pins += pins
            sources.update(zip(members, map(_TIER, filter(None, pins)), strict=True))
            placements = [None if pin is None else pin.placement for pin in pins]
            groups.append(GroupPlacements(group.position, placements))
        self._patience.forget(request)
        self._tickets[ticket] = load
        self._prompts.begin_load(request, keys)
        return Placements(ticket, self._socket, groups)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """vLLM lets requests go on that wait for these blocks."""
        self._prompts.end_load(keys)

    # ---- answers for requests that wait ----------------------------------------------------------

    def answer(self, request: str, question: tuple[int, int]) -> Matched | None:
        """vLLM's result for this request, if it is kept and still holds. `question` is the tokens
        that are computed and those of the request."""
        return self._prompts.answer(request, question, time.monotonic())

    def keep_answer(self, request: str, question: tuple[int, int], matched: Matched) -> None:
        """Keep vLLM's result for the next steps, and with it the pins of its blocks."""
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        now = time.monotonic()
        waits = self._patience.waits(request)
        pauses = (self._lookups_after, self.faults.paused_until)
        until = min((end for end in pauses if end > now), default=math.inf)
        if waits:
            until = min(until, now + self._lookup_wait - self._patience.seconds(request, now))
        if prompt.unannounced:
            until = min(until, now + PREFILLED_SECONDS)
        loading = matched[0] is None and not waits
        if loading or (self._questions.late and not waits):
            until = min(until, now + SHARED_SECONDS)
        prompt.answer = Answer(question, matched, until, loading)

    def end_answer(self, request: str, *, served: bool) -> None:
        """The request is admitted: its answer was used. `served` is whether it loads blocks."""
        self._prompts.forget(request)
        self.probes.admitted(request, served)

    def beside(self, request: str) -> vllm_beside.Beside:
        """What was noted for the request."""
        return self._beside.get(request, vllm_beside.NOTHING)

    def forget_answers(self) -> None:
        """Drop everything that is kept for requests that wait: vLLM looks them up again."""
        self._prompts.clear()
        self._questions.clear()

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """The tier that the request's last load took the block from."""
        tier = self._sources.get(req_context.req_id, {}).get(key)
        return SOURCES.get(tier or "", CacheHitSource.EXTERNAL_UNSPECIFIED)

    def tiers_of(self, request: str) -> Counter[str]:
        """Blocks of the request's loads by tier, for its log line."""
        return Counter(self._sources.get(request, {}).values())

    # ---- writing ---------------------------------------------------------------------------

    @on_path
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Reserve room for the blocks that are not there and not on their way.

        Blocks without room are dropped, not offered again: vLLM would offer
        them in each following step, with a warning each time. What follows such
        a block in its request is not stored either: nothing would find it.
        """
        # vLLM 0.33 ends a step after its stores, which may need the room of pins.
        self._prompts.end_lookups(self._patience.waits)
        ticket = next(self._next_ticket)
        plan = self.probes.covers(req_context.req_id, keys)
        store = StoreTicket(self._groups, req_context.req_id, [], [], plan=plan)
        chosen: list[OffloadKey] = []
        groups: list[GroupPlacements] = []
        for group, members in by_group(self._storable(keys, req_context, plan), self._groups):
            members = self.ends.before(members, req_context)
            if group is not None and members:
                offered = Offered(store, group, members, self._names(members, req_context))
                if self._stores:
                    offered.reserve(self.writers, self.ends, req_context)
                if plan is not None:
                    offered.compare(plan, req_context)
                of_group, placements = offered.choose()
                chosen += of_group
                groups.append(placements)
        if chosen:
            self._tickets[ticket] = store
            stored = (store.idents[index] for index in store.reservations)
            self._storing.update(dict.fromkeys(stored, ticket))
        if plan is not None:
            self.probes.offered(plan, keys, req_context, compared=bool(store.compared))
        return PrepareStoreOutput(chosen, Placements(ticket, self._socket, groups), [])

    def _storable(
        self, keys: Collection[OffloadKey], req_context: ReqContext, plan: Plan | None
    ) -> list[OffloadKey]:
        """Those that may be stored or compared."""
        if self.withheld:
            return []
        found = list(keys)
        if not self._stores:
            found = [] if plan is None else [k for k in keys if plan.compares(k, req_context)]
        if self._whole is None:
            return found
        # vLLM no longer has all bytes of a block that is partly out of a window.
        return [key for key in found if self._whole(key, req_context.req_id)]

    @property
    def _stores(self) -> bool:
        return self.role.stores and not self.probes.doubtful

    def drop_stores(self) -> None:
        """Publish nothing of the stores that are in flight."""
        for job in self._tickets.values():
            if isinstance(job, StoreTicket):
                job.stale = True

    # ---- the workers' reports --------------------------------------------------------------

    @on_path
    def apply(self, reports: Reports) -> None:
        """Commit, abort, discard and unpin what the ranks have reported on."""
        for ticket, by_rank in reports.items():
            job = self._tickets.get(ticket)
            if isinstance(job, LoadTicket):
                done = self._apply_load(job, by_rank)
            elif isinstance(job, StoreTicket):
                done = self._apply_store(ticket, job, by_rank)
            else:
                continue
            if done:
                del self._tickets[ticket]

    def _apply_load(self, load: LoadTicket, by_rank: dict[int, WorkerReport]) -> bool:
        for rank, report in by_rank.items():
            load.heard.add(rank)
            load.failed.update(report.corrupt, report.undelivered)
            there = {pin.tier for index in report.undelivered if (pin := load.pins[index])}
            for index in report.corrupt:
                namespace = load.groups[load.idents[index][0]].namespace
                if namespace.discard([load.pins[index]]) is None:
                    there.add(self._near)
            if there or report.corrupt:
                self.forget_answers()
            if there:
                # Looked up again at once, they would fail in the same way without end.
                pause = RETRY_SECONDS if there & set(INDEXED) else HOST_RETRY_SECONDS
                self._lookups_after = time.monotonic() + pause
            if report.corrupt or report.undelivered:
                logger.warning(
                    "request %s: of %d blocks, %d were corrupt and %d could not be copied on "
                    "rank %d; vLLM recomputes these blocks",
                    load.request, len(load.pins), len(report.corrupt), len(report.undelivered),
                    rank,
                )  # fmt: skip
        if len(load.heard) < self._ranks:
            return False
        self.collector.failed("load", len(load.failed))
        pairs = list(zip(load.idents, load.pins, strict=True))
        good = [pair for n, pair in enumerate(pairs) if n not in load.failed]
        bad = [pair for n, pair in enumerate(pairs) if n in load.failed]
        moved = Counter(_PLACE(pin) for _, pin in good if pin is not None)
        for (tier, length), blocks in moved.items():
            self.collector.moved("load", tier, blocks, length * blocks)
        unpin(load.groups, good, served=True)
        unpin(load.groups, bad, served=False)
        return True

    def _apply_store(
        self, ticket: int, store: StoreTicket, by_rank: dict[int, WorkerReport]
    ) -> bool:
        store.heard.update(by_rank)
        if len(store.heard) < self.writers:
            return False
        checksums = [store.heard[rank].checksums or [] for rank in range(self.writers)]
        whole: dict[int, dict[int, list[bytes]]] = {}
        broken: dict[int, list[int]] = {}
        for position in store.reservations:
            ident = store.idents[position]
            parts = [found[position] for found in checksums if position < len(found)]
            good = [checksum for checksum in parts if checksum is not None]
            if store.stale or len(good) < self.writers:
                broken.setdefault(ident[0], []).append(position)
            else:
                whole.setdefault(ident[0], {})[position] = good
            if self._storing.get(ident) == ticket:
                del self._storing[ident]
        kept = self._commit(store, whole)
        self._prompts.stored(store.idents)
        for group, positions in broken.items():
            store.groups[group].namespace.abort([store.reservations[p] for p in positions])
        if store.compared:
            self.probes.heard(store)
        lost = 0 if store.stale else len(store.reservations) - len(kept)
        size = sum(store.lengths[position] for position in kept)
        self.collector.moved("store", self._near, len(kept), size)
        self.collector.failed("store", lost)
        if lost:
            logger.warning("request %s: %d blocks could not be stored", store.request, lost)
        return True

    def _commit(self, store: StoreTicket, whole: dict[int, dict[int, list[bytes]]]) -> list[int]:
        """Publish blocks, given by group and position with the checksums of their parts; positions
        of those that are there now."""
        kept = []
        for group, blocks in whole.items():
            reservations = [store.reservations[position] for position in blocks]
            done = store.groups[group].namespace.commit(reservations, list(blocks.values()))
            there = [position for position, done in zip(blocks, done, strict=True) if done]
            keys = [store.idents[position][1] for position in there]
            self.stored(store.groups[group].namespace, keys)
            kept += there
        return kept

    # ---- the life of requests and steps ------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Every block of every request is offered to `prepare_store`.

        With vLLM's other policy a block that failed to load would be computed
        but never stored again by the same request.
        """
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was kept for the request; its jobs may still be on their way."""
        for kept in (self._beside, self._sources):
            kept.pop(req_context.req_id, None)
        self.ends.forget(req_context.req_id)
        self.probes.finished(req_context.req_id)
        self._patience.forget(req_context.req_id)
        self._prompts.forget(req_context.req_id)
        self._questions.forget(req_context.req_id)

    @on_path
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Let go of the pins that no load took over, and no request waits with."""
        self._others_asked.clear()
        self.probes.end_step()
        self._prompts.end_step(self._patience.waits)
        self._patience.end_step()
        if self._steps_without_groups is not None:
            self._count_step_without_groups()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping: jobs to finish, a metric to bring up to date."""
        if self._tickets or self._steps_without_groups is not None:
            return True
        return not self.paused and self.collector.outdated(self._queued_bytes())

    def reset_cache(self) -> None:
        """As `on_reset` says, what was stored before is served again, or is not."""
        logger.info("kvdepot: the cache was reset; on_reset is %r", self._on_reset)
        # A store that vLLM has not submitted yet would read KV caches that are discarded by then,
        # as after a sleep.
        self.drop_stores()
        self.forget_answers()
        self._storing.clear()
        self.ends.offer_again()
        self.probes.void()
        if self._on_reset == vllm_settings.VERIFY:
            return
        if self._on_reset == "clear":
            for group in self._groups.values():
                group.namespace.clear()
            self.probes.forget()
        else:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Other namespaces from now on, which nothing has been stored in."""
        before, self._groups = self._groups, {}
        of_an_epoch = self.epoch is not None
        self.epoch = secrets.token_hex(16)
        if self._renew is not None:
            try:
                self._groups = self.probes.use(self._renew(self.epoch))
            except ERRORS as error:
                self.faults.note("namespace", error)
        if of_an_epoch:
            # Nobody else knew the ended epoch: its blocks would only take up room.
            for group in before.values():
                group.namespace.clear()

    @on_path
    def get_stats(self) -> Any:
        """What happened since the last call."""
        in_flight = sum(
            sum(job.lengths) for job in self._tickets.values() if isinstance(job, StoreTicket)
        )
        pending = in_flight + self._queued_bytes()
        self.collector.failed_calls("scheduler", self.faults.take())
        return self.collector.take(pending, idle=not self._tickets and not pending)

    def shutdown(self) -> None:
        """Close the depot: it drains what is queued for the far tier."""
        self.forget_answers()
        self._tickets.clear()
        self.depot.close()

    # ---- helpers -----------------------------------------------------------------------------

    def _queued_bytes(self) -> int:
        """Bytes that would be lost with this process. A service's queue outlives it, and holds what
        others have stored."""
        return 0 if self._shared else int(self.depot.pending_bytes())

    def _names(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bytes]:
        """The keys of blocks in the namespace of their KV group."""
        return self.beside(req_context.req_id).keys(keys, key_positions(req_context))

    def _count_step_without_groups(self) -> None:
        """The workers describe their KV caches with their first report; all do, or none will."""
        assert self._steps_without_groups is not None
        self._steps_without_groups += 1
        if self._steps_without_groups > STEPS_WITHOUT_GROUPS:
            self._steps_without_groups = None
            logger.error("kvdepot: no worker reported its KV caches; nothing is stored or loaded")

    def _unpin(self, held: Pins) -> None:
        """End pins that no load took over."""
        for group, members in by_group(held, self._groups):
            if group is not None:
                group.namespace.unpin([held[key] for key in members])

    def _may_wait(self, request: str) -> bool:
        return self._patience.seconds(request, time.monotonic()) < self._lookup_wait
