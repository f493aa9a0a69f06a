"""Prefix cache: prompts that were computed are stored, and read instead of computed again."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

import kvdepot
import kvdepot.sessions
from kvdepot._beginnings import best
from kvdepot.transformers.arguments import check_generate, tokens_of
from kvdepot.transformers.identity import Identity, check_model, config_of
from kvdepot.transformers.layout import WINDOWS, Layout, check_kinds
from kvdepot.transformers.refusal import refused

logger = logging.getLogger("kvdepot.transformers")

# Each try may read all of a session: what does not verify so often is a medium that is lost.
TRIES = 4


class Generated(NamedTuple):
    """Result of `PrefixCache.generate`."""

    output: Any
    """Result of `model.generate`."""
    cached_tokens: int
    """Tokens of the prompt that were read from the depot."""
    cache_write_tokens: int
    """Tokens whose rows were written to the depot."""


class PrefixCache:
    """Keys and values of a model's prompts in a depot, as sessions (docs/sessions.md).

    A prompt is one sequence without padding. docs/design/sessions.md describes the layout of the
    pieces.

    Args:
        depot: An open depot.
        model: A causal language model of transformers, in evaluation mode.
        piece_tokens: Tokens per piece, the unit that prompts share, at least 1.
        weights: Name of the model's weights, or the directory that they were loaded from, of which
            names, headers and samples are read. Default: a hash of all weights, computed once.
        min_tokens: Shortest prompt to store or load, in tokens. Default: `piece_tokens`.

    Raises:
        kvdepot.InputError: The state of the model is not supported. Supported are keys and values
            of full and sliding attention in bfloat16, float16 or float32, on one device.

    Example:
        prefixes = kvdepot.transformers.PrefixCache(depot, model)
        answer = prefixes.generate(input_ids, max_new_tokens=100)
    """

    def __init__(
        self,
        depot: kvdepot.Depot,
        model: Any,
        *,
        piece_tokens: int = 256,
        weights: str | Path | None = None,
        min_tokens: int | None = None,
    ) -> None:
        if piece_tokens < 1:
            raise refused("piece_tokens", piece_tokens, "1 or more")
        check_model(model)
        self._depot, self._model = depot, model
        self._identity = Identity(model, weights)
        self._identity.now()
        self._layout = Layout.of_model(model)
        self._piece_tokens = piece_tokens
        self._min_tokens = piece_tokens if min_tokens is None else max(1, min_tokens)
        self._stores: dict[tuple[str, ...], kvdepot.sessions.Sessions] = {}

    def load(self, input_ids: Any) -> tuple[DynamicCache, int]:
        """Reads the longest stored prefix of a prompt.

        If a stored part fails verification, the next best prefix is used.

        Args:
            input_ids: Token ids of shape (tokens,) or (1, tokens), or the result of a tokenizer.

        Returns:
            A cache for `model` or `model.generate`, and its number of tokens. The last token of the
            prompt is never included, because its logits have to be computed. Without a stored
            prefix, an empty cache and 0.

        Raises:
            kvdepot.Error: The depot cannot be read.
        """
        tokens = tokens_of(input_ids)
        self._follow()
        return self._load(tokens, len(tokens) - 1)

    def save(self, input_ids: Any, cache: Any) -> dict[str, Any]:
        """Stores a cache with its tokens. Only rows that are not stored yet are written.

        Args:
            input_ids: Token ids of shape (tokens,) or (1, tokens). There may be more of them than
                the cache has, such as the last generated token.
            cache: Cache of this model.

        Returns:
            A dictionary: `cached_tokens` that were stored already, `cache_write_tokens`, and
            `bytes_written`. All are 0 for fewer than `min_tokens` tokens.

        Raises:
            kvdepot.InputError: The cache is of another model, or its kind is not supported.
            kvdepot.Error: A part was not stored, for example for lack of space.
        """
        tokens = tokens_of(input_ids)
        self._follow()
        check_kinds(cache)
        count = cache.get_seq_length()
        if not 0 < count <= len(tokens):
            raise refused(
                "cache", f"of {count} tokens", f"1 to {len(tokens)}, the number in input_ids"
            )
        self._layout.check(cache, count)
        nothing = {"cached_tokens": 0, "cache_write_tokens": 0, "bytes_written": 0}
        if count < self._min_tokens:
            return nothing
        objects = {}
        if self._layout.windowed:
            objects[WINDOWS] = self._layout.windows_of(cache, count)
        saved = self._store().save(
            tokens[:count],
            lambda runs: [self._layout.piece_of(cache, *run) for run in runs],
            objects=objects,
            context_tokens=getattr(self._model.config, "max_position_embeddings", None) or 0,
        )
        return {
            "cached_tokens": saved["cached_tokens"],
            "cache_write_tokens": saved["cache_write_tokens"],
            "bytes_written": saved["bytes_written"],
        }

    def prefill(self, input_ids: Any) -> tuple[DynamicCache, dict[str, int]]:
        """Computes a prompt from its longest stored prefix, and stores it.

        Use it for a beginning that prompts will share. A model with sliding windows can continue
        only from the end of a stored prompt.

        Args:
            input_ids: Token ids of shape (tokens,) or (1, tokens).

        Returns:
            The cache of all tokens, and a dictionary with `cached_tokens` and `cache_write_tokens`.
        """
        tokens = tokens_of(input_ids)
        cache, cached = self._load_or_none(tokens, len(tokens))
        if cached < len(tokens):
            rest = torch.tensor([tokens[cached:]], device=self._model.device)
            takes = inspect.signature(self._model.forward).parameters
            # Logits of all tokens would be much memory for nothing.
            options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
            with torch.no_grad():
                self._model(rest, past_key_values=cache, use_cache=True, **options)
        written = self._save_or_not(tokens, cache)
        return cache, {"cached_tokens": cached, "cache_write_tokens": written}

    def generate(self, input_ids: Any, **kwargs: Any) -> Generated:
        """Calls `model.generate` from the longest stored prefix, and stores the result.

        All generated tokens except the last are stored. A model with sliding windows also stores
        the prompt without its last token. If the depot fails, the prompt is computed and a warning
        is logged.

        Args:
            input_ids: Token ids of shape (tokens,) or (1, tokens).
            **kwargs: Arguments of `model.generate`.

        Returns:
            The result of `model.generate`, and the numbers of tokens that were read and written.

        Raises:
            kvdepot.InputError: An argument is not supported: padding, several sequences, methods
                that remove tokens, or an argument other than the tokens that changes keys and
                values.
        """
        tokens = tokens_of(input_ids)
        check_generate(self._model, len(tokens), kwargs)
        written = 0
        if self._layout.windowed and len(tokens) > 1:
            cache, said = self.prefill(tokens[:-1])
            cached, written = said.values()
        else:
            cache, cached = self._load_or_none(tokens, len(tokens) - 1)
        prompt = torch.tensor([tokens], device=self._model.device)
        # Without a mask, generate would take the padding token in a prompt for padding.
        kwargs |= {"attention_mask": torch.ones_like(prompt), "past_key_values": cache}
        output = self._model.generate(prompt, **kwargs)
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        return Generated(output, cached, written + self._save_or_not(sequence, cache))

    def _store(self) -> kvdepot.sessions.Sessions:
        """The sessions of the weights and adapters that the model has now."""
        weights, adapters = self._identity.now()
        dtype = str(self._layout.dtype).removeprefix("torch.")
        now = (weights, adapters, dtype)
        if now not in self._stores:
            self._stores[now] = kvdepot.sessions.open(
                self._depot,
                model=config_of(self._model),
                dtype=dtype,
                piece_tokens=self._piece_tokens,
                weights=weights,
                layout=self._layout.describe(),
                salt=adapters or None,
            )
        return self._stores[now]

    def _load(self, tokens: list[int], most: int) -> tuple[DynamicCache, int]:
        """The stored beginning of a prompt, of at most so many of its tokens."""
        store = self._store()
        # Other processes may have stored some since.
        store.refresh()
        for _ in range(TRIES):
            found = best(
                store,
                tokens,
                most,
                # Nothing of a window can be taken back.
                can_be_cut=not self._layout.windowed,
                min_tokens=self._min_tokens,
                logger=logger,
            )
            if found is None:
                break
            if (cache := self._restore(store, found)) is not None:
                if (over := len(found.tokens) - most) > 0:
                    cache.crop(-over)
                return cache, cache.get_seq_length()
        return DynamicCache(config=self._model.config), 0

    def _restore(
        self, store: kvdepot.sessions.Sessions, found: kvdepot.sessions.Found
    ) -> DynamicCache | None:
        pieces = [
            (first, end, torch.empty(self._layout.piece_bytes(end - first), dtype=torch.uint8))
            for first, end, _ in found.pieces
        ]
        windows = torch.empty(self._layout.windows_bytes(len(found.tokens)), dtype=torch.uint8)
        objects = [windows] if self._layout.windowed else []
        if not store.restore(found, [piece for _, _, piece in pieces], objects)["whole"]:
            return None
        return self._layout.cache_of(self._model.config, pieces, windows, self._model.device)

    def _follow(self) -> None:
        """Takes the type that the model has now: `model.bfloat16()` changes it in place."""
        self._identity.now()
        if self._model.dtype != self._layout.dtype:
            self._layout = Layout.of_model(self._model)

    def _load_or_none(self, tokens: list[int], most: int) -> tuple[DynamicCache, int]:
        # A model that is refused is no fault of the depot's.
        self._follow()
        try:
            return self._load(tokens, most)
        except kvdepot.Error as error:
            logger.warning(
                "cannot load the KV data of the prompt; the model computes the prompt: %s", error
            )
            return DynamicCache(config=self._model.config), 0

    def _save_or_not(self, tokens: Any, cache: DynamicCache) -> int:
        try:
            return int(self.save(tokens, cache)["cache_write_tokens"])
        except kvdepot.Error as error:
            logger.warning("the prompt was not stored: %s", error)
            return 0
