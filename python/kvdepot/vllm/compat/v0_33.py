"""vLLM 0.33: a manager may be called by a thread, and connectors are told of sleep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kvdepot.vllm.compat import internals


class Adapter(internals.Adapter):
    """0.33."""

    def exclusive(self, scheduler: Any) -> contextlib.AbstractContextManager[Any]:
        """The manager's lock, which cannot be taken twice: from the first lookup of a step to its
        metadata, vLLM's scheduler has it already."""
        if scheduler._step_region is not None:
            return contextlib.nullcontext()
        lock: contextlib.AbstractContextManager[Any] = scheduler.manager.lock
        return lock

    def hash_lookahead(self, vllm_config: Any) -> int:
        """0 with any connector, up to now."""
        return int(vllm_config.num_hash_lookahead_tokens)

    def rest_before_sleep(self, rest: Callable[[], None]) -> None:
        """Nothing to do: vLLM calls the connector's `unregister_kv_caches`."""
