"""What may be given to a prefix cache: one sequence of tokens, and nothing else that counts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from kvdepot.transformers.refusal import refused

# Arguments of `generate` that are no options of GenerationConfig, and that no key depends on.
HARMLESS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
}
# Ways to generate that reorder a cache, take tokens back from it or keep another one: the options,
# and their values that mean one sequence, token by token.
WAYS = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "cache_implementation": (None,),
    "use_cache": (None, True),
    "token_healing": (None, False),
    # It begins at the first token whatever the cache holds.
    "prefill_chunk_size": (None,),
}


def tokens_of(input_ids: Any) -> list[int]:
    """The tokens of (tokens,) or (1, tokens)."""
    if not isinstance(input_ids, torch.Tensor):
        input_ids = torch.tensor(input_ids)
    shape = tuple(input_ids.shape)
    if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[0] != 1):
        allowed = "(tokens,) or (1, tokens): one sequence without padding, and at least one token"
        raise refused("input_ids.shape", shape, allowed)
    if input_ids.is_floating_point():
        raise refused("input_ids.dtype", input_ids.dtype, "integers")
    tokens: list[int] = input_ids.flatten().tolist()
    wrong = next((token for token in tokens if not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise refused("input_ids", f"{wrong}, one of them", "tokens from 0 to 2^32 - 1")
    return tokens


def check_generate(model: Any, tokens: int, kwargs: dict[str, Any]) -> None:
    """Refuse what keys and values would depend on, or that leaves a cache of something else."""
    options = vars(GenerationConfig()).keys()
    for name in kwargs:
        if name not in options and name not in HARMLESS:
            raise refused("generate's argument", repr(name), "options, and those beside tokens")
    # What one does not say the next one does.
    configs = (kwargs.get("generation_config"), model.generation_config)
    for name, allowed in WAYS.items():
        said = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        value = next((one for one in said if one is not None), None)
        if value not in allowed:
            raise refused(name, repr(value), " or ".join(map(repr, allowed)))
    mask = kwargs.get("attention_mask")
    if mask is not None and (mask.numel() != tokens or not bool((mask == 1).all())):
        shape = f"of {tuple(mask.shape)} with {int((mask == 1).sum())} ones"
        raise refused("attention_mask", shape, f"{tokens} ones: prompts without padding")
