"""What vLLM's options add to the names of blocks; `option_tables` says which of them count."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs

from kvdepot.engine import options, weights
from kvdepot.vllm.option_tables import (
    FOR_MEDIA,
    HARMLESS,
    RESOLVED,
    UNDER_ADAPTERS,
)
from kvdepot.vllm.variable_tables import HARMLESS_VARIABLES

# A draft model is configured as its target is.
SAME = {
    "speculative_config.draft_model_config": "model_config",
    "speculative_config.draft_load_config": "load_config",
}
# RoPE whose frequencies do not depend on `max_model_len`.
ROPE_OF_ANY_LENGTH = frozenset(
    {
        "bailing_mrope", "deepseek_llama_scaling", "deepseek_yarn", "default", "linear", "llama3",
        "mllama4", "mrope", "ntk", "openpangu", "proportional", "yarn",
    }
)  # fmt: skip
# From this length on, Llama 4 scales its queries, unless it is told otherwise.
LLAMA4_LENGTH = 32768
# Of the model's own configuration.
NOT_OF_THE_NUMBERS = weights.OF_THE_WRITER
# What vLLM's models write into it as they are built, by a part of the architecture's name;
# `length_of` resolves it.
WRITTEN_BY_MODELS = {"llama4": "attn_temperature_tuning", "minimax": "max_model_len"}
# Variables without vLLM's prefix, its own and those of the libraries below it, that change what a
# layer computes.
OTHER_VARIABLES = (
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLASHINFER_EXTRA_CUDAFLAGS",
    "FLA_TRIL_PRECISION",
    "FLA_USE_FAST_OPS",
    "INKLING_GFX950_GLUON",
    "INKLING_MULTIMEM_AR",
    "INKLING_SPLIT_KV",
    "LAMPORT_RS_SCONV",
    "MINIMAX_KVFP4_FP8_PAIR_DEQUANT",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_F32_DEFAULT",
    "USE_DEFAULT_FLA_NORM",
    "USE_FLAGOS",
)
# The same of what reads images, audio and video.
MEDIA_VARIABLES = ("XHS_VIDEO_JPEG_QUALITY",)
# Written into every pod for a service whose name begins with "vllm".
OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")
PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")


@dataclass(frozen=True)
class Options:
    """What an engine's options add to the names of its blocks, as texts."""

    base: str
    """For every block."""
    adapter: str
    """For blocks that are computed under a LoRA adapter."""
    media: str
    """For blocks at or behind an image, a video or audio."""


def of(vllm_config: Any) -> Options:
    """The options of an engine, in any of its processes."""
    found: dict[str, dict[str, Any]] = {"base": {}, "adapter": {}, "media": {}}
    for name, value in options.walk(vllm_config):
        kind = kind_of(name)
        if kind in found:
            found[kind][name] = _value(name, value)
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    for prefix, config in (("", model), ("speculative_config.draft_", draft)):
        if config is not None:
            found["base"] |= {
                f"{prefix}model_config.hf_config": _digest_of_model(config),
                f"{prefix}model_config.max_model_len": length_of(config),
            }
    found["base"] |= {
        "environment": dict(variables(os.environ)),
        "plugins": plugins(),
    }
    found["media"] |= {name: os.environ[name] for name in MEDIA_VARIABLES if name in os.environ}
    multimodal = model.multimodal_config
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None) if multimodal else None
    if scales is not None:
        found["media"]["scales"] = weights.of_file(Path(scales), weights.FULL)
    quantization = _quantization_file(model)
    if quantization is not None:
        # vLLM reads it only for weights whose own configuration does not say it.
        with contextlib.suppress(OSError):
            found["base"]["quantization_config_file"] = weights.of_file(quantization, weights.FULL)
    texts = {kind: options.text_of(of_kind) for kind, of_kind in found.items()}
    return Options(**texts)


def kind_of(name: str) -> str:
    """`base`, `adapter`, `media`, `resolved` or `harmless`, for an option's dotted name."""
    for prefix, same in SAME.items():
        if name.startswith(f"{prefix}."):
            name = same + name.removeprefix(prefix)
    return _KINDS.get(name, "base")


def length_of(model_config: Any) -> Any:
    """What of `max_model_len` keys and values depend on; None where they do not."""
    config = model_config.hf_config
    length = _length_as_built(model_config)
    said = json.loads(config.to_json_string(use_diff=False))
    text = model_config.hf_text_config
    parts: dict[str, Any] = {}
    if "llama4" in _architecture(config):
        generation = dict(model_config.try_get_generation_config())
        generation.update(model_config.override_generation_config)
        parts["temperature"] = generation.get("attn_temperature_tuning", length > LLAMA4_LENGTH)
    is_foreign = model_config.model_impl == "transformers" or (
        model_config.trust_remote_code and "auto_map" in said
    )
    for rope in set(_rope_types(said)) - ROPE_OF_ANY_LENGTH:
        if rope == "longrope" and not is_foreign:
            original = _original_length(said) or text.max_position_embeddings
            parts["long"] = length > int(original)
        else:
            is_foreign = True
    if is_foreign:
        parts["length"] = length
    return parts or None


def _length_as_built(model_config: Any) -> int:
    """`max_model_len` when the model was built. Of -1 vLLM makes the length that fits into its
    memory, once the model has chosen by the longest one that it allows."""
    if getattr(model_config, "original_max_model_len", None) == -1:
        return int(model_config.get_and_verify_max_len(-1))
    return int(model_config.max_model_len)


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The environment variables that count, where they are set."""
    harmless = {name for names in HARMLESS_VARIABLES.values() for name in names.split()}
    for name, value in sorted(environment.items()):
        is_engines = name.startswith("VLLM_") or name in envs.environment_variables
        is_left_out = name in harmless or options.is_secret(name) or OF_KUBERNETES.search(name)
        if (is_engines or name in OTHER_VARIABLES) and not is_left_out:
            yield name, value


def plugins() -> list[str]:
    """Other packages' code that vLLM runs, and that may patch models."""
    allowed = envs.VLLM_PLUGINS
    found = []
    for group in PLUGINS:
        for entry in importlib.metadata.entry_points(group=group):
            is_vllms = entry.value.startswith("vllm.")
            if not is_vllms and (allowed is None or entry.name in allowed):
                version = entry.dist.version if entry.dist else ""
                found.append(f"{entry.name} {version}")
    return sorted(found)


def _quantization_file(model_config: Any) -> Path | None:
    """A file outside the model's directory that says how weights are quantized as they are
    loaded."""
    overrides = model_config.hf_overrides
    name = overrides.get("quantization_config_file") if isinstance(overrides, Mapping) else None
    return Path(name) if isinstance(name, str) else None


def _value(name: str, value: Any) -> Any:
    """As the text has it: long ones by their digest."""
    said = options.canonical(value)
    return said if len(json.dumps(said)) <= 200 else options.digest_of(said)


def _digest_of_model(model_config: Any) -> str:
    # It has no secrets, and fields such as `num_experts_per_token`.
    text = json.dumps(_of_model(model_config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _of_model(model_config: Any) -> Any:
    """The configuration that the model is built from; what equals its class's default is left out,
    as in a file of it."""
    hf_config = model_config.hf_config
    left_out = set(NOT_OF_THE_NUMBERS)
    if model_config.model_impl != "transformers":
        architecture = _architecture(hf_config)
        left_out |= {key for part, key in WRITTEN_BY_MODELS.items() if part in architecture}
    return _without(json.loads(hf_config.to_json_string(use_diff=True)), left_out)


def _architecture(hf_config: Any) -> str:
    return " ".join(map(str, getattr(hf_config, "architectures", None) or ())).lower()


def _without(value: Any, left_out: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, left_out) for key, one in value.items() if key not in left_out}
    return [_without(one, left_out) for one in value] if isinstance(value, list) else value


def _rope_types(value: Any, *, in_rope: bool = False) -> Iterator[str]:
    """The kinds of RoPE that a configuration names, wherever it does."""
    if isinstance(value, dict):
        for name in ("rope_type", "type") if in_rope else ():
            if isinstance(value.get(name), str):
                yield value[name]
        for name, one in value.items():
            yield from _rope_types(one, in_rope=in_rope or name.startswith("rope_"))


def _original_length(value: Any) -> int | None:
    """The length that a model with LongRoPE was trained at."""
    if isinstance(value, dict):
        found = value.get("original_max_position_embeddings")
        if isinstance(found, int):
            return found
        return next(filter(None, map(_original_length, value.values())), None)
    return None


def _kinds() -> dict[str, str]:
    kinds: dict[str, str] = {}
    for kind, table in (("adapter", UNDER_ADAPTERS), ("media", FOR_MEDIA), ("resolved", RESOLVED)):
        for section, listed in table.items():
            kinds |= {f"{section}.{name}": kind for name in listed.split()}
    for section, reasons in HARMLESS.items():
        prefix = f"{section}." if section else ""
        for listed in reasons.values():
            kinds |= {f"{prefix}{name}": "harmless" for name in listed.split()}
    return kinds


_KINDS = _kinds()
