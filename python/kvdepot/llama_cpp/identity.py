"""What a sequence state of llama.cpp depends on beside its tokens.

What differs in any of it is never found. The size of the context is not part of it, but for models
that have other RoPE factors for long contexts (longrope): there, on which side of the limit it is.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import llama_cpp

from kvdepot.engine import gguf, weights
from kvdepot.transformers.refusal import refused

# Settings of a context that change keys and values; those that are zero are the model's.
ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
LONG_FACTORS = b"rope_factors_long"
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
# Positions of several numbers, which a cell of the state has beside its own.
ROPE_OF_SEVERAL = (
    llama_cpp.LLAMA_ROPE_TYPE_MROPE,
    llama_cpp.LLAMA_ROPE_TYPE_IMROPE,
    llama_cpp.LLAMA_ROPE_TYPE_VISION,
)


def check_model(llama: Any) -> None:
    """Refuse models whose states are not their tokens' alone."""
    if llama_cpp.llama_model_has_encoder(llama.model):
        raise refused("llama's model", "one with an encoder", "decoder-only models")
    if llama_cpp.llama_model_rope_type(llama.model) in ROPE_OF_SEVERAL:
        raise refused("llama's model", "one with M-RoPE", "models with one position per token")
    if llama.context_params.attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL:
        # A token's rows depend on those behind it: no prompt may go on from another one's.
        raise refused("attention_type", "non-causal", "causal attention")
    if llama.context_params.embeddings:
        raise refused("embedding", True, "False (embedding models have no states to resume from)")


def weights_of(llama: Any, setting: str) -> str:
    """What names the model's weights and the adapter that is on them; `setting` is `sampled`,
    `full` or a text that is added."""
    if not setting:
        raise refused("weights", repr(setting), "'sampled', 'full' or another string")
    mode = weights.mode_of(setting)
    said: list[Any] = [weights.of_file(path, mode) for path in _parts(Path(llama.model_path))]
    if setting not in (weights.SAMPLED, weights.FULL):
        said.append({"named": setting})
    if llama.lora_path:
        adapter = weights.of_file(Path(llama.lora_path), mode)
        said.append({"lora": adapter, "scale": float(llama.lora_scale)})
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def numbers_of(llama: Any) -> str:
    """Whatever else changes keys and values, as one line: versions, RoPE, overrides."""
    context = llama.context_params
    said = {name: getattr(context, name) for name in ROPE}
    said["overrides"] = sorted(f"{k}={v!r}" for k, v in (llama.kv_overrides or {}).items())
    said["rotation"] = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "")
    said["long"] = _is_long(llama)
    # Another version may store its rows in another way: it says so nowhere.
    return f"llama-cpp-python {llama_cpp.__version__} {json.dumps(said, sort_keys=True)}"


def types_of(llama: Any) -> str:
    """The types of keys and values, as ggml numbers them."""
    return f"k{llama.context_params.type_k} v{llama.context_params.type_v}"


def model_of(llama: Any) -> str:
    """The model, for people: its architecture and its name."""
    words = [llama.metadata.get(f"general.{name}", "") for name in ("architecture", "name")]
    return " ".join(word for word in words if word) or "llama.cpp"


def _parts(path: Path) -> list[Path]:
    """The files of a model, which may be split."""
    split = PART.search(path.name)
    if split is None:
        return [path]
    stem = glob.escape(path.name[: split.start()])
    return sorted(path.parent.glob(f"{stem}-?????-of-{split[1]}.gguf"))


def _is_long(llama: Any) -> bool | None:
    """Whether the context is one for which a model has other factors; None where it has none."""
    if not any(_names_long_factors(path) for path in _parts(Path(llama.model_path))):
        return None
    architecture = llama.metadata.get("general.architecture", "")
    names = ("rope.scaling.original_context_length", "context_length")
    values = [llama.metadata.get(f"{architecture}.{name}") for name in names]
    limit = next((int(value) for value in values if value is not None), 0)
    return bool(llama.n_ctx() > limit)


def _names_long_factors(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            _, tensors = gguf.read_file(file.fileno())
        except ValueError:
            return True  # which is told apart where it need not be
    return any(tensor.name.startswith(LONG_FACTORS) for tensor in tensors)
