"""What stored bytes are to LMCache: format, type and shape of a chunk, and its identity.

LMCache keeps these beside its index, in memory. Here a chunk must be readable
after a restart, so they are part of the namespace, and the tokens follow from
the length. The layouts themselves are kept as small blocks beside the chunks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

logger: logging.Logger = init_logger(__name__)

# Which dimension counts tokens; of the other formats it is the first.
_TOKEN_DIMENSION = {MemoryFormat.KV_2LTD: 2, MemoryFormat.KV_2TD: 1}


@dataclass(frozen=True)
class Layout:
    """Format, type and shape of chunks that differ in tokens only."""

    fmt: MemoryFormat
    dtype: torch.dtype
    shape: tuple[int, ...]
    """With 1 where tokens are counted."""
    token_dimension: int

    @classmethod
    def of(cls, fmt: MemoryFormat, dtype: torch.dtype, shape: Iterable[int]) -> Layout:
        """The layout of chunks such as this one."""
        sizes = list(shape)
        dimension = _TOKEN_DIMENSION.get(fmt, 0)
        if fmt is MemoryFormat.KV_MLA_FMT and len(sizes) == 4:
            dimension = 2
        sizes[dimension] = 1
        return cls(fmt, dtype, tuple(sizes), dimension)

    @classmethod
    def of_object(cls, chunk: MemoryObj) -> Layout:
        """The layout of a chunk of one tensor."""
        return cls.of(chunk.get_memory_format(), chunk.get_dtype(), chunk.get_shape())

    @classmethod
    def of_engine(cls, config: Any, metadata: Any) -> Layout:
        """What LMCache's connectors for GPUs store with this configuration: a guess, of use as
        long as nothing was stored."""
        kv_size, layers, _, hidden = metadata.get_shapes(1)[0]
        dtype = metadata.get_dtypes()[0]
        fmt: MemoryFormat
        if config.use_layerwise:
            if metadata.use_mla:
                return cls.of(MemoryFormat.KV_MLA_FMT, dtype, (1, hidden))
            if config.enable_blending:
                return cls.of(MemoryFormat.KV_2TD, dtype, (2, 1, hidden))
            return cls.of(MemoryFormat.KV_T2D, dtype, (1, 2, hidden))
        fmt = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        return cls.of(fmt, dtype, (kv_size, layers, 1, hidden))

    def shape_of(self, length: int) -> torch.Size | None:
        """The shape of a chunk of so many bytes; None when none has that length."""
        token_bytes = self.dtype.itemsize
        for size in self.shape:
            token_bytes *= size
        tokens, rest = divmod(length, token_bytes)
        if rest or not tokens:
            return None
        sizes = list(self.shape)
        sizes[self.token_dimension] = tokens
        return torch.Size(sizes)

    def describe(self) -> str:
        """A text that only this layout has."""
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.fmt.name, dtype, self.shape, self.token_dimension])

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """The layout that `describe` wrote; ValueError, TypeError, KeyError or AttributeError for
        anything else."""
        fmt, dtype, shape, dimension = json.loads(text)
        sizes = tuple(int(size) for size in shape)
        if not 0 <= int(dimension) < len(sizes) or not all(size > 0 for size in sizes):
            raise ValueError(f"{text!r} is not the layout of a chunk")
        found = getattr(torch, str(dtype))
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{text!r} is not the layout of a chunk")
        return cls(MemoryFormat[fmt], found, sizes, int(dimension))

    def key(self) -> bytes:
        """The key under which it is kept."""
        return hashlib.blake2b(self.describe().encode(), digest_size=32).digest()


def block_keys(keys: Iterable[CacheEngineKey]) -> list[bytes]:
    """The depot's keys: all that LMCache's say (model, world, rank, chunk hash, type, layer and
    tags) in 32 bytes."""
    # LMCache's text is the identity of a chunk on its own remote backends too.
    return [hashlib.blake2b(key.to_string().encode(), digest_size=32).digest() for key in keys]


def can_store(key: CacheEngineKey, chunk: MemoryObj) -> bool:
    """Whether the chunk has the form that is stored; a line in the log where it has not."""
    count = len(chunk.get_shapes())
    if count > 1:
        logger.error("%s was not stored: the chunk has %d tensors; allowed: one", key, count)
    elif chunk.metadata.cached_positions is not None:
        logger.error("%s was not stored: kvdepot does not store blended chunks", key)
    else:
        return True
    return False
