"""Everything that must match for stored bytes to be reusable by this engine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.config import OffloadingConfig

import kvdepot
from kvdepot.vllm import fingerprint as vllm_fingerprint
from kvdepot.vllm.messages import RankGeometry
from kvdepot.vllm.settings import TierSettings

HASH_ALGORITHMS = ("sha256", "sha256_cbor")


def fields(vllm_config: Any, salt: str | None) -> dict[str, Any]:
    """The fields of the namespace that all KV groups share."""
    parallel = vllm_config.parallel_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype if cache_dtype == "auto" else cache_dtype
    return {
        "model": vllm_config.model_config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "weights": weights(vllm_config),
        "world": _world(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
        ),
        "hash": keys(vllm_config)[0],
        "salt": salt,
    }


def fields_of_chunks(config: OffloadingConfig, settings: TierSettings) -> dict[str, Any]:
    """The same for the chunks of vLLM's CPU tier, of which a tier below knows less."""
    parallel = config.parallel
    return {
        "model": config.model.name,
        "dtype": config.model.dtype,
        "weights": json.dumps({"given": settings.weights, "engine": settings.engine}),
        "world": _world(parallel.tp_size, parallel.pp_size, parallel.dcp_size, parallel.pcp_size),
        "salt": settings.salt,
    }


def of_engine(vllm_config: Any, kv_cache_config: Any) -> str:
    """Fingerprint of what fills the chunks of vLLM's CPU tier, and is not in `OffloadingConfig`."""
    groups = kv_cache_config.kv_cache_groups
    parts = {
        "weights": weights(vllm_config),
        "hash": keys(vllm_config)[0],
        "backend": str(vllm_config.attention_config.backend),
        "groups": [layout_of_group(vllm_config, group, {}, "") for group in groups],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def with_epoch(salt: str | None, epoch: str | None) -> str | None:
    """The salt of what is stored after a reset; before the first, the epoch is None."""
    return salt if epoch is None else json.dumps({"salt": salt, "epoch": epoch})


def _world(tensor: int, pipeline: int, decode_context: int, prefill_context: int) -> str:
    return json.dumps(
        {
            "tensor": tensor,
            "pipeline": pipeline,
            "decode_context": decode_context,
            "prefill_context": prefill_context,
        }
    )


def refuse_unknowable(vllm_config: Any) -> None:
    """`kvdepot.ConfigError` where blocks could not be told from others that they must not be."""
    keys(vllm_config)
    if vllm_config.weight_transfer_config is not None:
        raise kvdepot.ConfigError(
            f"--weight-transfer-config: {vllm_config.weight_transfer_config!r} is not allowed with "
            "kvdepot, which knows weights by their files: blocks computed with weights that are "
            "updated at run time would be served for others; leave it out"
        )
    _refuse_counted_images(vllm_config)


def _refuse_counted_images(vllm_config: Any) -> None:
    """Without both of its caches vLLM numbers images instead of hashing them.

    The numbers start again with the server, so that a prompt would hit the KV of another image.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if (
        multimodal is not None
        and not multimodal.language_model_only
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise kvdepot.ConfigError(
            "--mm-processor-cache-gb: 0 with --no-enable-prefix-caching is not allowed with "
            "kvdepot for a multimodal model: vLLM then tells images apart by numbers that start "
            "again with each server, and kvdepot keeps blocks for longer; leave one of the two "
            "caches on, or use --language-model-only"
        )


def keys(vllm_config: Any) -> tuple[str, bool]:
    """Hash algorithm and seed of vLLM's block hashes, and whether the seed is random.

    Raises `kvdepot.ConfigError` for algorithms whose values may collide or are
    too short: a key must identify its tokens.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_ALGORITHMS:
        raise kvdepot.ConfigError(
            f"--prefix-caching-hash-algo: {algorithm!r} is not allowed with kvdepot, which keeps "
            f"blocks for longer than one run; use one of {', '.join(HASH_ALGORITHMS)}"
        )
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    random = seed != resolve_none_hash_seed(function)
    digest = hashlib.sha256(seed.encode()).hexdigest()
    return f"{algorithm}:{digest}", random


def weights(vllm_config: Any) -> str:
    """Fingerprint of the weights and of the configuration that they run under."""
    model = vllm_config.model_config
    hf_config = json.loads(model.hf_config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    parts = {
        "vllm": vllm.__version__,
        "config": hf_config,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "files": _files(model, vllm_config.load_config),
    }
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None) if speculative else None
    if draft is not None:
        # The layers of a draft model keep KV in groups of their own.
        parts["draft"] = _files(draft, vllm_config.load_config)
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    path = Path(model.model)
    if path.is_dir():
        return vllm_fingerprint.of_directory(path)
    if path.is_file():
        return vllm_fingerprint.of_file(path)
    snapshot = _cached_snapshot(model, load)
    if snapshot is not None:
        return vllm_fingerprint.of_directory(snapshot)
    raise kvdepot.ConfigError(
        f"--model: the weights of {model.model!r} are not in files of this host "
        f"(load format {load.load_format!r}), so kvdepot cannot tell them from other weights of "
        "that name; use a local directory or the Hugging Face cache"
    )


def _cached_snapshot(model: Any, load: Any) -> Path | None:
    """Directory of the Hugging Face cache that holds the revision being served."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(
        model.model, "config.json", revision=model.revision, cache_dir=load.download_dir
    )
    return Path(os.path.dirname(found)) if isinstance(found, str) else None


def layout_of_group(vllm_config: Any, group: Any, layers: dict[str, Any], device: str) -> str:
    """Describes the bytes of one KV group on this rank; other bytes, another text.

    `layers` maps layer names to vLLM's attention layers.
    """
    spec = group.kv_cache_spec
    by_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    described = [
        [name, _describe_spec(by_layer.get(name, spec)), _packing(vllm_config, layers.get(name))]
        for name in group.layer_names
    ]
    return json.dumps(
        {
            "kv_cache_layout": vllm_config.cache_config.kv_cache_layout,
            "device": device,
            "layers": described,
        },
        sort_keys=True,
    )


def _describe_spec(spec: Any) -> list[str]:
    page = [type(spec).__name__, f"block={spec.block_size}", f"page={spec.page_size_bytes}"]
    if isinstance(spec, AttentionSpec):
        page += [
            f"heads={spec.num_kv_heads}",
            f"head={spec.head_size}",
            f"dtype={spec.dtype}",
            f"window={getattr(spec, 'sliding_window', None)}",
        ]
    else:
        page += [f"{name}={getattr(spec, name, None)}" for name in ("shapes", "dtypes")]
    return page


def _packing(vllm_config: Any, layer: Any) -> list[str]:
    """Attention backend of a layer and, on CPU, the instruction set that packs its keys."""
    if layer is None:
        return []
    backend = getattr(layer, "attn_backend", None) or getattr(layer, "backend", None)
    isa = getattr(layer, "isa", None)
    if isa is None and current_platform.is_cpu() and hasattr(layer, "head_size"):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(
            vllm_config.model_config.dtype,
            vllm_config.cache_config.block_size,
            layer.head_size,
            vllm_config.cache_config.cache_dtype,
        )
    return [getattr(backend, "__name__", str(backend)), str(isa)]


def layout_of_chunks(config: OffloadingConfig, chunk_bytes: int) -> str:
    """Describes the bytes of a chunk of vLLM's CPU tier, in which all ranks have theirs."""
    platform = current_platform
    return json.dumps(
        {
            "vllm": vllm.__version__,
            # Which attention backend packs the keys is chosen by the device.
            "device": [platform.device_type, platform.get_device_name()],
            "kv_cache_layout": config.kv_cache_layout,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
            "workers": config.parallel.world_size,
            "worker_bytes": config.worker_kv_bytes_per_block,
            "chunk_bytes": chunk_bytes,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "tokens_per_hash": config.cache.tokens_per_hash,
        },
        sort_keys=True,
    )


def layout_of_ranks(geometries: Sequence[RankGeometry], group: int) -> str:
    """The layouts of all ranks for the group at that position."""
    layouts = [geometry.layouts[group] for geometry in geometries]
    sizes = [geometry.payload_bytes[group] for geometry in geometries]
    # Ranks of one tensor parallel group are alike; one description is enough.
    kept = layouts[:1] if len(set(layouts)) == 1 else layouts
    return json.dumps({"ranks": kept, "bytes": sizes})
