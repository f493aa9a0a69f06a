"""kvdepot for Hugging Face transformers: a prompt continues from its longest stored prefix.

docs/engines/transformers.md has the guarantees. torch and transformers are imported on the first
use of a class of this package.

Example:
    prefixes = kvdepot.transformers.PrefixCache(depot, model)
    answer = prefixes.generate(input_ids, max_new_tokens=100)
    answer.output, answer.cached_tokens, answer.cache_write_tokens
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Generated": "kvdepot.transformers.prefix",
    "PrefixCache": "kvdepot.transformers.prefix",
}

__all__ = ["Generated", "PrefixCache"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
