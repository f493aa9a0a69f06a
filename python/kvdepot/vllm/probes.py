"""Probes: blocks that are stored are computed again now and then, and compared.

A namespace is to cover everything that keys and values depend on (`kvdepot.vllm.namespace`). If it
leaves something out, an engine is served KV that it would not have computed, and nothing else
notices. So of some requests less is loaded than was found. vLLM computes the rest and offers it for
storing; what is stored already is compared then, by the workers (`kvdepot.vllm.comparing`).

A namespace whose blocks differ is doubtful: its hits are computed and compared, and nothing of it
is served or stored, until enough have agreed. If more differ, it is quarantined.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kvdepot.engine import quarantine
from kvdepot.vllm.beside import Beside
from kvdepot.vllm.compat import OffloadKey, ReqContext
from kvdepot.vllm.jobs import (
    Difference,
    Groups,
    Ident,
    Kind,
    Plan,
    StoreTicket,
    unpin,
)
from kvdepot.vllm.metrics import Collector
from kvdepot.vllm.settings import GATE, ProbeSettings

logger = init_logger("vllm.kvdepot.probes")

# What a probe may cost: tokens that are computed though they could be loaded.
MOST_TOKENS = 512
# The same if the block of an image is compared, or if all blocks behind a random one are.
MOST_TOKENS_BEHIND = 2048
# Of the probes by chance, the part that compares all blocks behind a random one.
BEHIND_RANDOM = 0.1

# Of a doubtful namespace: so many probes in a row that agree end the doubt, and so many that differ
# the use of the namespace.
AGREED_IN_A_ROW = 10
FAILED = 3

# Layers that a line of the log names.
NAMED_LAYERS = 4


@dataclass
class State:
    """What is known of the engine's namespaces."""

    digests: tuple[bytes, ...] = ()
    kinds: dict[Kind, bool] = field(default_factory=dict)
    """Kinds that have had a first probe, and whether it is over."""
    doubtful: bool = False
    agreed: int = 0
    """Probes in a row that agreed, since the doubt began."""
    failed: int = 0
    """Probes that failed since the doubt began."""
    reason: str = ""
    """What the last failure was."""
    served: int = 0
    """Requests that were served since a probe agreed."""
    quarantined: bool = False
    refused: set[Ident] = field(default_factory=set)
    """Stored blocks that differ from what this engine computed."""


class Probes:
    """Decides which requests are probed, and what follows."""

    off: str | None = None
    """Why there are none, though the settings ask for them."""

    def __init__(
        self, settings: ProbeSettings, collector: Collector, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when what was found for requests means something else."""
        self._every, self._first = settings.every, settings.first
        self._collector = collector
        self._changed = changed
        self.doubted: Callable[[], None] = lambda: None
        """Called when a probe has failed."""
        self._random = random.Random()
        self._states: dict[tuple[bytes, ...], State] = {}
        self._state = State()
        self._plans: dict[str, Plan | None] = {}
        # Requests whose last block to compare was offered in this step.
        self._reached: set[str] = set()

    @property
    def doubtful(self) -> bool:
        """Whether nothing is served or stored until it has been compared."""
        return self._state.doubtful

    @property
    def quarantined(self) -> bool:
        """Whether the namespaces in use are not used any more."""
        return self._state.quarantined

    @property
    def refused(self) -> Set[Ident]:
        """Stored blocks that are not served."""
        return self._state.refused

    def switch_off(self, why: str) -> None:
        """There are no probes from now on."""
        if self._every:
            self.off = why
            say = logger.warning if self._first == GATE else logger.info
            say("kvdepot: probes (checks of loaded blocks) are disabled, because %s", why)

    def forget(self) -> None:
        """The namespaces in use were emptied, or other weights were the reason for a doubt: their
        next hits are first ones."""
        state = State(self._state.digests, quarantined=self._state.quarantined)
        self._state = self._states[state.digests] = state

    def use(self, groups: Groups) -> Groups:
        """These KV groups are used from now on; none of them if one is in quarantine."""
        self.void()
        digests = tuple(group.namespace.digest for group in groups.values())
        self._state = self._states.setdefault(digests, State(digests))
        if not self._every:
            return groups
        for digest in digests:
            entry = quarantine.read(digest)
            if entry is not None:
                self._state.quarantined = True
                logger.error(
                    "kvdepot: namespace %s is in quarantine: %s. Nothing is stored or loaded. "
                    "'kvdepot quarantine list' lists the namespace; 'kvdepot quarantine release "
                    "%s' and a restart of the engine end the quarantine",
                    digest.hex(), entry.get("reason", "no reason given"), digest.hex(),
                )  # fmt: skip
        return {} if self._state.quarantined else groups

    # ---- lookups -------------------------------------------------------------------------------

    def cut(self, request: str) -> int | None:
        """Tokens up to which the request may be loaded; None without such a limit."""
        plan = self._plans.get(request)
        return None if plan is None else plan.cut

    def look_up_again(self, request: str, computed: int) -> None:
        """The request is about to be looked up. What was decided stays, unless it is a lookup after
        a preemption, or what vLLM itself has of the request has changed too much since."""
        plan = self._plans.get(request)
        if plan is None:
            return
        if plan.admitted:
            self._abandon(request, "preempted")
        elif plan.waits or computed > plan.cut or (plan.whole and computed != plan.cut):
            del self._plans[request]
            self._forget_kind(plan)

    def decide(
        self, request: Any, computed: int, hit: int, unit: int, beside: Beside
    ) -> Plan | None:
        """Whether the request, of whose `hit` tokens vLLM has `computed` itself, is to be looked up
        again with a limit. `unit` is the number of tokens in a block."""
        name = request.request_id
        if not self._every or self.off is not None or name in self._plans:
            return None
        plan = self._decide(request, computed, hit, unit, _kind(request, hit, beside))
        self._plans[name] = plan
        return plan

    def _decide(self, request: Any, computed: int, hit: int, unit: int, kind: Kind) -> Plan | None:
        state = self._state
        if state.doubtful:
            return Plan(computed, hit, kind)
        if kind not in state.kinds:
            state.kinds[kind] = False
            if self._first == GATE:
                return Plan(computed, hit, kind)
            return self._near_the_end(request, computed, hit, unit, kind)
        if self._first == GATE and not state.kinds[kind]:
            return Plan(computed, hit, kind, waits=True)
        if self._random.random() * self._every >= 1:
            return None
        if self._random.random() < BEHIND_RANDOM:
            low = max(computed, hit - MOST_TOKENS_BEHIND)
            starts = range(-(-low // unit) * unit, hit, unit)
            if starts:
                return Plan(self._random.choice(starts), hit, kind, MOST_TOKENS_BEHIND)
        return self._near_the_end(request, computed, hit, unit, kind)

    def _near_the_end(
        self, request: Any, computed: int, hit: int, unit: int, kind: Kind
    ) -> Plan | None:
        """The last block with a part of an image, audio or video, and all behind it; without one,
        the last block."""
        ends = [end for begin, end in _media(request) if begin < hit]
        last = (min(ends[-1], hit) - 1) // unit * unit if ends else -1
        if last >= computed and hit - last <= MOST_TOKENS_BEHIND:
            return Plan(last, hit, kind, MOST_TOKENS_BEHIND)
        last = max(computed, (hit - 1) // unit * unit)
        if hit - last <= MOST_TOKENS:
            return Plan(last, hit, kind, MOST_TOKENS)
        self._skip(kind, "far")
        return None

    def found(self, request: str, found: int) -> bool:
        """With its limit the request has a hit of `found` tokens. Whether it is to be looked up
        without it: the common boundary of all KV groups before the limit is too far from it."""
        plan = self._plans.get(request)
        if plan is None or plan.end - found <= plan.most:
            return False
        self._plans[request] = None
        self._skip(plan.kind, "far")
        return True

    def admitted(self, request: str, loaded: bool) -> None:
        """The request begins to be computed; `loaded` is whether it is served something."""
        self._state.served += loaded
        plan = self._plans.get(request)
        if plan is not None and not plan.waits:
            plan.admitted = True

    # ---- stores --------------------------------------------------------------------------------

    def covers(self, request: str, keys: Collection[OffloadKey]) -> Plan | None:
        """The request's plan, if vLLM offers blocks for storing that are to be compared."""
        plan = self._plans.get(request)
        if plan is None or plan.waits or not plan.admitted or plan.offered or not keys:
            return None
        return plan

    def offered(
        self, plan: Plan, keys: Collection[OffloadKey], context: ReqContext, *, compared: bool
    ) -> None:
        """vLLM has offered these, some of which are `compared`: a request's come in order."""
        plan.under_way += compared
        ends = (context.get_offload_key_position(key) or 0 for key in keys)
        if max(ends, default=0) >= plan.end:
            # In this step other KV groups may follow.
            self._reached.add(context.req_id)

    def end_step(self) -> None:
        """vLLM has offered what the last step has computed."""
        for request in self._reached:
            plan = self._plans.get(request)
            if plan is not None:
                plan.offered = True
                self._close(request, plan)
        self._reached.clear()
        # The connector has checked by now that the weights in memory are not the reason.
        if self._state.failed >= FAILED and not self._state.quarantined:
            self._quarantine(self._state.reason)
            self._changed()

    def heard(self, store: StoreTicket) -> None:
        """All ranks have reported on a store that compares blocks."""
        plan = store.plan
        assert plan is not None
        corrupt = {position for report in store.heard.values() for position in report.corrupt}
        for position in corrupt & store.compared.keys():
            store.groups[store.idents[position][0]].namespace.discard([store.compared[position]])
        pairs = [(store.idents[position], pin) for position, pin in store.compared.items()]
        unpin(store.groups, pairs, served=False)
        plan.under_way -= 1
        if store.stale or self._plans.get(store.request) is not plan:
            self._collector.probed("abandoned", len(store.compared))
            return
        counted: Counter[str] = Counter()
        for position in store.compared:
            reports = [report.differences.get(position) for report in store.heard.values()]
            found = [one for one in reports if one is not None]
            for one in found:
                self._collector.differs(one.largest)
            if any(one.layers for one in found):
                counted["differed"] += 1
                self._state.refused.add(store.idents[position])
                self._fail(plan, store, position, found)
            elif len(found) == len(reports):
                counted["agreed"] += 1
                plan.agreed += 1
            elif position in corrupt:
                counted["corrupt"] += 1
            else:
                counted["not_compared"] += 1
        for result, count in counted.items():
            self._collector.probed(result, count)
        plan.unknown |= counted["not_compared"] > 0
        self._close(store.request, plan)

    def finished(self, request: str) -> None:
        """vLLM offers no more blocks of the request."""
        plan = self._plans.get(request)
        if plan is None or plan.waits or not plan.admitted:
            self._plans.pop(request, None)
            if plan is not None:
                self._forget_kind(plan)
            return
        plan.short = not plan.offered and request not in self._reached
        plan.offered = True
        self._close(request, plan)

    def void(self) -> None:
        """What requests were looked up for means nothing any more."""
        for request, plan in list(self._plans.items()):
            if plan is not None:
                self._abandon(request, "abandoned")
        self._plans.clear()

    # ---- verdicts ------------------------------------------------------------------------------

    def _close(self, request: str, plan: Plan) -> None:
        if not plan.offered or plan.under_way or self._plans.get(request) is not plan:
            return
        del self._plans[request]
        state = self._state
        if plan.failed:
            self._forget_kind(plan)
            return
        if not plan.agreed or (plan.short and plan.whole):
            self._collector.probed("nothing", 1)
            if plan.unknown and not plan.whole:
                # Probably the next one could not be compared, either.
                state.kinds[plan.kind] = True
            self._forget_kind(plan)
            return
        state.served = 0
        if state.kinds.get(plan.kind) is False and self._first == GATE:
            # What waits was found not to be served.
            self._changed()
        state.kinds[plan.kind] = True
        state.agreed += 1
        if state.doubtful and state.agreed >= AGREED_IN_A_ROW:
            state.doubtful, state.failed = False, 0
            self._changed()
            logger.warning(
                "kvdepot: %d probes in a row matched; stored blocks are served again",
                AGREED_IN_A_ROW,
            )

    def _fail(
        self, plan: Plan, store: StoreTicket, position: int, found: Sequence[Difference]
    ) -> None:
        if plan.failed:
            return
        plan.failed = True
        state = self._state
        state.agreed = 0
        state.failed += 1
        state.doubtful = True
        # What was decided for requests that wait is void.
        for name, one in list(self._plans.items()):
            if one is None or not one.admitted:
                del self._plans[name]
            if one is not None and not one.admitted:
                self._forget_kind(one)
        layers = {name: most for one in found for name, most in one.layers.items()}
        group = store.groups[store.idents[position][0]]
        text = (
            f"request {store.request}: a block in namespace {group.namespace.digest.hex()} differs "
            f"from what this engine computes, by up to {max(one.largest for one in found):.3g} "
            f"({_said(layers)})"
        )
        logger.error(
            "kvdepot: a probe failed: %s. Requests served since the last matching probe, "
            "whose answers may be wrong: %d. kvdepot now recomputes and compares hits of this "
            "namespace, and serves and stores its blocks again after %d matching probes in a "
            "row. After %d failures, the namespace is put in quarantine. A setting that changes "
            "keys and values is missing from the namespace: please report this message",
            text, state.served, AGREED_IN_A_ROW, FAILED,
        )  # fmt: skip
        state.reason = text
        self._changed()
        self.doubted()

    def _quarantine(self, reason: str) -> None:
        self._state.quarantined = True
        for digest in self._state.digests:
            try:
                path = str(quarantine.add(digest, reason, {"engine": "vllm"}))
            except OSError as error:
                path = f"not beyond this engine's end ({error})"
            logger.error(
                "kvdepot: in %d probes, stored blocks differed from computed blocks; namespace %s "
                "is in quarantine (%s). Nothing is stored or loaded. 'kvdepot quarantine list' "
                "lists the namespace; 'kvdepot rm --namespace %s' removes its blocks",
                FAILED, digest.hex(), path, digest.hex(),
            )  # fmt: skip

    def _abandon(self, request: str, result: str) -> None:
        plan = self._plans.pop(request)
        self._reached.discard(request)
        if plan is not None:
            if plan.admitted:
                self._collector.probed(result, 1)
            self._forget_kind(plan)

    def _skip(self, kind: Kind, result: str) -> None:
        """It would cost too much to probe this request."""
        self._collector.probed(result, 1)
        self._state.kinds[kind] = True

    def _forget_kind(self, plan: Plan) -> None:
        """The next hit of its kind is the first one again."""
        if not plan.waits and self._state.kinds.get(plan.kind) is False:
            del self._state.kinds[plan.kind]


def _kind(request: Any, hit: int, beside: Beside) -> Kind:
    begun = [feature for feature in request.mm_features if feature.mm_position.offset < hit]
    return beside.adapter, tuple(sorted({str(feature.modality) for feature in begun}))


def _media(request: Any) -> list[tuple[int, int]]:
    """First token of each image and so on, and the one behind its last, in order."""
    places = [feature.mm_position for feature in request.mm_features]
    return [(place.offset, place.offset + place.length) for place in places]


def _said(layers: dict[str, float]) -> str:
    most = sorted(layers.items(), key=lambda pair: -pair[1])[:NAMED_LAYERS]
    named = ", ".join(f"{name} by {difference:.3g}" for name, difference in most)
    more = len(layers) - len(most)
    return f"layers: {named}" + (f", and {more} others" if more else "")
