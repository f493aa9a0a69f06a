"""Models with what drafts for them: EAGLE heads and multi-token prediction (MTP) layers, of random
weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from identity import models

# The target generates these tokens only, so that random drafts are right once in a while, and how
# often shows what a draft was computed from.
LIKELY = range(10, 14)
AUX_LAYERS = [1, 2, 3]


def target(directory: Path) -> Path:
    """A Llama of four layers that generates few tokens."""
    return _rewrite(models.llama(directory, num_hidden_layers=4), _few_tokens)


def eagle(directory: Path, *, seed: int = 0) -> Path:
    """A head of EAGLE: one layer, which reads the target's last hidden state."""

    def head(tensors: dict[str, Any]) -> dict[str, Any]:
        kept = _layer(tensors, 0, "layers.0.")
        del kept["layers.0.input_layernorm.weight"]
        hidden = models.SHAPE["hidden_size"]
        return kept | {"fc.weight": _random(hidden, 2 * hidden, seed)}

    return _rewrite(models.llama(directory, seed=seed, num_hidden_layers=1), head)


def eagle3(directory: Path, *, seed: int = 0) -> Path:
    """A head of EAGLE-3: one layer, which reads the hidden states between the target's layers."""
    import torch

    hidden = models.SHAPE["hidden_size"]

    def head(tensors: dict[str, Any]) -> dict[str, Any]:
        kept = _few_tokens({"lm_head.weight": tensors["lm_head.weight"]})
        kept |= _layer(tensors, 0, "midlayer.")
        for number, name in enumerate("qkv"):
            weight = f"midlayer.self_attn.{name}_proj.weight"
            kept[weight] = _random(len(kept[weight]), 2 * hidden, seed + number)
        kept["midlayer.hidden_norm.weight"] = torch.ones(hidden)
        kept["norm.weight"] = torch.ones(hidden)
        return kept | {"fc.weight": _random(hidden, len(AUX_LAYERS) * hidden, seed)}

    made = models.llama(directory, seed=seed, num_hidden_layers=1)
    _configure(
        made,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=models.VOCABULARY,
        eagle_config={"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
    )
    return _rewrite(made, head)


def mtp(directory: Path) -> Path:
    """A MiMo, which is a Qwen2 with a layer that predicts the token after the next one."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden = models.SHAPE["hidden_size"]

    def with_layer(tensors: dict[str, Any]) -> dict[str, Any]:
        last = models.SHAPE["num_hidden_layers"]
        prefix = "model.mtp_layers.0."
        extra = _layer(tensors, last, prefix)
        kept = {name: one for name, one in tensors.items() if f"layers.{last}." not in name}
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            extra[f"{prefix}{norm}.weight"] = torch.ones(hidden)
        extra[f"{prefix}input_proj.weight"] = _random(hidden, 2 * hidden, 0)
        return _few_tokens(kept) | extra

    layers = models.SHAPE["num_hidden_layers"]
    config = Qwen2Config(**models.SHAPE | {"num_hidden_layers": layers + 1})
    made = models.save(directory, 0, lambda: Qwen2ForCausalLM(config))
    _configure(
        made,
        architectures=["MiMoForCausalLM"],
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_nextn_predict_layers=1,
    )
    return _rewrite(made, with_layer)


def _layer(tensors: dict[str, Any], number: int, prefix: str) -> dict[str, Any]:
    """The tensors of a layer under another prefix."""
    own = f"model.layers.{number}."
    return {
        prefix + name.removeprefix(own): tensor
        for name, tensor in tensors.items()
        if name.startswith(own)
    }


def _few_tokens(tensors: dict[str, Any]) -> dict[str, Any]:
    import torch

    weight = torch.zeros_like(tensors["lm_head.weight"])
    weight[list(LIKELY)] = tensors["lm_head.weight"][list(LIKELY)]
    return tensors | {"lm_head.weight": weight}


def _random(rows: int, columns: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * models.SHAPE["initializer_range"]


def _rewrite(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The model with other tensors."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return directory


def _configure(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
