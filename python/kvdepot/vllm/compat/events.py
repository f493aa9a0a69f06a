"""vLLM's KV events and its publisher of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvdepot


class Described(NamedTuple):
    """What events have of a KV group."""

    number: int
    """vLLM's index of the group."""
    tokens: int
    """Of a block."""
    kind: str | None
    window: int | None
    """Tokens of a sliding window."""


def described(config: Any) -> Described:
    """The same of a group in the scheduler's half of vLLM's OffloadingConnector."""
    spec = config.kv_event_group_spec
    return Described(
        config.group_idx,
        config.tokens_per_block,
        spec.kv_cache_spec_kind,
        spec.kv_cache_spec_sliding_window,
    )


def stored(
    group: Described, hashes: Sequence[bytes], medium: str, locality: str, owner: str
) -> Any:
    """The event that blocks are stored. It has their hashes alone, without tokens."""
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in hashes],
        parent_block_hash=None,
        token_ids=[],
        block_size=group.tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group.number,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.window,
        locality=locality,
        ownership=owner,
    )


def removed(
    group: Described, hashes: Sequence[bytes], medium: str, locality: str, owner: str
) -> Any:
    """The event that blocks are no longer there."""
    return BlockRemoved(
        block_hashes=[maybe_convert_block_hash(one) for one in hashes],
        medium=medium,
        group_idx=group.number,
        locality=locality,
        ownership=owner,
    )


def are_published(config: Any) -> bool:
    """Whether an engine with this configuration publishes events."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events and events.publisher != "null"


def on_publisher(tell: Callable[[Any], None]) -> None:
    """Have `tell` called with the publisher of the scheduler that is being made: connectors are
    made before it, and are not told of it."""
    create = EventPublisherFactory.create
    waiting = [tell]

    def noticed(*args: Any, **kwargs: Any) -> Any:
        publisher = create(*args, **kwargs)
        if waiting:
            waiting.pop()(publisher)
        if EventPublisherFactory.create is noticed:
            EventPublisherFactory.create = create
        return publisher

    EventPublisherFactory.create = noticed


def watch(
    publisher: Any, around: Callable[[Callable[[], None], bool], None], lost: Callable[[], None]
) -> Callable[[Sequence[Any]], None]:
    """Watch what is published, and return a function that publishes events unwatched. It raises
    `kvdepot.ClosedError` once the publisher is closed.

    `around` is called for each batch of the scheduler's, with a function that publishes the batch,
    and whether indexers forget all blocks of this engine by it. `lost` is called, in the
    publisher's thread, when a subscriber asks for batches that are no longer kept.
    """
    publish = publisher.publish

    def noticed(batch: Any) -> None:
        clears = any(isinstance(event, AllBlocksCleared) for event in batch.events)
        around(lambda: publish(batch), clears)

    publisher.publish = noticed
    if getattr(publisher, "_replay", None) is not None:
        publisher._replay = _Replays(publisher, publisher._replay, lost)

    def tell(events: Sequence[Any]) -> None:
        batch = KVEventBatch(ts=time.time(), events=list(events))
        try:
            publish(batch)
        except RuntimeError as error:
            raise kvdepot.ClosedError(str(error)) from error

    return tell


class _Replays:
    """The socket that batches are asked for at."""

    def __init__(self, publisher: Any, socket: Any, lost: Callable[[], None]) -> None:
        self._publisher = publisher
        self._socket = socket
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
        """The socket's next request: who asks, nothing, and the first number that is wanted."""
        frames = self._socket.recv_multipart(*args, **kwargs)
        kept = self._publisher._buffer
        if len(frames) == 3 and kept and int.from_bytes(frames[2], "big") < kept[0][0]:
            self._lost()
        return frames
