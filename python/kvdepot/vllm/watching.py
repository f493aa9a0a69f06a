"""What both of kvdepot's connectors notice of their engine: weights that change in memory, resets
of vLLM's prefix cache, pauses."""

from __future__ import annotations

import abc
from typing import Any

from kvdepot.vllm import compat
from kvdepot.vllm.compat import OffloadingConnector
from kvdepot.vllm.memory_weights import MemoryWeights, notice_resets
from kvdepot.vllm.pauses import notice_pauses


class WatchingConnector(OffloadingConnector):
    """vLLM's connector, which checks the weights in memory before each lookup and store."""

    def watch(self, vllm_config: Any, *, own_cache: bool) -> None:
        """Starts to watch the weights, in the scheduler's process.

        Args:
            vllm_config: vLLM's configuration.
            own_cache: vLLM caches KV too.
        """
        # How often requests had been preempted when they were last looked up.
        self._preempted: dict[str, int] = {}
        self._memory_weights = MemoryWeights(vllm_config, self._rename, own_cache=own_cache)
        notice_pauses()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Binds the manager, and starts to notice resets of vLLM's prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        notice_resets(kv_cache_manager, self._notice_empty_prefix_cache)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Looks up a request in the namespace of the weights that the workers have."""
        # vLLM's scheduler fails if a request is preempted and loaded in the same step, as after a
        # reset of its prefix cache that preempts all requests, whether the reset fails or not.
        if request.num_preemptions > self._preempted.get(request.request_id, 0):
            self._preempted[request.request_id] = request.num_preemptions
            return None, False
        self._memory_weights.refresh()
        return self._matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Updates the state of a request. Loaded blocks are in vLLM's prefix cache, too."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._memory_weights.fill()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Builds the metadata of a step."""
        self._memory_weights.refresh()
        meta = super().build_connector_meta(scheduler_output)
        self._memory_weights.step(scheduler_output.total_num_scheduled_tokens)
        for name in scheduler_output.finished_req_ids:
            self._preempted.pop(name, None)
        return meta

    def _notice_empty_prefix_cache(self) -> None:
        self._memory_weights.emptied()

    def _matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    @abc.abstractmethod
    def _rename(self) -> None:
        """Use another namespace, or none: the weights in memory have changed, or vLLM's caches no
        longer hold KV of other weights."""

    def _begun_requests(self) -> list[str]:
        """Requests with computed tokens: other weights may have computed them."""
        states = compat.request_states(self.scheduler).items()
        return [name for name, state in states if state.req.num_computed_tokens > 0]
