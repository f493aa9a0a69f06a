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
from kvdepot.vllm.tier import KvdepotTier

# vLLM's spec whose manager has secondary tiers.
TIERING_SPEC = "TieringOffloadingSpec"


class KvdepotTieringConnector(OffloadingConnector):
    """OffloadingConnector with vLLM's CPU tier, and kvdepot's among those behind it."""

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
        super().__init__(vllm_config, role, kv_cache_config)

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

    def reset_cache(self) -> bool | None:
        """As vLLM does."""
        self._fingerprints.reset()
        return super().reset_cache()

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
