"""Connects vLLM to kvdepot.

Attach it to an engine with

    --kv-transfer-config '{"kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.vllm", "kv_role": "kv_both"}'

and, where the defaults do not fit, `kv_connector_extra_config` (see
`kvdepot.vllm.settings`). The connector is vLLM's own OffloadingConnector, which
keeps hashing, hybrid models, preemption and metrics, over kvdepot's tiers. It
adds what a plain offloading spec cannot do: report blocks that failed to load,
end reservations and pins whatever becomes of a job, and carry every rank's
checksums to the process that owns the index.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

import kvdepot
from kvdepot.vllm import beside as vllm_beside
from kvdepot.vllm import compat, drafters, roles
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import options as vllm_options
from kvdepot.vllm import settings as vllm_settings
from kvdepot.vllm.comparing import layers_of
from kvdepot.vllm.compat import (
    OffloadingConnector,
    OffloadKey,
    get_kv_transfer_group,
    get_offloading_group_ids,
    has_kv_transfer_group,
    versions,
)
from kvdepot.vllm.compat import events as vllm_events
from kvdepot.vllm.events import Events
from kvdepot.vllm.faults import SafeNamespace
from kvdepot.vllm.jobs import Group, Groups
from kvdepot.vllm.manager import KvdepotManager
from kvdepot.vllm.messages import KvdepotWorkerMetadata, RankGeometry
from kvdepot.vllm.spec import KvdepotSpec
from kvdepot.vllm.watching import WatchingConnector
from kvdepot.vllm.weights import Weights
from kvdepot.vllm.worker import KvdepotConnectorWorker

__all__ = ["KvdepotConnector", "KvdepotSpec"]

logger = init_logger("vllm.kvdepot")


class KvdepotConnector(WatchingConnector):
    """vLLM's KV connector over a depot (docs/engines/vllm.md).

    vLLM creates one in the scheduler and one in each worker, and calls their methods.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker.
        kv_cache_config: vLLM's configuration of the KV cache.

    Raises:
        kvdepot.ConfigError: An option, or the configuration of the model, is not supported.
    """

    connector_worker: Any
    _events: Events | None = None
    _named_for: Collection[RankGeometry] = ()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._settings = _prepare(vllm_config)
        _refuse(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            # Once, while a start can still be refused: at a reset the files may be others, but the
            # weights in memory are not.
            self._weights = Weights(vllm_config, self._settings.weights)
            self.watch(vllm_config, own_cache=vllm_config.cache_config.enable_prefix_caching)
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._half = KvdepotConnectorWorker(
                self.connector_worker.spec, vllm_config, kv_cache_config
            )
            self.connector_worker = self._half
        else:
            self._fingerprints = vllm_beside.Fingerprints(vllm_config, self._settings.weights)
            self._logged: set[str] = set()
            self._name: Callable[[], None] | None = None
            self._geometries: dict[int, RankGeometry] = {}
            if self.scheduler.config.blocks_per_chunk > 1:
                self.manager.set_whole(self._is_whole)
            compat.look_up_rows(self.scheduler, self.manager.leading_hits)
            drafters.store_dropped_ends(self.scheduler)
            self.manager.stored = self._note_stored
            self.manager.role = roles.of(vllm_config.kv_transfer_config)
            self.manager.probes.doubted = self._doubt_weights
            self._check_probes()
            _say_policy(vllm_config)
            versions.say(logger)
            if vllm_config.cache_config.enable_prefix_caching:
                self.manager.say_sizes(kv_cache_config.num_blocks)
            # After all that may refuse the start: it changes vLLM's class of publishers.
            self._events = self._events_of(vllm_config)

    @property
    def manager(self) -> KvdepotManager:
        """The manager of blocks; in the scheduler's process only."""
        manager = self.scheduler.manager
        assert isinstance(manager, KvdepotManager)
        return manager

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Checks the settings and returns false.

        vLLM calls it before it loads the model, so that a wrong setting is found early.
        """
        settings = vllm_settings.read(extra_config)
        versions.check(untested_allowed=settings.untested_vllm)
        return False

    # ---- workers -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the KV caches, and checks the settings of the connectors under MultiConnector.

        Raises:
            kvdepot.ConfigError: A setting is not supported that is unknown before this call.
        """
        super().register_kv_caches(kv_caches)
        if self._is_alone():
            return
        _refuse_beside(get_kv_transfer_group())
        # The handshake is one for all connectors there, and the first one's.
        self._half.send_geometry(self._geometry())

    def unregister_kv_caches(self) -> None:
        """Waits for all copies from and to the KV caches.

        vLLM calls it from 0.33 on, before it unmaps the KV caches. Their addresses stay the same.
        """
        self._half.mover.rest()

    def get_handshake_metadata(self) -> RankGeometry | None:
        """Returns the geometry of this rank's KV caches, from which the scheduler names blocks."""
        return self._geometry() if self._is_alone() else None

    def _is_alone(self) -> bool:
        """Whether it is the engine's only connector, and not one of a MultiConnector."""
        return not has_kv_transfer_group() or get_kv_transfer_group() is self

    def _geometry(self) -> RankGeometry:
        groups = self._offloaded_groups()
        layers = self._vllm_config.compilation_config.static_forward_context
        mover = self._half.mover
        device = mover.device
        return RankGeometry(
            rank=mover.rank,
            payload_bytes=mover.payload_bytes(),
            replicated=self._half.spec.replicated_layout,
            layouts=[
                vllm_namespace.layout_of_group(self._vllm_config, group, layers, device)
                for group in groups
            ],
            options=vllm_options.of(self._vllm_config).base,
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns finished loads; with several KV groups also failed ones."""
        return self._half.transfer_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that vLLM has to compute, because their bytes were not loaded."""
        return self._half.take_invalid_blocks()

    # ---- the scheduler -----------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Names the blocks.

        vLLM calls it with the metadata of all ranks before the first request, and from 0.33 on
        after each wake-up. Under MultiConnector the metadata is that of another connector;
        kvdepot's arrives with the first step.
        """
        geometries = [found for found in metadata.values() if isinstance(found, RankGeometry)]
        if geometries and self._named_for != geometries:
            self._name_blocks(geometries)
            self._named_for = geometries
            # Beside another connector the handshake would be that one's.
            self.manager.alone = True

    def _name_blocks(self, described: Collection[RankGeometry]) -> None:
        geometries = sorted(described, key=lambda geometry: geometry.rank)
        world = self._vllm_config.parallel_config.world_size
        if [geometry.rank for geometry in geometries] != list(range(world)):
            raise RuntimeError(f"only {len(geometries)} of {world} ranks reported KV caches")
        _refuse_empty_parts(geometries)
        if not self._memory_weights.watched:
            backend = self._vllm_config.parallel_config.distributed_executor_backend
            raise kvdepot.ConfigError(
                f"--distributed-executor-backend: {backend!r} is not allowed, because kvdepot "
                "cannot detect changed weights with this executor; use 'uni' or 'mp'"
            )
        replicated = self.manager.writers < world
        if any(geometry.replicated is not replicated for geometry in geometries):
            raise RuntimeError(
                "internal error: ranks and scheduler disagree whether all ranks have the same KV"
            )

        def groups(epoch: str | None) -> Groups:
            salt = vllm_namespace.with_epoch(self._settings.salt, epoch)
            known = self._weights.fingerprint
            assert known is not None
            known = vllm_namespace.with_memory(known, self._memory_weights.name)
            fields = vllm_namespace.fields(self._vllm_config, salt, known)
            return self._groups(fields, geometries)

        def name() -> None:
            if self._weights.known and self._memory_weights.name is not None:
                self.manager.set_groups(groups(self.manager.epoch), groups)
            else:
                self.manager.set_groups({})

        is_known, self._name = self._name is not None, name
        if is_known:
            # vLLM has written into its configuration since.
            self._rename()
        else:
            name()
        if not self._weights.known:
            self._weights.then = name

    def _rename(self) -> None:
        manager = self.manager
        manager.withheld = self._memory_weights.withheld
        # What requests and jobs have from before is not stored under another name.
        manager.drop_stores()
        manager.probes.forget()
        self._stop_storing()
        if self._name is not None:
            # The old namespace ends even if the new one cannot be opened.
            manager.set_groups({})
            manager.faults.attempt("namespace", None, self._name)

    def _groups(self, shared: dict[str, Any], geometries: list[RankGeometry]) -> Groups:
        groups = {}
        computed_by = versions.of_blocks(shared=self._settings.share_versions)
        for position, config in enumerate(self.scheduler.config.kv_group_configs):
            names = self._kv_cache_config.kv_cache_groups[config.group_idx].layer_names
            namespace = self.manager.depot.namespace(
                **shared,
                block_tokens=config.tokens_per_chunk,
                layout=vllm_namespace.layout_of_ranks(geometries, position, computed_by),
                group=f"{config.group_idx}: {' '.join(names)}",
            )
            parts = [
                geometry.payload_bytes[position] for geometry in geometries[: self.manager.writers]
            ]
            window = config.sliding_window_size_in_chunks
            tokens = config.tokens_per_chunk
            groups[config.group_idx] = Group(position, namespace, parts, tokens, window)
            logger.info(
                "kvdepot: KV group %d (%d layers) in blocks of %d tokens, %d bytes, namespace %s",
                config.group_idx, len(names), config.tokens_per_chunk, sum(parts),
                namespace.digest.hex(),
            )  # fmt: skip
        return groups

    def _events_of(self, vllm_config: Any) -> Events | None:
        """What publishes KV events, where the engine does."""
        config = self.scheduler.config
        if not vllm_events.are_published(vllm_config):
            return None
        if config.blocks_per_chunk > 1:
            logger.warning(
                "kvdepot: no KV events are published of stored blocks, because a stored block has "
                "%d of vLLM's blocks; omit block_size and blocks_per_chunk",
                config.blocks_per_chunk,
            )
            return None
        hashes = self._fingerprints.hashes = vllm_beside.Hashes()
        groups = [vllm_events.described(group) for group in config.kv_group_configs]
        manager, settings = self.manager, self._settings
        depot = manager.depot.raw
        if settings.shared:
            # A client makes one call at a time, and the scheduler's must not wait for a listing's.
            # Its server was waited for, and described in a line, when the manager opened it.
            depot = kvdepot.open(settings.pipeline, settings.depot | {"lanes": 1})
        events = Events(depot, lambda: manager.hittable, groups, hashes, shared=settings.shared)
        vllm_events.on_publisher(events.start)
        return events

    def _note_stored(self, namespace: SafeNamespace, keys: list[bytes]) -> None:
        self._memory_weights.stored(namespace, keys)
        if self._events is not None:
            self._events.stored(namespace.digest, keys)

    def shutdown(self) -> None:
        """Ends the KV events, and closes the depot or what copies its blocks."""
        if self._events is not None:
            self._events.stop()
        super().shutdown()

    def _is_whole(self, key: OffloadKey, request: str) -> bool:
        """Whether vLLM still has every one of its blocks of a stored block."""
        return compat.has_whole(self.scheduler, request, key)

    def on_new_request(self, request: Any) -> None:
        """Records the properties of a request that its blocks depend on and vLLM's hashes omit."""
        self.manager.set_beside(request.request_id, self._fingerprints.of(request))
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Builds the metadata of a step. Blocks get names as soon as the weights are known."""
        self.manager.faults.attempt("namespace", None, self._weights.poll)
        meta = super().build_connector_meta(scheduler_output)
        self.manager.ends.keep(compat.request_states(self.scheduler))
        return meta

    def _matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        start = time.perf_counter()
        try:
            return self._kept_or_matched_tokens(request, num_computed_tokens)
        finally:
            self.manager.collector.path("scheduler", time.perf_counter() - start)

    def _kept_or_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM asks again in each step for a request that waits; kvdepot looks it up once."""
        name, question = request.request_id, (num_computed_tokens, request.num_tokens)
        known = self.manager.answer(name, question)
        if known is not None:
            return known
        matched = self._probed_tokens(request, num_computed_tokens)
        # While the request still has jobs vLLM looks nothing up, and groups that are not offloaded
        # bound the answer by what vLLM's own cache has of them.
        if not compat.has_transfers(self.scheduler, name) and not compat.is_bounded(self):
            self.manager.keep_answer(name, question, matched)
        return matched

    def _probed_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What is found, or less of it, so that the rest is computed and compared."""
        name, probes = request.request_id, self.manager.probes
        if not self.manager.alone and probes.off is None:
            # What another connector loads would be taken for computed.
            probes.switch_off("there is another connector beside kvdepot's")
        probes.look_up_again(name, num_computed_tokens)
        matched = super()._matched_tokens(request, num_computed_tokens)
        if matched[0] and probes.decide(
            request,
            num_computed_tokens,
            num_computed_tokens + matched[0],
            max(group.tokens_per_chunk for group in self.scheduler.config.kv_group_configs),
            self.manager.beside(name),
        ):
            matched = super()._matched_tokens(request, num_computed_tokens)
        if matched[0] is not None and probes.found(name, num_computed_tokens + matched[0]):
            matched = super()._matched_tokens(request, num_computed_tokens)
        return matched

    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """As vLLM has it, and at most up to where a probe begins."""
        most = super()._max_loadable_tokens(request, num_computed_tokens)
        cut = self.manager.probes.cut(request.request_id)
        if cut is None:
            return most
        least = max(0, cut - num_computed_tokens)
        # Where there are windows or states, vLLM takes one token less.
        least += bool(least and compat.has_windows(self.scheduler))
        return least if most is None else min(most, least)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Updates the state of a request, and logs one line with its hits."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.manager.end_answer(request.request_id, served=num_external_tokens > 0)
        if request.request_id not in self._logged:
            self._logged.add(request.request_id)
            self._say_hits(request, num_external_tokens)

    def set_paused(self, paused: bool) -> None:
        """Records if `/pause` or `/sleep` wait until the engine has no work."""
        self.manager.paused = paused

    def reset_cache(self) -> bool | None:
        """Resets the cache, as `on_reset` defines.

        Except with `on_reset: verify`, requests that continue are no longer stored, because vLLM
        offers all of their blocks again.
        """
        done = super().reset_cache()
        self._fingerprints.reset()
        verify = self._settings.on_reset == vllm_settings.VERIFY
        self._memory_weights.suspect("a reset", doubted=verify)
        if not verify:
            self._stop_storing()
        return done

    def _stop_storing(self) -> None:
        """Store nothing more of requests that have begun."""
        for request in self._begun_requests():
            self.manager.ends.stop(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """Processes the reports of the workers first, so that the next lookup includes them."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdepotWorkerMetadata):
            self.manager.collector.path("worker", meta.path_seconds)
            self.manager.collector.failed_calls("worker", meta.failed_calls)
            if meta.geometries:
                self._hear_geometries(meta.geometries)
            self.manager.apply(meta.reports)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request, and returns the parameters that a proxy passes to another engine."""
        self._logged.discard(request.request_id)
        waits, params = super().request_finished_all_groups(request, block_ids)
        return waits, params or self._handed_on(request)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request, as `request_finished_all_groups`.

        vLLM calls it instead of that method without the hybrid memory manager.
        """
        self._logged.discard(request.request_id)
        waits, params = super().request_finished(request, block_ids)
        return waits, params or self._handed_on(request)

    def _handed_on(self, request: Any) -> dict[str, Any] | None:
        manager = self.manager
        return roles.handed_on(request.kv_transfer_params, manager.role, alone=manager.alone)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Creates the metrics in the API server's process, which has no connector."""
        _prepare(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)

    # ---- helpers -----------------------------------------------------------------------------

    def _offloaded_groups(self) -> list[Any]:
        config = self._kv_cache_config
        return [config.kv_cache_groups[i] for i in get_offloading_group_ids(config)]

    def _check_probes(self) -> None:
        """Switch probes off where blocks of equal engines may differ, or none can be compared."""
        config, groups = self._vllm_config, self._offloaded_groups()
        speculative = config.speculative_config
        dtypes = config.model_config.dtype, config.cache_config.cache_dtype
        why = None
        if speculative is not None and speculative.method != "ngram":
            why = f"speculative decoding by {speculative.method!r} may change a block's last tokens"
        elif not any(layers_of(groups, *dtypes)):
            why = "the blocks of this KV cache cannot be compared"
        if why is None:
            return
        if self._settings.probes.first == vllm_settings.GATE:
            raise kvdepot.ConfigError(
                f"probe_first: 'gate' is not allowed, because {why}; use 'detect'"
            )
        self.manager.probes.switch_off(why)

    def _doubt_weights(self) -> None:
        """Blocks differ from what is computed: perhaps the weights in memory have changed."""
        self._memory_weights.suspect("a probe that failed", doubted=False)

    def _hear_geometries(self, geometries: dict[int, RankGeometry]) -> None:
        """Name the blocks once all ranks have described themselves: the engine is running."""
        self._geometries.update(geometries)
        if len(self._geometries) == self._vllm_config.parallel_config.world_size:
            faults = self.manager.faults
            faults.attempt("namespace", None, self._name_blocks, self._geometries.values())

    def _say_hits(self, request: Any, num_external_tokens: int) -> None:
        tokens = self.scheduler.config.kv_group_configs[0].tokens_per_chunk
        tiers = self.manager.tiers_of(request.request_id)
        logger.info(
            "request %s: %d blocks, %d hit on the device, %d hit external (%s)",
            request.request_id,
            -(-request.num_tokens // tokens),
            compat.local_tokens(self.scheduler, request.request_id) // tokens,
            num_external_tokens // tokens,
            ", ".join(f"{tier} {count}" for tier, count in tiers.items()) or "none",
        )


# MultiConnector looks up by name what a connector counted, whatever module it was loaded from.
with contextlib.suppress(ValueError):  # registered already
    KVConnectorFactory.register_connector("KvdepotConnector", __name__, "KvdepotConnector")


def _prepare(vllm_config: Any) -> vllm_settings.Settings:
    """Read the settings and write what vLLM has to find into its own configuration."""
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    settings = vllm_settings.read(extra)
    versions.check(untested_allowed=settings.untested_vllm)
    vllm_settings.share(settings, settings.merged, vllm_config.parallel_config)
    # vLLM reads its own keys from the dictionary, also those from a config_file.
    extra.clear()
    extra.update(settings.merged, spec_name="KvdepotSpec", spec_module_path="kvdepot.vllm.spec")
    # With vLLM's default, a block that fails to verify would end its request.
    transfer.kv_load_failure_policy = "recompute"
    return settings


def _refuse_beside(multi: Any) -> None:
    """`kvdepot.ConfigError` for what MultiConnector itself is given, or has beside kvdepot."""
    policy = compat.configuration_of(multi).kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise kvdepot.ConfigError(
            f"kv_load_failure_policy: {policy!r} is not allowed for a MultiConnector with kvdepot: "
            "a block that cannot be loaded or verified would end its request; set "
            '"kv_load_failure_policy": "recompute" next to "kv_connector": "MultiConnector"'
        )
    for connector in getattr(multi, "sub_connectors", ()):
        if type(connector) is OffloadingConnector:
            raise kvdepot.ConfigError(
                "connectors: OffloadingConnector is not allowed with KvdepotConnector, because "
                "both register the same metrics; remove OffloadingConnector (kvdepot's tier Cache "
                "replaces it)"
            )


def _say_policy(vllm_config: Any) -> None:
    logger.info(
        "kvdepot: kv_load_failure_policy is 'recompute': vLLM recomputes blocks that fail to "
        "load or are corrupt"
    )
    if vllm_namespace.keys(vllm_config)[1]:
        logger.warning(
            "kvdepot: the seed of vLLM's block hashes is random, so there will be no hits "
            "after a restart; set PYTHONHASHSEED"
        )


def _refuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """`kvdepot.ConfigError` for what would not work, or would be wrong."""
    vllm_namespace.refuse_unknowable(vllm_config)
    vllm_namespace.refuse_whole_prompts(vllm_config)
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise kvdepot.ConfigError(
            f"--distributed-executor-backend: 'external_launcher' with {parallel.world_size} ranks "
            "is not allowed with kvdepot, because each rank is then a separate engine, but a "
            "block needs the KV of all ranks; use 'mp'"
        )
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise kvdepot.ConfigError(
            f"--nnodes: {parallel.nnodes} nodes with the "
            f"{parallel.distributed_executor_backend!r} executor is not allowed with kvdepot, "
            "because all workers of an engine must run on one host; use one node and the 'mp' or "
            "'uni' executor"
        )
    for option, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise kvdepot.ConfigError(f"{option}: {size} is not supported by kvdepot; use 1")
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    groups = get_offloading_group_ids(kv_cache_config)
    several = len(groups) > 1 or len(kv_cache_config.kv_cache_groups) > 1
    if several and (extra.get("blocks_per_chunk", 1) != 1 or "block_size" in extra):
        key = "block_size" if "block_size" in extra else "blocks_per_chunk"
        raise kvdepot.ConfigError(
            f"{key}: {extra[key]!r} is not allowed for a model with "
            f"{len(kv_cache_config.kv_cache_groups)} KV groups, because a stored block must be "
            "one vLLM block; omit the option"
        )


def _refuse_empty_parts(geometries: list[RankGeometry]) -> None:
    """A block has bytes of every rank; a pipeline's stage may have no layer of a KV group."""
    for geometry in geometries:
        if 0 in geometry.payload_bytes:
            group = geometry.payload_bytes.index(0)
            raise kvdepot.ConfigError(
                f"--pipeline-parallel-size: the stage of rank {geometry.rank} has no layer of KV "
                f"group {group}, but a block needs KV of every rank; use fewer stages, or "
                "--tensor-parallel-size"
            )
