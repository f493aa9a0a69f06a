"""The server's models, with a cache of states attached to each.

`Llama.set_cache` is llama-cpp-python's own seam, and the states go through it. Around it this
module adds what the seam does not say, or what a server needs beside it:

* how many tokens of a prompt were not computed, whether they came from a depot or were there since
  the request before: only `Llama.eval` sees which are;
* requests whose answer depends on more than a state has are answered without one;
* an answer that nobody waited for is no completion, so the seam is not told of it: what was
  computed of it is stored when the next request comes, which may take its place;
* a model that makes way for another one writes what waits first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import llama_cpp
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.settings import ModelSettings

import kvdepot
from kvdepot.llama_cpp.cache import KvdepotCache
from kvdepot.llama_cpp.server_usage import Note, current

# A chunk of a stream takes less, and all of an answer that is none may take minutes.
END_S = 1.0


def say(line: str) -> None:
    """One line for who runs the server."""
    print(f"kvdepot: {line}", file=sys.stderr, flush=True)


class ServedLlama(llama_cpp.Llama):
    """A Llama with a cache of states. Only made by `serve`, of one that is there."""

    _depot_cache: KvdepotCache
    _note: Note
    _computed: int | None
    """Tokens of the prompt that were computed so far; None behind the prompt."""
    _is_unfinished: bool
    _computing: threading.Lock
    """Held while a chunk of an answer is computed."""

    @classmethod
    def serve(cls, llama: llama_cpp.Llama, cache: KvdepotCache) -> ServedLlama:
        """Attach a cache to a model that the server has loaded."""
        # LlamaProxy makes its models by the name llama_cpp.Llama and knows no other class.
        llama.__class__ = cls
        llama._depot_cache = cache
        llama._note = Note()
        llama._computed = None
        llama._is_unfinished = False
        llama._computing = threading.Lock()
        cache.attach()
        return llama

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._note = current()
        self._keep_unfinished("evict")
        if kwargs.get("echo") and kwargs.get("logprobs") is not None:
            # These are of the prompt's tokens too, and a state has no logits: all is computed.
            self.reset()
            self.set_cache(None)
        else:
            self.set_cache(self._depot_cache)
        return self._watched(super()._create_completion(*args, **kwargs))

    def _watched(self, completion: Iterator[Any]) -> Iterator[Any]:
        self._is_unfinished = True
        # A cache may compute a part of the prompt before `generate` does the rest.
        self._computed = 0
        while True:
            with self._computing:
                chunk = next(completion, None)
            if chunk is None:
                break
            # One that is not streamed has this one chunk, which comes when its state was stored.
            self._is_unfinished = "usage" not in chunk
            yield chunk
        self._is_unfinished = False

    def _keep_unfinished(self, reason: str) -> None:
        if self._is_unfinished and self.n_tokens > 0:
            self._depot_cache.save(reason)
        self._is_unfinished = False

    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Iterator[int]:
        """As before; counts."""
        note = self._note
        note.prompt_tokens = len(tokens)
        for token in super().generate(tokens, *args, **kwargs):
            if self._computed is not None:
                # What did not verify may have been computed twice.
                note.cached_tokens = max(0, len(tokens) - self._computed)
                self._computed = None
            if not llama_cpp.llama_vocab_is_eog(self._model.vocab, token):
                note.completion_tokens += 1
            yield token

    def eval(self, tokens: Any) -> None:
        """As before; counts."""
        if self._computed is not None:
            self._computed += len(tokens)
        super().eval(tokens)

    def close(self) -> None:
        """Write what waits, and free the model."""
        cache = self.__dict__.pop("_depot_cache", None)
        if cache is not None:
            if self._is_unfinished:
                cache.save("shutdown")
            # The request before may have gone without: it is taken off in any case.
            self.set_cache(cache)
            cache.close()
        super().close()

    def finish(self) -> bool:
        """Write what waits, and close. False where a request computes that nobody waits for: then
        the model stays, and what is computed just now is not stored."""
        if self._computing.acquire(timeout=END_S):
            self.close()
            return True
        self._depot_cache.flush()
        return False


class RememberingProxy(LlamaProxy):
    """The models of one server; one is loaded at a time, as llama-cpp-python has it."""

    def __init__(self, models: list[ModelSettings], depot: kvdepot.Depot) -> None:
        self._depot = depot
        self._started = False
        super().__init__(models)
        self._started = True

    # LlamaProxy has it as a function of the class; it calls it as a method.
    def load_llama_from_model_settings(self, settings: ModelSettings) -> llama_cpp.Llama:
        """Load a model and attach a cache of its own: states of other models are never found."""
        llama = LlamaProxy.load_llama_from_model_settings(settings)
        reason = _not_remembered(settings)
        if reason is not None:
            say(f"{settings.model_alias}: kvdepot stores no states of this model: {reason}")
            return llama
        try:
            return ServedLlama.serve(llama, KvdepotCache(llama, self._depot))
        except (kvdepot.Error, ValueError, OSError) as error:
            if not self._started:
                raise  # whoever starts a server that remembers is told that it would not
            say(f"{settings.model_alias}: kvdepot stores no states of this model: {error}")
            return llama

    def statistics(self) -> dict[str, Any]:
        """What the loaded model's cache has done."""
        cache = self._cache()
        return {
            "model": self._current_model_alias,
            "depot": self._depot.description,
            "cache": None if cache is None else cache.statistics(),
        }

    def finish(self) -> bool:
        """Write what waits, and close the model; False as `ServedLlama.finish` has it."""
        llama = self._current_model
        return llama.finish() if isinstance(llama, ServedLlama) else True

    def _cache(self) -> KvdepotCache | None:
        return getattr(self._current_model, "_depot_cache", None)


def _not_remembered(settings: ModelSettings) -> str | None:
    if settings.vocab_only:
        return "--vocab_only: the model computes no states"
    if settings.embedding:
        return "--embedding: embedding models have no states to resume from"
    if settings.clip_model_path is not None:
        # Where an image stood in a prompt the tokens are whatever was there before, so they do
        # not say which image it was.
        return "--clip_model_path: the tokens do not identify images"
    return None
