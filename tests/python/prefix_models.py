"""Small models of transformers with random weights, on the CPU, and prefix caches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvdepot
import torch
import transformers
from kvdepot.transformers import PrefixCache

PIECE = 16
WINDOW = 24
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
HYBRID = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", HYBRID),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
}


def model_of(kind: str, seed: int = 0, dtype: Any = torch.float32, **options: Any) -> Any:
    config, model, own = KINDS[kind]
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**SMALL | own | options)
    return getattr(transformers, model)(made).eval().to(dtype)


def prompt_of(tokens: int, seed: int = 1) -> Any:
    return torch.randint(1, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def open_depot(path: Path) -> kvdepot.Depot:
    posix = {"path": str(path), "capacity": "64MiB"}
    return kvdepot.open("Posix", {"posix": posix, "socket": "off"})


def prefixes_of(depot: kvdepot.Depot, model: Any, **options: Any) -> PrefixCache:
    return PrefixCache(depot, model, **{"piece_tokens": PIECE} | options)


def greedy(model: Any, prompt: Any, tokens: int = 12) -> Any:
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)


def logits(model: Any, tokens: Any, cache: Any = None) -> Any:
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


def same(one: Any, other: Any) -> bool:
    """Prompts computed in other steps are multiplied in other shapes: the last bits differ."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)
