"""Notices the calls of workers' methods that may change the weights that the workers hold.

vLLM reloads, updates and patches weights by `collective_rpc`, and tells no connector. Every such
call passes through the executor, in the scheduler's process, so the executors' classes are wrapped
here. A method counts unless `HARMLESS` says why it cannot change weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm import envs

from kvdepot.vllm.compat import Executor

SERVES = "computes, and reads weights alone"
STARTS = "prepares what is not weights"
DESCRIBES = "reports, and changes nothing"
ADAPTERS = "adapters are identified by their own files"
CACHES = "empties caches that are not of weights"

HARMLESS: dict[str, str] = {
    method: reason
    for reason, methods in {
        SERVES: "execute_model sample_tokens take_draft_token_ids execute_dummy_batch",
        STARTS: """
            initialize_from_config compile_or_warm_up_model set_kv_cache_layout update_max_model_len
        """,
        DESCRIBES: """
            check_health compute_weight_checksums determine_available_memory get_kv_cache_spec
            get_kv_connector_handshake_metadata get_model_inspection get_supported_kv_cache_layouts
            get_supported_tasks get_compilation_match_table get_encoder_timing_stats
            get_simple_cpu_offload_num_cpu_blocks profile
            save_sharded_state save_tensorized_model supports_draft_weight_updates
            synchronize_device
        """,
        ADAPTERS: "add_lora remove_lora list_loras pin_lora",
        CACHES: "reset_mm_cache reset_encoder_cache release_late_interaction_query_cache",
        "ends the worker": "shutdown",
    }.items()
    for method in methods.split()
}

# Of these, the methods that not every version has, by the first version with them.
SINCE = {
    "0.32": "compute_weight_checksums release_late_interaction_query_cache",
    "0.33": "get_simple_cpu_offload_num_cpu_blocks",
}


class Listener(Protocol):
    """Is told about calls of workers' methods."""

    def before_call(self, executor: Executor, method: Any, arguments: Sequence[Any]) -> None:
        """A method is about to be called; a function may take its place."""

    def after_call(self, method: str) -> None:
        """A method that may change weights has been called, or has failed."""


# By vLLM's random ID of a configuration: a connector may be given a copy of the executor's.
_listeners: dict[str, weakref.WeakSet[Listener]] = {}


def listen(vllm_config: Any, listener: Listener) -> None:
    """Tell `listener` about the calls of this engine's workers, for as long as it lives."""
    executor = Executor.get_class(vllm_config)
    owner = next(one for one in executor.__mro__ if "collective_rpc" in vars(one))
    if not hasattr(owner.collective_rpc, "__wrapped__"):
        owner.collective_rpc = _noticed(owner.collective_rpc)
    _listeners.setdefault(vllm_config.instance_id, weakref.WeakSet()).add(listener)


def counts(method: Any) -> bool:
    """Whether a call of it may change weights. A function may, whatever its name is."""
    return not isinstance(method, str) or method not in HARMLESS


def call(executor: Executor, method: Callable[[Any], Any], **options: Any) -> Any:
    """Returns each worker's result of `method`, which must not change weights, without telling
    listeners.

    Waits for a worker in another process as long as vLLM does for a step. TimeoutError must end the
    engine: vLLM would take a late response for that of the next call.
    """
    function: Any = executor.collective_rpc
    seconds = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    return function.__wrapped__(executor, method, timeout=seconds, **options)


def _noticed(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective_rpc)
    def noticed(self: Executor, method: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners.get(self.vllm_config.instance_id)
        if not listeners:
            return collective_rpc(self, method, *args, **kwargs)
        named = kwargs.get("kwargs") or (args[2] if len(args) > 2 else {})
        arguments = kwargs.get("args") or (args[1] if len(args) > 1 else ()) or list(named.values())
        for listener in listeners:
            listener.before_call(self, method, arguments)
        try:
            return collective_rpc(self, method, *args, **kwargs)
        finally:
            if counts(method):
                name = getattr(method, "__name__", method)
                for listener in listeners:
                    listener.after_call(str(name))

    return noticed
