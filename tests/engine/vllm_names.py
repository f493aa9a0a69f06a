"""What changed between two versions of vLLM in the names that kvdepot uses.

    python tests/engine/vllm_names.py OLD NEW [--bodies] [--where] [--options]

OLD and NEW are directories with the package `vllm`, such as unpacked wheels: sources are read, and
nothing of vLLM is imported. `USED` lists the names by owner, with the side that uses each: the
scheduler's process (S), a worker (W), or both (B). `--options` prints the options and environment
variables that came, went, or have another default, which the names of blocks may depend on
(`kvdepot.vllm.option_tables`), and which of them no table has. Exit status 1 if a name is gone or
called in another way, or an option is in no table.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

KV = "vllm.distributed.kv_transfer.kv_connector"
V1 = f"{KV}.v1"
OFFLOADING = f"{V1}.offloading"
BASE = "vllm.v1.kv_offload.base"
TIERING = "vllm.v1.kv_offload.tiering"
SPECS = "vllm.v1.kv_cache_interface"

# Owner -> side and its members: what is called, read, overridden or patched. An owner with "+" is a
# class that kvdepot extends: what it gains is printed too.
USED: dict[str, str] = {
    # ---- the connector ---------------------------------------------------------------------------
    f"{V1}.KVConnectorRole": "B SCHEDULER WORKER",
    f"{KV}.factory.KVConnectorFactory": "B register_connector",
    f"+{V1}.base.KVConnectorBase_V1": """
        B __init__ _vllm_config _kv_cache_config _kv_transfer_config bind_kv_cache_manager
        requires_piecewise_for_cudagraph get_handshake_metadata get_transfer_results
        get_block_ids_with_load_errors set_xfer_handshake_metadata_pp_aware
        update_connector_output take_events reset_cache unregister_kv_caches
    """,
    f"{V1}.base.KVConnectorTransferResults": "W __init__",
    f"{V1}.base.KVConnectorHandshakeMetadata": "B",
    f"{V1}.base.KVConnectorWorkerMetadata": "B aggregate",
    f"+{V1}.offloading_connector.OffloadingConnector": """
        B __init__ connector_worker scheduler register_kv_caches on_new_request
        get_num_new_matched_tokens _max_loadable_tokens _bounding_group_ids
        update_state_after_alloc build_connector_meta update_connector_output request_finished
        request_finished_all_groups reset_cache take_events build_prom_metrics
        requires_kv_delivery
    """,
    f"{OFFLOADING}.config.get_offloading_group_ids": "B",
    f"{OFFLOADING}.common.OffloadingConnectorMetadata": "W load_jobs store_jobs",
    f"{OFFLOADING}.common.TransferJob": "W req_id src_spec dst_spec sync",
    f"+{OFFLOADING}.common.OffloadingWorkerMetadata": """
        B completed_jobs transfer_stats aggregate
    """,
    f"{OFFLOADING}.metrics.OffloadingConnectorStats": """
        S __init__ increase_counter set_gauge is_empty
    """,
    f"+{OFFLOADING}.scheduler.OffloadingConnectorScheduler": """
        S manager config _req_status _sliding_window_groups _reachable_store_block_mask _step_region
        _maximal_prefix_lookup _sliding_window_lookup
        get_num_new_matched_tokens update_state_after_alloc build_connector_meta
        has_pending_push_work update_connector_output reset_cache take_events get_stats
        _update_req_states _build_store_jobs
    """,
    f"{OFFLOADING}.scheduler.SchedulerOffloadConfig": """
        S kv_group_configs blocks_per_chunk alignment_tokens
    """,
    f"{OFFLOADING}.scheduler.GroupOffloadConfig": """
        S group_idx tokens_per_block tokens_per_chunk sliding_window_size_in_chunks is_eagle_group
        kv_event_group_spec
    """,
    f"{OFFLOADING}.scheduler.RequestOffloadState": """
        S req req_context group_states transfer_jobs num_locally_computed_tokens
    """,
    f"{OFFLOADING}.scheduler.RequestGroupState": "S block_ids",
    f"+{OFFLOADING}.worker.OffloadingConnectorWorker": """
        W __init__ spec worker vllm_config kv_cache_config _init_worker _connector_worker_meta
        start_kv_transfers prepare_store_kv get_finished build_connector_worker_meta
        handle_preemptions
    """,
    f"{OFFLOADING}.events.OffloadingEventGroupSpec": """
        S kv_cache_spec_kind kv_cache_spec_sliding_window
    """,
    f"{V1}.multi_connector.MultiConnector": "B sub_connectors _connectors",
    "vllm.distributed.kv_transfer.get_kv_transfer_group": "W",
    "vllm.distributed.kv_transfer.has_kv_transfer_group": "W",
    # ---- offloading ------------------------------------------------------------------------------
    f"{BASE}.OffloadKey": "B",
    f"{BASE}.get_offload_group_idx": "S",
    f"{BASE}.get_offload_block_hash": "S",
    f"{BASE}.LookupResult": "S MISS HIT HIT_PENDING RETRY",
    f"{BASE}.OffloadPolicy": "S REQUEST_LEVEL",
    f"{BASE}.ReqContext": """
        S req_id kv_transfer_params _offload_key_positions get_offload_key_position
    """,
    f"{BASE}.RequestOffloadingContext": "S __init__ policy",
    f"{BASE}.ScheduleEndContext": "S",
    f"{BASE}.PrepareStoreOutput": "S __init__",
    f"{BASE}.LoadStoreSpec": "B",
    f"{BASE}.GPULoadStoreSpec": "W group_sizes block_ids block_indices",
    f"{BASE}.TransferResult": "W __init__",
    f"{BASE}.Medium": "S CPU STORAGE",
    f"{BASE}.Locality": "S LOCAL REMOTE",
    f"{BASE}.CanonicalKVCaches": "W tensors group_data_refs",
    f"{BASE}.CanonicalKVCacheTensor": "W tensor page_size_bytes",
    f"{BASE}.CanonicalKVCacheRef": "W tensor_idx page_size_bytes",
    f"{BASE}.OffloadingMetricMetadata": "S __init__",
    f"{BASE}.OffloadingCounterMetadata": "S __init__",
    f"{BASE}.OffloadingGaugeMetadata": "S __init__",
    f"{BASE}.OffloadingEvent": "S __init__",
    f"{BASE}.OffloadingKVEventsConfig": "S enable_kv_cache_events self_describing_kv_events",
    f"+{BASE}.OffloadingManager": """
        S lookup prepare_load complete_load prepare_store complete_store get_load_source
        on_new_request on_request_finished on_schedule_end has_pending_work reset_cache get_stats
        take_events shutdown lock
    """,
    f"+{BASE}.OffloadingWorker": "W submit_store submit_load get_finished wait shutdown",
    f"+{BASE}.OffloadingSpec": """
        B __init__ build_metric_definitions get_manager get_worker config blocks_per_chunk
        offload_prompt_only replicated_layout kv_events_config
    """,
    "vllm.v1.kv_offload.config.OffloadingConfig": """
        B extra_config replicated_layout canonical_layout kv_cache_layout
        worker_kv_bytes_per_block parallel model cache groups
    """,
    "vllm.v1.kv_offload.config.OffloadingParallelConfig": """
        B rank world_size tp_size pp_size dcp_size pcp_size data_parallel_index
    """,
    "vllm.v1.kv_offload.config.OffloadingModelConfig": "S name dtype",
    "vllm.v1.kv_offload.config.OffloadingCacheConfig": "S blocks_per_chunk tokens_per_hash",
    "vllm.v1.kv_offload.config.OffloadingGroupConfig": """
        S group_id tokens_per_block layer_names
    """,
    f"+{TIERING}.base.SecondaryTierManager": """
        S __init__ medium locality _offloading_spec block_size_bytes build_metric_definitions
        lookup submit_load submit_store get_finished_jobs drain_jobs on_new_request
        on_request_finished has_pending_work get_stats shutdown take_events
    """,
    f"{TIERING}.base.TransferJob": """
        S job_id keys chunk_ids is_promotion req_context submit_time
    """,
    f"{TIERING}.base.JobResult": "S __init__",
    f"{TIERING}.manager.TieringOffloadingManager": "S secondary_tiers",
    f"{TIERING}.spec.TieringOffloadingSpec": "S",
    # ---- the engine ------------------------------------------------------------------------------
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": "S HOST DISK EXTERNAL_UNSPECIFIED",
    "vllm.v1.core.sched.interface.PauseState": "S UNPAUSED",
    "vllm.v1.core.sched.scheduler.Scheduler": """
        S set_pause_state connector update_from_output kv_event_publisher
    """,
    "vllm.v1.core.sched.output.SchedulerOutput": """
        S total_num_scheduled_tokens finished_req_ids
    """,
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "S reset_prefix_cache",
    "vllm.v1.core.kv_cache_utils.resolve_none_hash_seed": "S",
    "vllm.v1.core.kv_cache_utils.get_request_block_hasher": "S",
    "vllm.v1.core.kv_cache_utils.hash_block_tokens": "S",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash": "S",
    "vllm.utils.hashing.get_hash_fn_by_name": "S",
    "vllm.v1.outputs.KVConnectorOutput": "S kv_connector_worker_meta",
    "vllm.v1.request.Request": """
        S request_id num_tokens num_computed_tokens num_preemptions lora_request mm_features
        kv_transfer_params
    """,
    "vllm.lora.request.LoRARequest": "S lora_path lora_int_id load_inplace tensorizer_config_dict",
    "vllm.multimodal.inputs.MultiModalFeatureSpec": "S mm_position modality",
    "vllm.multimodal.inputs.PlaceholderRange": "S offset length",
    "vllm.v1.executor.abstract.Executor": """
        S get_class collective_rpc vllm_config sleeping_tags
    """,
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": "S collective_rpc",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": "S collective_rpc",
    "vllm.v1.worker.worker_base.WorkerBase": "W get_model",
    "vllm.v1.worker.gpu_worker.Worker": "W get_draft_model sleep wake_up discard",
    "vllm.device_allocator.cumem.CuMemAllocator": "W instance sleep discard",
    "vllm.distributed.kv_events.EventPublisherFactory": "S create",
    "vllm.distributed.kv_events.ZmqEventPublisher": "S publish _service_replay _buffer _replay",
    "vllm.distributed.kv_events.BlockStored": """
        S __init__ block_hashes block_size medium group_idx kv_cache_spec_kind
        kv_cache_spec_sliding_window locality ownership
    """,
    "vllm.distributed.kv_events.BlockRemoved": """
        S __init__ block_hashes medium group_idx locality ownership
    """,
    "vllm.distributed.kv_events.AllBlocksCleared": "S",
    "vllm.distributed.kv_events.KVEventBatch": "S __init__",
    # ---- descriptions of KV caches ---------------------------------------------------------------
    f"{SPECS}.KVCacheConfig": "B kv_cache_groups num_blocks",
    f"{SPECS}.KVCacheGroupSpec": "B kv_cache_spec layer_names",
    f"{SPECS}.KVCacheSpec": "B block_size page_size_bytes",
    f"{SPECS}.AttentionSpec": """
        B num_kv_heads head_size dtype kv_quant_mode unpadded_page_size_bytes
    """,
    f"{SPECS}.FullAttentionSpec": "W sliding_window",
    f"{SPECS}.MLAAttentionSpec": "W cache_dtype_str",
    f"{SPECS}.MambaSpec": "B shapes dtypes",
    f"{SPECS}.UniformTypeKVCacheSpecs": "B kv_cache_specs",
    f"{SPECS}.KVQuantMode": "W NONE FP8_PER_TENSOR",
    f"{SPECS}.iter_layer_specs": "W",
    "vllm.v1.attention.backends.cpu_attn._get_attn_isa": "W",
    # ---- configuration ---------------------------------------------------------------------------
    "vllm.config.vllm.VllmConfig": """
        B instance_id model_config cache_config parallel_config load_config speculative_config
        kv_transfer_config compilation_config attention_config offload_config engram_config
        num_hash_lookahead_tokens
    """,
    "vllm.config.model.ModelConfig": """
        B model tokenizer revision dtype seed trust_remote_code hf_config hf_text_config
        hf_overrides max_model_len original_max_model_len get_and_verify_max_len model_impl
        multimodal_config pooler_config quantization try_get_generation_config
        override_generation_config
    """,
    "vllm.config.multimodal.MultiModalConfig": """
        B language_model_only mm_processor_cache_gb mm_encoder_fp8_scale_path
    """,
    "vllm.config.pooler.PoolerConfig": "S seq_pooling_type",
    "vllm.config.cache.CacheConfig": """
        B cache_dtype block_size enable_prefix_caching prefix_caching_hash_algo kv_cache_layout
    """,
    "vllm.config.parallel.ParallelConfig": """
        B world_size tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
        prefill_context_parallel_size distributed_executor_backend nnodes enable_eplb
        data_parallel_size data_parallel_size_local data_parallel_index
    """,
    "vllm.config.load.LoadConfig": "S load_format download_dir",
    "vllm.config.speculative.SpeculativeConfig": "S method draft_model_config draft_load_config",
    "vllm.config.compilation.CompilationConfig": "W static_forward_context",
    "vllm.config.attention.AttentionConfig": "S backend",
    "vllm.config.offload.OffloadConfig": "S prefetch",
    "vllm.config.offload.PrefetchOffloadConfig": "S offload_group_size",
    "vllm.config.kv_transfer.KVTransferConfig": """
        B kv_connector_extra_config kv_load_failure_policy is_kv_consumer is_kv_producer
    """,
    "vllm.config.kv_events.KVEventsConfig": """
        S enable_kv_cache_events publisher replay_endpoint buffer_steps
    """,
    "vllm.envs.environment_variables": "B",
    "vllm.envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "S",
    "vllm.envs.VLLM_PLUGINS": "B",
    "vllm.logger.init_logger": "B",
    "vllm.platforms.current_platform": "B",
    "vllm.platforms.interface.Platform": """
        B is_cpu is_cuda device_name device_type get_device_name get_device_capability
    """,
    "vllm.platforms.interface.DeviceCapability": "W to_int",
}

# Of these, the names that not every version has, by the first version and by the last one with
# them. A class stands for its members, too.
SINCE: dict[str, tuple[str, ...]] = {
    "0.32": (
        f"{BASE}.OffloadingManager.get_load_source",
        "vllm.v1.metrics.cache_hit_source.CacheHitSource",
    ),
    "0.33": (
        f"{OFFLOADING}.common.TransferJob.sync",
        f"{OFFLOADING}.scheduler.OffloadingConnectorScheduler._step_region",
        f"{V1}.base.KVConnectorBase_V1.unregister_kv_caches",
        f"{BASE}.OffloadingManager.lock",
        "vllm.config.vllm.VllmConfig.num_hash_lookahead_tokens",
    ),
}
UNTIL: dict[str, tuple[str, ...]] = {
    "0.31": ("vllm.lora.request.LoRARequest.tensorizer_config_dict",),
}


class Name(NamedTuple):
    """One of the names, as its module or its class has it."""

    owner: str
    member: str
    side: str
    extended: bool

    def __str__(self) -> str:
        return f"{self.owner}.{self.member}".rstrip(".")


class Found(NamedTuple):
    """A name in a tree of sources."""

    where: str
    shape: str
    """How it is called, or what it is declared as."""
    body: str


def names() -> Iterator[Name]:
    """All of `USED`."""
    for owner, text in USED.items():
        side, *members = text.split()
        for member in ("", *members):
            yield Name(owner.removeprefix("+"), member, side, owner.startswith("+"))


class Tree:
    """The sources of one version."""

    def __init__(self, root: Path) -> None:
        self.root = root
        text = (root / "vllm" / "_version.py").read_text()
        found = re.search(r"version = '([^']+)'", text)
        self.version = found.group(1) if found else str(root)
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        self.minor = (int(numbers[1]), int(numbers[2])) if numbers else None

    def should_have(self, name: Name) -> bool:
        """Whether this version has a name by `SINCE` and `UNTIL`."""

        def listed(table: dict[str, tuple[str, ...]]) -> Iterator[tuple[int, ...]]:
            for version, found in table.items():
                if any(f"{name}.".startswith(f"{one}.") for one in found):
                    yield tuple(map(int, version.split(".")))

        here = self.minor
        if here is None:
            return True
        return all(here >= first for first in listed(SINCE)) and all(
            here <= last for last in listed(UNTIL)
        )

    @cache  # noqa: B019  (a tree lives as long as the program)
    def module(self, name: str) -> ast.Module | None:
        """The parsed module, if there is one."""
        path = self.root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, name: Name) -> Found | None:
        """Where and what it is here."""
        module, _, top = name.owner.rpartition(".")
        defined = self._top(module, top)
        if defined is None:
            return None
        module, node = defined
        if not name.member:
            return _described(module, node)
        return self._member(module, node, name.member) if isinstance(node, ast.ClassDef) else None

    def members(self, owner: str) -> set[str]:
        """The names that a class's own body defines, and that do not begin with an underscore."""
        module, _, top = owner.rpartition(".")
        defined = self._top(module, top)
        if defined is None:
            return set()
        found = {name for one in getattr(defined[1], "body", ()) for name in _bound(one)}
        return {name for name in found if not name.startswith("_")}

    def _top(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if name in _bound(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._top(node.module, alias.name)
        return None

    def _member(self, module: str, owner: ast.ClassDef, member: str) -> Found | None:
        if member == "__init__":
            fields = self._fields(module, owner)
            if fields and "__init__" not in {name for one in owner.body for name in _bound(one)}:
                return Found(f"{module}.{owner.name}", "(" + ", ".join(fields) + ")", "")
        for node in _statements(owner.body):
            if member in _bound(node):
                return _described(f"{module}.{owner.name}", node)
        for node in ast.walk(owner):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(ast.unparse(target) == f"self.{member}" for target in targets):
                    kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
                    return Found(f"{module}.{owner.name}", f"self.{member}: {kind}", "")
        for base in owner.bases:
            above = self._top(module, ast.unparse(base).rpartition(".")[2].partition("[")[0])
            if above is not None and isinstance(above[1], ast.ClassDef):
                found = self._member(above[0], above[1], member)
                if found is not None:
                    return found
        return None

    def _fields(self, module: str, owner: ast.ClassDef) -> list[str]:
        """Of a dataclass or one of msgspec's: what a call of the class takes."""
        found: list[str] = []
        for base in owner.bases:
            above = self._top(module, ast.unparse(base).rpartition(".")[2])
            if above is not None and isinstance(above[1], ast.ClassDef):
                found += self._fields(*above)  # type: ignore[arg-type]
        for node in owner.body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                name = ast.unparse(node.target)
                found = [one for one in found if one.partition(":")[0] != name]
                found.append(ast.unparse(node).replace(" = ", "="))
        return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, also under conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return []


def _described(where: str, node: ast.stmt) -> Found:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        marks = [ast.unparse(one) for one in node.decorator_list if ast.unparse(one) != "override"]
        marked = "".join(f"@{mark} " for mark in marks)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        body = node.body[1:] if ast.get_docstring(node) else node.body
        text = "\n".join(map(ast.unparse, body))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        # How types are written says nothing of how it is called.
        shape = f"{marked}({ast.unparse(node.args)}){returns}".replace("'", "").replace('"', "")
        return Found(where, shape, digest)
    if isinstance(node, ast.ClassDef):
        return Found(where, f"class({', '.join(map(ast.unparse, node.bases))})", "")
    if isinstance(getattr(node, "value", None), ast.Dict):
        return Found(where, "a dictionary", "")
    return Found(where, ast.unparse(node), "")


def _is_option(field: ast.AnnAssign) -> bool:
    return "ClassVar" not in ast.unparse(field.annotation)


def options(tree: Tree) -> dict[str, str]:
    """Defaults by option, `Class.field`, and by environment variable."""
    found: dict[str, str] = {}
    for file in sorted((tree.root / "vllm" / "config").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            marks = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
            if isinstance(node, ast.ClassDef) and any("config" in m or "class" in m for m in marks):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and _is_option(field):
                        default = ast.unparse(field.value) if field.value else ""
                        found[f"{node.name}.{ast.unparse(field.target)}"] = default
    defined = tree._top("vllm.envs", "environment_variables")
    value = getattr(defined[1], "value", None) if defined else None
    if isinstance(value, ast.Dict):
        for key, default in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant):
                found[str(key.value)] = ast.unparse(default)
    return found


def changed_options(old: Tree, new: Tree) -> Iterator[tuple[str, str]]:
    """A name and a line for each option that came (+), went (-), or has another default (~)."""
    before, after = options(old), options(new)
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield name, f"+ {name} = {after[name][:120]}"
        elif name not in after:
            yield name, f"- {name} = {before[name][:120]}"
        elif before[name] != after[name]:
            yield name, f"~ {name}: {before[name][:160]} -> {after[name][:160]}"


def words(package: Path, *files: str) -> set[str]:
    """What stands in files of kvdepot: a table of options has no other words of such names."""
    texts = (package.joinpath(file).read_text() for file in files)
    return {word for text in texts for word in re.findall(r"\w+", text)}


def uses(name: Name, package: Path) -> list[str]:
    """Files and lines of kvdepot that have the name; an attribute's may be another class's."""
    word = name.member or name.owner.rpartition(".")[2]
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    found = []
    for file in sorted(package.rglob("*.py")):
        lines = [
            str(number)
            for number, line in enumerate(file.read_text().splitlines(), 1)
            if pattern.search(line.partition("#")[0])
        ]
        if lines:
            found.append(f"{file.name}:{','.join(lines[:6])}")
    return found


def imported(package: Path) -> set[str]:
    """What kvdepot's modules import from vLLM by name."""
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def changes(old: Tree, new: Tree, *, bodies: bool) -> Iterator[tuple[str, Name, str]]:
    """What differs: its kind, the name, and a text."""
    for name in names():
        before, after = old.find(name), new.find(name)
        if before is None and after is None:
            if old.should_have(name) or new.should_have(name):
                yield "nowhere", name, ""
        elif after is None:
            known = not new.should_have(name)
            yield "ended" if known else "gone", name, before.shape if before else ""
        elif before is None:
            yield "new", name, after.shape
        elif before.shape != after.shape:
            yield "shape", name, f"\n    - {before.shape[:200]}\n    + {after.shape[:200]}"
        elif before.where != after.where:
            yield "moved", name, f"{before.where} -> {after.where}"
        elif bodies and before.body != after.body:
            yield "body", name, ""
    for owner in USED:
        if owner.startswith("+"):
            name = Name(owner.removeprefix("+"), "", USED[owner].split()[0], extended=True)
            gained = sorted(new.members(name.owner) - old.members(name.owner))
            lost = sorted(old.members(name.owner) - new.members(name.owner))
            if gained or lost:
                signed = [f"+{one}" for one in gained] + [f"-{one}" for one in lost]
                yield "hooks", name, " ".join(signed)


def main() -> int:
    """Print the changes; the exit status is 1 if code that uses a name may fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--bodies", action="store_true", help="functions that do something else")
    parser.add_argument("--where", action="store_true", help="kvdepot's files and lines, too")
    parser.add_argument("--options", action="store_true", help="options and variables, too")
    parser.add_argument("--package", type=Path, default=Path("python/kvdepot/vllm"))
    given = parser.parse_args()
    old, new = Tree(given.old), Tree(given.new)
    print(f"vLLM {old.version} -> {new.version}: {len(list(names()))} names")
    failed = False
    for kind, name, text in changes(old, new, bodies=given.bodies):
        failed |= kind in ("gone", "shape", "nowhere")
        print(f"{kind:8} {name.side} {name} {text}".rstrip())
        if given.where and kind != "hooks":
            print(f"         {' '.join(uses(name, given.package))}")
    if given.options:
        judged = words(given.package, "option_tables.py", "variable_tables.py")
        for name, line in changed_options(old, new):
            is_known = line.startswith("-") or name.rpartition(".")[2] in judged
            failed |= not is_known
            print(f"option {line}" + ("" if is_known else "  (in no table)"))
    unlisted = imported(given.package) - {str(name) for name in names()} - {"vllm.envs"}
    for missing in sorted(unlisted):
        print(f"unlisted   {missing}")
    return int(failed or bool(unlisted))


if __name__ == "__main__":
    sys.exit(main())
