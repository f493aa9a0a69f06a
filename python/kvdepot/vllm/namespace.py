"""Everything that must match for stored bytes to be reusable by this engine."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

import kvdepot
from kvdepot.engine import weights as engine_weights
from kvdepot.vllm import compat
from kvdepot.vllm import options as vllm_options
from kvdepot.vllm.compat import (
    AttentionSpec,
    OffloadingConfig,
    UniformTypeKVCacheSpecs,
    get_hash_fn_by_name,
    resolve_none_hash_seed,
)
from kvdepot.vllm.messages import RankGeometry
from kvdepot.vllm.settings import TierSettings

logger = init_logger("vllm.kvdepot.namespace")

HASH_ALGORITHMS = ("sha256", "sha256_cbor")
# Pooling that reads the hidden states of tokens whose KV could be loaded.
WHOLE_PROMPT_POOLING = ("CLS", "MEAN")
# Load formats that read the files of the model's directory; others read what their options name.
FORMATS_OF_THE_MODELS_FILES = frozenset(
    {
        "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral",
        "npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
    }
)  # fmt: skip
# Of configurations of models that are put together: other models whose weights are loaded.
OTHER_MODELS = ("text_model_id", "audio_model_id")
SUBFOLDERS = ("whisper-large-v3", "audio_tokenizer")


def fields(vllm_config: Any, salt: str | None, weights: str) -> dict[str, Any]:
    """The fields of the namespace that all KV groups share; `weights` is the fingerprint."""
    parallel = vllm_config.parallel_config
    return {
        "model": _architecture(vllm_config),
        "dtype": _dtype(vllm_config),
        "weights": weights,
        "world": _world(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
        ),
        "hash": keys(vllm_config)[0],
        "salt": salt,
    }


def _dtype(vllm_config: Any) -> str:
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype if cache_dtype == "auto" else cache_dtype
    return str(dtype).removeprefix("torch.")


def _architecture(vllm_config: Any) -> str:
    """For people; the model itself is named by its weights, wherever their files lie."""
    names = vllm_config.model_config.hf_config.architectures or ["unknown"]
    return str(names[0])


def fields_of_chunks(config: OffloadingConfig, settings: TierSettings) -> dict[str, Any]:
    """The same for the chunks of vLLM's CPU tier, of which a tier below knows less."""
    parallel = config.parallel
    given = {"given": settings.weights, "engine": settings.engine}
    return {
        # Its name may be a path. Where kvdepot's connector says more, that is enough.
        "model": config.model.name if settings.engine is None else "vLLM's CPU tier",
        "dtype": config.model.dtype,
        "weights": json.dumps(given),
        "world": _world(parallel.tp_size, parallel.pp_size, parallel.dcp_size, parallel.pcp_size),
        "salt": settings.salt,
    }


def of_engine(vllm_config: Any, kv_cache_config: Any, given: str) -> str:
    """Fingerprint of what fills the chunks of vLLM's CPU tier, and is not in `OffloadingConfig`."""
    groups = kv_cache_config.kv_cache_groups
    parts = {
        "weights": weights(vllm_config, given),
        "options": vllm_options.of(vllm_config).base,
        "hash": keys(vllm_config)[0],
        "backend": str(vllm_config.attention_config.backend),
        "groups": [layout_of_group(vllm_config, group, {}, "") for group in groups],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def with_epoch(salt: str | None, epoch: str | None) -> str | None:
    """The salt of what is stored after a reset; before the first, the epoch is None."""
    return salt if epoch is None else json.dumps({"salt": salt, "epoch": epoch})


def with_memory(weights: str, memory: str | None) -> str:
    """The fingerprint of weights in memory that are not those of the files; for these, `memory` is
    empty."""
    return weights if not memory else hashlib.sha256(f"{weights} {memory}".encode()).hexdigest()


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
            "--mm-processor-cache-gb: 0 with --no-enable-prefix-caching is not allowed for a "
            "multimodal model, because vLLM then reuses image numbers after a restart, and "
            "kvdepot would load KV of other images; enable one of the two caches, or use "
            "--language-model-only"
        )


def refuse_whole_prompts(vllm_config: Any) -> None:
    """`kvdepot.ConfigError` for pooling that needs every token of a prompt computed.

    The first prompt with loaded tokens would end the engine, in vLLM's pooler.
    """
    pooler = vllm_config.model_config.pooler_config
    kind = None if pooler is None else pooler.seq_pooling_type
    if kind in WHOLE_PROMPT_POOLING:
        raise kvdepot.ConfigError(
            f"--pooler-config: seq_pooling_type {kind!r} is not allowed with kvdepot, because "
            "this pooling needs all tokens of a prompt computed; start this engine without kvdepot"
        )


def keys(vllm_config: Any) -> tuple[str, bool]:
    """Algorithm and seed of vLLM's block hashes, with the tokens behind a block that its hash
    covers, if there are any; and whether the seed is random.

    Raises `kvdepot.ConfigError` for algorithms whose values may collide or are
    too short: a key must identify its tokens.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASH_ALGORITHMS:
        raise kvdepot.ConfigError(
            f"--prefix-caching-hash-algo: {algorithm!r} is not allowed, because this hash is too "
            f"weak for blocks that outlive a run; use one of {', '.join(HASH_ALGORITHMS)}"
        )
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    random = seed != resolve_none_hash_seed(function)
    digest = hashlib.sha256(seed.encode()).hexdigest()
    lookahead = compat.hash_lookahead(vllm_config)
    return f"{algorithm}:{digest}" + (f":{lookahead}" if lookahead else ""), random


def weights(vllm_config: Any, given: str) -> str:
    """Fingerprint of the weights and of code that comes with them.

    `given` is the setting: `sampled`, `full`, or a text that is added to what can be identified.
    Raises `kvdepot.ConfigError` for weights that cannot be, unless a text names them.
    """
    mode = engine_weights.mode_of(given)
    text = None if given in (engine_weights.FULL, engine_weights.SAMPLED) else given
    load = vllm_config.load_config
    parts: dict[str, Any] = {"given": text}
    parts["files"] = _files(vllm_config, vllm_config.model_config, load, mode, text)
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None) if speculative else None
    if draft is not None:
        # The layers of a draft model keep KV in groups of their own.
        parts["draft"] = _files(
            vllm_config, draft, speculative.draft_load_config or load, mode, text
        )
    if getattr(vllm_config, "engram_config", None) is not None:
        # Its layers look up n-grams of what tokens are written as.
        parts["tokenizer"] = _tokenizer(vllm_config, load, text)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def processor(vllm_config: Any) -> str:
    """Fingerprint of the files that say how images, audio and video become tokens; empty where
    there are none."""
    directory = _directory(vllm_config.model_config, vllm_config.load_config)
    if directory is None:
        return ""
    found = engine_weights.of_processor(directory)
    return found + _unless_changed(vllm_config, engine_weights.processor_files_of(directory))


def _files(vllm_config: Any, model: Any, load: Any, mode: str, text: str | None) -> str:
    if load.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    path = Path(model.model)
    is_read = load.load_format in FORMATS_OF_THE_MODELS_FILES
    if path.is_file() and is_read:
        return engine_weights.of_file(path, mode) + _unless_changed(vllm_config, [path])
    directory = _directory(model, load)
    if directory is not None and is_read and engine_weights.has_weights(directory):
        found = engine_weights.of_directory(directory, mode, code=model.trust_remote_code)
        others = [_beside(vllm_config, one, load, mode, text) for one in _others(model, directory)]
        changed = _unless_changed(vllm_config, engine_weights.files_of(directory))
        return " ".join([found, *others]) + changed
    if text is None:
        raise kvdepot.ConfigError(
            f"--model: the weights of {model.model!r} are not in files of this host (load format "
            f"{load.load_format!r}), so kvdepot cannot identify the weights; use a local "
            "directory or the Hugging Face cache, or set 'weights' in kv_connector_extra_config "
            "to a text that identifies the weights"
        )
    return "named"


def _others(model: Any, directory: Path) -> list[str]:
    """Directories and ids of models whose weights or code are loaded beside the model's own."""
    config = getattr(model, "hf_config", None)
    found = [getattr(config, name, None) for name in OTHER_MODELS]
    found += [str(directory / name) for name in SUBFOLDERS if (directory / name).is_dir()]
    if model.trust_remote_code:
        code = (getattr(config, "auto_map", None) or {}).values()
        found += sorted({str(one).partition("--")[0] for one in code if "--" in str(one)})
    return [str(one) for one in found if one]


def _beside(vllm_config: Any, name: str, load: Any, mode: str, text: str | None) -> str:
    directory = _directory_beside(name, load, text)
    if directory is None:
        return "named"
    # vLLM reads its configuration itself.
    found = engine_weights.of_directory(directory, mode, config=True)
    configs = [directory / name for name in engine_weights.CONFIG_FILES]
    read = engine_weights.files_of(directory) + [path for path in configs if path.is_file()]
    return found + _unless_changed(vllm_config, read)


def _tokenizer(vllm_config: Any, load: Any, text: str | None) -> str:
    model = vllm_config.model_config
    directory = _directory_beside(model.tokenizer, load, text, model.revision)
    if directory is None:
        return "named"
    found = engine_weights.of_tokenizer(directory)
    return found + _unless_changed(vllm_config, engine_weights.tokenizer_files_of(directory))


def _directory_beside(
    name: str, load: Any, text: str | None, revision: str | None = None
) -> Path | None:
    directory = _directory(SimpleNamespace(model=name, revision=revision), load)
    if directory is None and text is None:
        raise kvdepot.ConfigError(
            f"--model: the model also loads weights or code from {name!r}, which has no files "
            "on this host; set 'weights' in kv_connector_extra_config to a text that identifies "
            "all weights"
        )
    return directory


def _unless_changed(vllm_config: Any, paths: Sequence[Path]) -> str:
    """Nothing; a random text where a file was replaced since vLLM began to start: it may have been
    loaded before or after."""
    # The time in nanoseconds at which the configuration was made.
    began = str(vllm_config.instance_id).partition("_")[0]
    if not (began.isdecimal() and len(began) == len("1700000000000000000")):
        return ""
    changed = engine_weights.changed_since(paths, int(began) / 1e9)
    if changed is None:
        return ""
    logger.warning(
        "kvdepot: %s was modified during the engine's start; blocks of this engine will not "
        "be found by other engines or after a restart; restart the engine",
        changed,
    )
    return " changed " + secrets.token_hex(16)


def _directory(model: Any, load: Any) -> Path | None:
    """Where a model's files are: its directory, or the Hugging Face cache's for its revision."""
    # vLLM loads the weights into one cache, and the rest into the other.
    return engine_weights.directory_of(model.model, model.revision, (load.download_dir, None))


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
            "device": _device(vllm_config, device),
            "layers": described,
        },
        sort_keys=True,
    )


def _device(vllm_config: Any, device: str) -> str:
    """Under quantized weights or KV an accelerator's capability counts, too: vLLM chooses kernels
    by it that round activations to other types."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = [one for one in (vllm_config.model_config, draft) if one is not None]
    rounds = any(one.quantization is not None for one in models)
    rounds |= str(vllm_config.cache_config.cache_dtype).startswith(("fp8", "nvfp4"))
    if device != "cuda" or not rounds:
        return device
    capability = current_platform.get_device_capability()
    return f"{device} {capability and capability.to_int()}"


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
        isa = compat.cpu_isa(vllm_config, layer.head_size)
    return [getattr(backend, "__name__", str(backend)), str(isa)]


def layout_of_chunks(
    config: OffloadingConfig, chunk_bytes: int, versions: Mapping[str, str]
) -> str:
    """Describes the bytes of a chunk of vLLM's CPU tier, in which all ranks have theirs.

    `versions` are those of what computes them (`compat.versions.of_blocks`).
    """
    platform = current_platform
    return json.dumps(
        {
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
        }
        | dict(versions),
        sort_keys=True,
    )


def layout_of_ranks(
    geometries: Sequence[RankGeometry], group: int, versions: Mapping[str, str]
) -> str:
    """The layouts of all ranks for the group at that position, and the versions of what computes
    the blocks (`compat.versions.of_blocks`)."""
    layouts = [geometry.layouts[group] for geometry in geometries]
    sizes = [geometry.payload_bytes[group] for geometry in geometries]
    # Ranks of one tensor parallel group are alike; one description is enough.
    kept = layouts[:1] if len(set(layouts)) == 1 else layouts
    # Read where the model was built, which may have written into its configuration.
    options = sorted({geometry.options for geometry in geometries})
    return json.dumps({"ranks": kept, "bytes": sizes, "options": options, **versions})
