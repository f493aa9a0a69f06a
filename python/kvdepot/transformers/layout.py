"""How a cache's tensors lie in pieces and objects of a session.

A piece of n tokens is, for each layer that attends to all tokens, in the model's order, the keys
and then the values, each as contiguous [heads, n, head_dim] of the model's dtype.

A layer with a sliding window keeps no rows of earlier tokens, and what it has is of use at one
count of tokens only. So its state is not in the pieces: each session has one object, "windows",
with the keys and then the values of each such layer, as [heads, min(tokens, window - 1), head_dim].

Where every layer has a window a piece is one zero byte a token, since no piece is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvdepot.transformers.refusal import refused

WINDOWS = "windows"
"""The object with the state of all sliding windows."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALLOWED_LAYERS = "DynamicLayer, DynamicSlidingWindowLayer"
ALLOWED_DTYPES = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)


@dataclass(frozen=True)
class LayerLayout:
    """One layer: shapes of its keys and values as (heads, head_dim), and its window in tokens."""

    index: int
    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None

    def rows(self, tokens: int) -> int:
        """Rows that it has behind so many tokens."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def elements(self, rows: int) -> int:
        """Elements of so many rows."""
        return rows * sum(heads * dim for heads, dim in (self.keys, self.values))


@dataclass(frozen=True)
class Layout:
    """A model's layers, those that have a state."""

    layers: tuple[LayerLayout, ...]
    dtype: torch.dtype

    @classmethod
    def of_model(cls, model: Any) -> Layout:
        """What the model's own cache has after one token: configurations name it in many ways."""
        if model.dtype not in DTYPES:
            raise refused("model.dtype", model.dtype, ALLOWED_DTYPES)
        cache = DynamicCache(config=model.config)
        check_kinds(cache)
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(token, attention_mask=torch.ones_like(token), past_key_values=cache)
        check_kinds(cache)
        layers = []
        for index, layer in enumerate(cache.layers):
            # Layers that use the keys and values of an earlier one have none.
            if not layer.is_initialized:
                continue
            window = getattr(layer, "sliding_window", None)
            if window is not None and window < 2:
                raise refused(f"cache.layers[{index}].sliding_window", window, "2 or more tokens")
            keys, values = (
                (tensor.shape[1], tensor.shape[3]) for tensor in (layer.keys, layer.values)
            )
            layers.append(LayerLayout(index, keys, values, window))
            _check_dtype(f"cache.layers[{index}]", layer, model.dtype)
        if not layers:
            raise refused("model", f"{type(model).__name__}, which has no cache", "decoder models")
        return cls(tuple(layers), model.dtype)

    @property
    def full(self) -> tuple[LayerLayout, ...]:
        """Layers that attend to all tokens."""
        return tuple(layer for layer in self.layers if layer.window is None)

    @property
    def windowed(self) -> tuple[LayerLayout, ...]:
        """Layers with a sliding window."""
        return tuple(layer for layer in self.layers if layer.window is not None)

    def describe(self) -> str:
        """What enters the key."""
        each = [f"{one.index}:{one.keys}:{one.values}:{one.window}" for one in self.layers]
        return "transformers 1 " + " ".join(each)

    def piece_bytes(self, tokens: int) -> int:
        """Bytes of a piece of so many tokens."""
        return self._bytes(sum(layer.elements(tokens) for layer in self.full)) or tokens

    def windows_bytes(self, tokens: int) -> int:
        """Bytes of the windows behind so many tokens; 0 where no layer has one."""
        return self._bytes(sum(one.elements(one.rows(tokens)) for one in self.windowed))

    def check(self, cache: Any, tokens: int) -> None:
        """Refuse a cache of `tokens` tokens, of kinds that are handled, of another model."""
        for layer in self.layers:
            field = f"cache.layers[{layer.index}]"
            if layer.index >= len(cache.layers) or not cache.layers[layer.index].is_initialized:
                raise refused(field, "empty", f"{tokens} tokens")
            holds = cache.layers[layer.index]
            _check_dtype(field, holds, self.dtype)
            least = layer.rows(tokens)
            for name, (heads, dim) in (("keys", layer.keys), ("values", layer.values)):
                shape = tuple(getattr(holds, name).shape)
                fits = shape[2] == least or (layer.window is not None and shape[2] > least)
                if (*shape[:2], shape[3]) != (1, heads, dim) or not fits:
                    raise refused(f"{field}.{name}.shape", shape, f"(1, {heads}, {least}, {dim})")

    def piece_of(self, cache: Any, first: int, end: int) -> torch.Tensor:
        """The bytes of tokens from `first` to behind the last, on the CPU."""
        piece = torch.zeros(self.piece_bytes(end - first), dtype=torch.uint8)
        for layer in self.full:
            holds = cache.layers[layer.index]
            keys, values = self._places(piece, layer, end - first)
            keys.copy_(holds.keys[0, :, first:end])
            values.copy_(holds.values[0, :, first:end])
        return piece

    def windows_of(self, cache: Any, tokens: int) -> torch.Tensor:
        """The bytes of the windows behind all of its tokens, on the CPU."""
        windows = torch.empty(self.windows_bytes(tokens), dtype=torch.uint8)
        for layer, keys, values in self._cut_windows(windows, tokens):
            holds = cache.layers[layer.index]
            keys.copy_(holds.keys[0, :, holds.keys.shape[2] - layer.rows(tokens) :])
            values.copy_(holds.values[0, :, holds.values.shape[2] - layer.rows(tokens) :])
        return windows

    def cache_of(
        self,
        config: Any,
        pieces: list[tuple[int, int, torch.Tensor]],
        windows: torch.Tensor,
        device: Any,
    ) -> DynamicCache:
        """The cache of these pieces, each first token, the one behind the last, bytes, and windows;
        its tensors are its own."""
        cache = DynamicCache(config=config)
        tokens = pieces[-1][1]
        for layer in self.full:
            keys = torch.empty((1, layer.keys[0], tokens, layer.keys[1]), dtype=self.dtype)
            values = torch.empty((1, layer.values[0], tokens, layer.values[1]), dtype=self.dtype)
            for first, end, piece in pieces:
                piece_keys, piece_values = self._places(piece, layer, end - first)
                keys[0, :, first:end] = piece_keys
                values[0, :, first:end] = piece_values
            _fill(cache.layers[layer.index], keys.to(device), values.to(device), tokens)
        for layer, keys, values in self._cut_windows(windows, tokens):
            # Copies, so that the whole object does not live as long as a layer of it.
            keys, values = (one[None].to(device, copy=True) for one in (keys, values))
            _fill(cache.layers[layer.index], keys, values, tokens)
        return cache

    def _bytes(self, elements: int) -> int:
        size: int = self.dtype.itemsize
        return elements * size

    def _places(
        self, piece: torch.Tensor, layer: LayerLayout, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = sum(one.elements(rows) for one in self.full if one.index < layer.index)
        return _views(piece.view(self.dtype), before, layer, rows)

    def _cut_windows(
        self, windows: torch.Tensor, tokens: int
    ) -> Iterator[tuple[LayerLayout, torch.Tensor, torch.Tensor]]:
        at = 0
        for layer in self.windowed:
            rows = layer.rows(tokens)
            yield layer, *_views(windows.view(self.dtype), at, layer, rows)
            at += layer.elements(rows)


def check_kinds(cache: Any) -> None:
    """Refuse caches and layers whose state is not keys and values as the model computed them."""
    if type(cache).__name__ == "QuantizedCache":
        raise refused(
            "cache",
            "a QuantizedCache",
            "a DynamicCache (quantized values change when the cache is cut or extended)",
        )
    if type(cache) is not DynamicCache:
        raise refused("cache", f"a {type(cache).__name__}", "a DynamicCache")
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise refused(f"cache.layers[{index}]", f"a {type(layer).__name__}", ALLOWED_LAYERS)


def _check_dtype(field: str, layer: Any, dtype: torch.dtype) -> None:
    for name in ("keys", "values"):
        found = getattr(layer, name).dtype
        if found != dtype:
            raise refused(f"{field}.{name}.dtype", found, f"{dtype}, the dtype of the model")


def _views(
    flat: torch.Tensor, at: int, layer: LayerLayout, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer that begin at element `at`, as [heads, rows, head_dim]."""
    (key_heads, key_dim), (value_heads, value_dim) = layer.keys, layer.values
    middle, end = at + key_heads * rows * key_dim, at + layer.elements(rows)
    keys = flat[at:middle].view(key_heads, rows, key_dim)
    return keys, flat[middle:end].view(value_heads, rows, value_dim)


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
