"""What is stored of a request: which of its blocks get room, and from which token on none does."""

from __future__ import annotations

from collections.abc import Collection

from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm.compat import OffloadKey, ReqContext, get_offload_group_idx
from kvdepot.vllm.jobs import Group, GroupPlacements, Plan, StoreTicket

logger = init_logger("vllm.kvdepot.manager")


class Ends:
    """How far requests are stored: the last block of each, and the ends of those that are not
    stored whole."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._last: dict[str, dict[int, tuple[int | None, bytes]]] = {}

    def after(
        self, context: ReqContext, group: int, keys: list[OffloadKey], names: list[bytes]
    ) -> bytes | None:
        """Return the block of the request that these follow, if it is known. The next ones follow
        them.

        Blocks that the request offers again, as after a preemption, follow no known block.
        """
        position = context.get_offload_key_position
        last = self._last.setdefault(context.req_id, {})
        end, name = last.get(group, (None, None))
        last[group] = (position(keys[-1]), names[-1])
        first = position(keys[0])
        is_again = end is not None and first is not None and first <= end
        return None if is_again else name

    def before(self, keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Those before the first block of the request that found no room."""
        end = self._ends.get(context.req_id)
        if end is None:
            return keys
        position = context.get_offload_key_position
        return [key for key in keys if (position(key) or 0) < end]

    def no_room(self, key: OffloadKey, context: ReqContext) -> None:
        """Nothing of the request is stored from this block on."""
        end = context.get_offload_key_position(key)
        if end is not None:
            self._ends[context.req_id] = min(end, self._ends.get(context.req_id, end))
            logger.info(
                "request %s: the block that ends at token %d was not stored (no space, or "
                "rejected by admission); later blocks of the prompt are skipped",
                context.req_id, end,
            )  # fmt: skip

    def stop(self, request: str) -> None:
        """Store nothing more of a request."""
        self._ends[request] = 0

    def forget(self, request: str) -> None:
        """The request is over."""
        self._ends.pop(request, None)
        self._last.pop(request, None)

    def keep(self, alive: Collection[str]) -> None:
        """Forget all requests that are not among these."""
        self._ends = {name: end for name, end in self._ends.items() if name in alive}
        self._last = {name: last for name, last in self._last.items() if name in alive}

    def offer_again(self) -> None:
        """vLLM offers everything again, and there may be room by now."""
        self._last.clear()
        self._ends = {name: end for name, end in self._ends.items() if end == 0}


class Offered:
    """Blocks of one KV group that vLLM offers for storing: some are written, and some are compared
    with what is stored."""

    def __init__(
        self, store: StoreTicket, group: Group, keys: list[OffloadKey], names: list[bytes]
    ) -> None:
        """`names` are the keys in the group's namespace. What is chosen is added to the store."""
        self._store, self._group = store, group
        self._keys, self._names = keys, names
        self._reservations: list[kvdepot.Reservation | None] = [None] * len(keys)
        self._pins: dict[int, kvdepot.Pin | None] = {}

    def reserve(self, writers: int, ends: Ends, context: ReqContext) -> None:
        """Reserve room for blocks of so many parts, up to the first that finds none."""
        lengths = self._group.part_bytes
        self._reservations = self._group.namespace.reserve(
            self._names,
            sum(lengths),
            parts=writers,
            part_lengths=lengths,
            prefix=True,
            after=ends.after(context, self._group.position, self._keys, self._names),
        )
        if len(self._reservations) < len(self._keys):
            ends.no_room(self._keys[len(self._reservations)], context)

    def compare(self, plan: Plan, context: ReqContext) -> None:
        """Pin the blocks without room that are to be compared."""
        there = (index for index, one in enumerate(self._reservations) if one is None)
        tokens = self._group.tokens
        wanted = [index for index in there if plan.compares(self._keys[index], context, tokens)]
        if wanted:
            pins = self._group.namespace.pin([self._names[index] for index in wanted])
            self._pins = dict(zip(wanted, pins, strict=True))

    def choose(self) -> tuple[list[OffloadKey], GroupPlacements]:
        """The keys of the blocks that are written or compared, and where these are."""
        if not self._pins and not any(self._reservations):
            # Most blocks that are offered are there.
            return [], GroupPlacements(self._group.position, [])
        store, keys, compared = self._store, [], set()
        placements: list[bytes | None] = []
        for index, reservation in enumerate(self._reservations):
            pin = self._pins.get(index)
            if reservation is not None:
                store.reservations[len(store.idents)] = reservation
                placements.append(reservation.placement)
            elif pin is not None:
                store.compared[len(store.idents)] = pin
                compared.add(len(placements))
                placements.append(pin.placement)
            else:
                continue
            key = self._keys[index]
            keys.append(key)
            store.idents.append((get_offload_group_idx(key), self._names[index]))
            store.lengths.append(0 if reservation is None else sum(self._group.part_bytes))
        return keys, GroupPlacements(self._group.position, placements, frozenset(compared))
