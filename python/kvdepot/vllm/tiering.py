"""vLLM's own offloading connector, which tells a kvdepot tier what it has to know of the engine.

A secondary tier is given sizes and names. What else its bytes depend on, weights and what they run
under, only a connector sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

import kvdepot
from kvdepot.engine.weights import FULL, SAMPLED
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm.memory_weights import MemoryWeights, begun_requests, notice_resets
from kvdepot.vllm.pauses import notice_pauses
from kvdepot.vllm.tier import KvdepotTier

# vLLM's spec whose manager has secondary tiers.
TIERING_SPEC = "TieringOffloadingSpec"


class KvdepotTieringConnector(OffloadingConnector):
    """OffloadingConnector with vLLM's CPU tier, and kvdepot's among those behind it."""

    # Whether vLLM's prefix cache has been emptied, and nothing computed since.
    _is_empty = True
    _reset_requests: frozenset[str] = frozenset()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `kvdepot.ConfigError` for what cannot work, before anything is served."""
        entries = _prepare(vllm_config)
        vllm_namespace.refuse_unknowable(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            for entry in entries:
                given = str(entry.get("weights") or SAMPLED)
                entry["engine"] = vllm_namespace.of_engine(vllm_config, kv_cache_config, given)
            settings = {str(entry.get("weights") or SAMPLED) for entry in entries}
            strictest = FULL if FULL in settings else SAMPLED
            self._fingerprints = vllm_beside.Fingerprints(vllm_config, strictest)
            self._memory_weights = MemoryWeights(
                vllm_config,
                self._rename,
                # vLLM's CPU tier is one, whatever its prefix cache is.
                own_cache=True,
            )
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            for tier in self._tiers():
                tier.verifies = True
                tier.stored = self._memory_weights.stored
            notice_pauses()

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """In the API server's process, which never constructs a connector."""
        _prepare(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    def on_new_request(self, request: Any) -> None:
        """Notes what the request's blocks depend on, and vLLM's hashes leave out."""
        beside = self._fingerprints.of(request)
        for tier in self._tiers():
            tier.set_beside(request.request_id, beside)
        super().on_new_request(request)

    def set_paused(self, paused: bool) -> None:
        """Whether `/pause` or `/sleep` wait for the engine to have no work."""
        for tier in self._tiers():
            tier.paused = paused

    def reset_cache(self) -> bool | None:
        """As vLLM does; its prefix cache was reset just before."""
        self._fingerprints.reset()
        done = super().reset_cache()
        self._memory_weights.suspect("a reset")
        if self._is_empty:
            self._memory_weights.emptied()
        return done

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """As vLLM does; and from now on resets of its prefix cache are noticed."""
        super().bind_kv_cache_manager(kv_cache_manager)
        notice_resets(kv_cache_manager, self._notice_reset)

    def _notice_reset(self) -> None:
        # vLLM's CPU tier is reset with its connector alone.
        self._is_empty = True
        # vLLM fails on a load for a request that a reset has let go of in the same step.
        self._reset_requests = frozenset(self.scheduler._req_status)
        self._memory_weights.suspect("a reset of the prefix cache", doubted=False)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM does, under the names of the weights that the workers hold."""
        if request.request_id in self._reset_requests:
            return None, False
        self._memory_weights.refresh()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM does; what is loaded is in its prefix cache, too."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._memory_weights.fill()
            self._is_empty = False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM does, in each step."""
        self._memory_weights.refresh()
        meta = super().build_connector_meta(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        self._memory_weights.step(tokens)
        self._is_empty = self._is_empty and not tokens
        self._reset_requests = frozenset()
        return meta

    def _rename(self) -> None:
        """The weights in memory have changed, or vLLM's caches hold KV of other ones no more."""
        weights = self._memory_weights
        begun = begun_requests(self.scheduler)
        for tier in self._tiers():
            tier.set_memory(weights.name, begun, withheld=weights.withheld)

    def _tiers(self) -> Iterator[KvdepotTier]:
        manager: Any = self.scheduler.manager
        return (tier for tier in manager.secondary_tiers if isinstance(tier, KvdepotTier))


# MultiConnector looks up by name what a connector counted, whatever module it was loaded from.
with contextlib.suppress(ValueError):  # registered already
    KVConnectorFactory.register_connector(
        "KvdepotTieringConnector", __name__, "KvdepotTieringConnector"
    )


def _prepare(vllm_config: Any) -> list[dict[str, Any]]:
    """The entries of kvdepot's tiers; vLLM's spec is named where it is not."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    spec = extra.setdefault("spec_name", TIERING_SPEC)
    if spec != TIERING_SPEC:
        raise kvdepot.ConfigError(
            f"spec_name: {spec!r} is not allowed with KvdepotTieringConnector, which needs tiers "
            f"behind vLLM's CPU tier; it must be {TIERING_SPEC!r}, or be left out"
        )
    entries = [
        entry
        for entry in extra.get("secondary_tiers") or ()
        if isinstance(entry, dict) and entry.get("type") == KvdepotTier.__name__
    ]
    if not entries:
        raise kvdepot.ConfigError(
            f"secondary_tiers: {extra.get('secondary_tiers')!r} is not allowed with "
            'KvdepotTieringConnector; it must have an entry with "type": "KvdepotTier", '
            '"module_path": "kvdepot.vllm"'
        )
    return entries
