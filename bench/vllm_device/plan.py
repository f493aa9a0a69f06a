"""What one process of the benchmark measures, and the prompts that all of them ask."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

WARM_TOKENS = 1000
# The first and last ids are special in most vocabularies.
SPECIAL = 16


@dataclass(frozen=True)
class Plan:
    """One process: an engine, and what it is asked."""

    role: str
    """`reference`, `plain`, `stored` (by a connector), `restarted` or `prime` (store, and end)."""
    way: str
    """What the rows call it."""
    model: str
    vocabulary: int
    tokens: list[int]
    concurrency: list[int]
    rounds: int
    ways: list[str] = field(default_factory=list)
    """Of the role `plain`: `computed` and `own`, or one of them."""
    decode_tokens: int = 0
    """Of each prompt that disturbs a stream which decodes; 0 for none."""
    gpu_bytes: int = 0
    max_model_len: int = 0
    batched_tokens: int = 8192
    block_size: int | None = None
    """Tokens of a block of vLLM's own cache; vLLM's default if `None`."""
    transfer: dict[str, Any] | None = None
    """vLLM's `kv_transfer_config`."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """From the command line."""
        return cls(**json.loads(text))


def prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts, the same for a seed: one token more, which an engine computes anyway.

    Those of another length or number have other beginnings.
    """
    dice = numpy.random.default_rng([seed, tokens, count])
    ids = dice.integers(SPECIAL, vocabulary - SPECIAL, (count, tokens + 1))
    return [[int(token) for token in row] for row in ids]
