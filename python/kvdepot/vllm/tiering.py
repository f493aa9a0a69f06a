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

import kvdepot
from kvdepot.engine.weights import FULL, SAMPLED
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm import compat, drafters
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import settings as vllm_settings
from kvdepot.vllm.compat import versions
from kvdepot.vllm.tier import KvdepotTier
from kvdepot.vllm.watching import WatchingConnector

# vLLM's spec whose manager has secondary tiers.
TIERING_SPEC = "TieringOffloadingSpec"


class KvdepotTieringConnector(WatchingConnector):
    """vLLM's OffloadingConnector with its CPU tier, and with kvdepot among the tiers below it.

    Raises:
        kvdepot.ConfigError: An option, or the configuration of the model, is not supported.
    """

    # Whether vLLM's prefix cache has been emptied, and nothing computed since.
    _is_empty = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        entries = _prepare(vllm_config.kv_transfer_config.kv_connector_extra_config)
        vllm_namespace.refuse_unknowable(vllm_config)
        vllm_namespace.refuse_whole_prompts(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            for entry in entries:
                entry["engines"] = vllm_settings.local_engines(vllm_config.parallel_config)
                given = str(entry.get("weights") or SAMPLED)
                entry["engine"] = vllm_namespace.of_engine(vllm_config, kv_cache_config, given)
            settings = {str(entry.get("weights") or SAMPLED) for entry in entries}
            strictest = FULL if FULL in settings else SAMPLED
            self._fingerprints = vllm_beside.Fingerprints(vllm_config, strictest)
            # vLLM's CPU tier caches KV, also without a prefix cache.
            self.watch(vllm_config, own_cache=True)
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            drafters.store_dropped_ends(self.scheduler)
            with compat.exclusive(self.scheduler):
                for tier in self._tiers():
                    tier.verifies = True
                    tier.stored = self._memory_weights.stored

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Checks that there is a tier of kvdepot and a supported vLLM, and returns false.

        vLLM calls it before it loads the model.
        """
        _prepare(extra_config)
        return False

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Creates the metrics in the API server's process, which has no connector."""
        _prepare(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    def on_new_request(self, request: Any) -> None:
        """Records the properties of a request that its blocks depend on and vLLM's hashes omit."""
        beside = self._fingerprints.of(request)
        with compat.exclusive(self.scheduler):
            for tier in self._tiers():
                tier.set_beside(request.request_id, beside)
        super().on_new_request(request)

    def set_paused(self, paused: bool) -> None:
        """Records if `/pause` or `/sleep` wait until the engine has no work."""
        with compat.exclusive(self.scheduler):
            for tier in self._tiers():
                tier.paused = paused

    def reset_cache(self) -> bool | None:
        """Resets the cache. vLLM has reset its prefix cache just before."""
        self._fingerprints.reset()
        done = super().reset_cache()
        self._memory_weights.suspect("a reset")
        if self._is_empty:
            self._memory_weights.emptied()
        return done

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Updates the state of a request."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._is_empty = self._is_empty and not num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Builds the metadata of a step."""
        meta = super().build_connector_meta(scheduler_output)
        self._is_empty = self._is_empty and not scheduler_output.total_num_scheduled_tokens
        return meta

    def _notice_empty_prefix_cache(self) -> None:
        # vLLM's CPU tier is reset only together with its connector.
        self._is_empty = True
        self._memory_weights.suspect("a reset of the prefix cache", doubted=False)

    def _rename(self) -> None:
        weights, begun = self._memory_weights, self._begun_requests()
        with compat.exclusive(self.scheduler):
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


def _prepare(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of kvdepot's tiers; vLLM's spec is named where it is not."""
    spec = extra.setdefault("spec_name", TIERING_SPEC)
    if spec != TIERING_SPEC:
        raise kvdepot.ConfigError(
            f"spec_name: {spec!r} is not allowed with KvdepotTieringConnector; omit spec_name, or "
            f"set it to {TIERING_SPEC!r}"
        )
    entries = [
        entry
        for entry in extra.get("secondary_tiers") or ()
        if isinstance(entry, dict) and entry.get("type") == KvdepotTier.__name__
    ]
    if not entries:
        raise kvdepot.ConfigError(
            f"secondary_tiers: {extra.get('secondary_tiers')!r} is not allowed with "
            'KvdepotTieringConnector; add an entry with "type": "KvdepotTier", '
            '"module_path": "kvdepot.vllm"'
        )
    for entry in entries:
        versions.check(untested_allowed=vllm_settings.allows_untested(entry))
    return entries
