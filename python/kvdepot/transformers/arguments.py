"""What may be given to a prefix cache: one sequence of tokens, and nothing else that counts."""

from __future__ import annotations

from collections.abc import Mapping
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


ONE_SEQUENCE = "(tokens,) or (1, tokens): one sequence without padding, and at least one token"


def tokens_of(input_ids: Any) -> list[int]:
    """The tokens of (tokens,) or (1, tokens), or of what a tokenizer returns: a mapping with
    `input_ids`, and perhaps with the mask of a sequence without padding."""
    if isinstance(input_ids, Mapping):
        return _tokens_of_encoding(input_ids)
    tensor = _tensor_of("input_ids", input_ids)
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[0] != 1):
        raise refused("input_ids.shape", shape, ONE_SEQUENCE)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise refused("input_ids.dtype", tensor.dtype, "integers")
    tokens: list[int] = tensor.flatten().tolist()
    wrong = next((token for token in tokens if not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise refused("input_ids", f"a sequence with {wrong}", "token IDs from 0 to 2^32 - 1")
    return tokens


def _tokens_of_encoding(encoding: Mapping[str, Any]) -> list[int]:
    """The tokens of a `BatchEncoding`, or of a dict with the same names."""
    names = {"input_ids", "attention_mask"}
    if "input_ids" not in encoding or encoding.keys() - names:
        held = ", ".join(map(repr, encoding)) or "nothing"
        raise refused("input_ids", f"a mapping with {held}", " and ".join(sorted(names)))
    tokens = tokens_of(encoding["input_ids"])
    check_mask(encoding.get("attention_mask"), len(tokens))
    return tokens


def _tensor_of(field: str, value: Any) -> torch.Tensor:
    """The tensor of nested lists; lists of several lengths and text are none."""
    if isinstance(value, (str, bytes)):
        raise refused(field, f"text ({value[:20]!r})", "token IDs, as a tokenizer returns them")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        value = f"a {type(value).__name__} that is not a tensor of integers ({error})"
        raise refused(field, value, ONE_SEQUENCE) from error


def check_mask(mask: Any, tokens: int) -> None:
    """Refuse a mask that leaves out tokens."""
    if mask is None:
        return
    mask = _tensor_of("attention_mask", mask)
    if mask.numel() != tokens or not bool((mask == 1).all()):
        shape = f"of {tuple(mask.shape)} with {int((mask == 1).sum())} ones"
        raise refused("attention_mask", shape, f"{tokens} ones (prompts without padding)")


def check_generate(model: Any, tokens: int, kwargs: dict[str, Any]) -> None:
    """Refuse what keys and values would depend on, or that leaves a cache of something else."""
    options = vars(GenerationConfig()).keys()
    for name in kwargs:
        if name not in options and name not in HARMLESS:
            raise refused(
                "generate's argument", repr(name), "generation options and inputs that are tokens"
            )
    # What one does not say the next one does.
    configs = (kwargs.get("generation_config"), model.generation_config)
    for name, allowed in WAYS.items():
        said = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        value = next((one for one in said if one is not None), None)
        if value not in allowed:
            raise refused(name, repr(value), " or ".join(map(repr, allowed)))
    check_mask(kwargs.get("attention_mask"), tokens)
