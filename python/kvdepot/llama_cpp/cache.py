"""Cache of states for `Llama.set_cache`."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Sequence as Tokens
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState

import kvdepot
import kvdepot.sessions
from kvdepot.engine.weights import SAMPLED
from kvdepot.llama_cpp.costs import FADING, Costs
from kvdepot.llama_cpp.states import PIECE_TOKENS, TRIES, Snapshot, States
from kvdepot.llama_cpp.writer import Writer

logger = logging.getLogger("kvdepot.llama_cpp")

# What others have saved is looked for in at most this part of the time.
REFRESH_SHARE = 1 / 20
MIN_TOKENS = 32
# Of a prompt, the ends of so many turns are stored where a state cannot be cut.
TURNS = 2
# A template puts no more tokens in front of an answer.
ANSWER_HEAD_TOKENS = 16
WAITING_BYTES = 1 << 30


class KvdepotCache(llama_cpp.BaseLlamaCache):
    """States of a Llama's conversations in a depot.

    `cache[tokens]` loads the longest stored prefix into the Llama. `cache[tokens] = state` stores
    the new part of the Llama's own state, in the background. If the depot fails, completions
    continue and a warning is logged.

    Args:
        llama: A `llama_cpp.Llama`.
        depot: An open depot.
        piece_tokens: Tokens per piece, the unit that conversations share, at least 1.
        min_tokens: Shortest prompt to store or load, in tokens.
        weights: Identification of the weights, as in `States`.
        salt: Name of anything else that changes states, as in `States`.
        background: Write states in a thread. With False a completion ends when its state is stored.
        waiting_bytes: Most bytes of temporary files with states that wait to be written, or one
            state.

    Raises:
        kvdepot.InputError: The states of the model are not supported.

    Example:
        cache = KvdepotCache(llama, depot)
        cache.attach()
    """

    def __init__(
        self,
        llama: Any,
        depot: kvdepot.Depot,
        *,
        piece_tokens: int = PIECE_TOKENS,
        min_tokens: int = MIN_TOKENS,
        weights: str = SAMPLED,
        salt: str | None = None,
        background: bool = True,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        super().__init__()
        self.states = States(
            llama,
            depot,
            piece_tokens=piece_tokens,
            min_tokens=min_tokens,
            weights=weights,
            salt=salt,
        )
        self._llama, self._depot = llama, depot
        self.costs = Costs(llama)
        """Estimates for the choice between loading and computing."""
        self._writer = Writer(self._write, waiting_bytes)
        self._background = background
        self._closed = False
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._refreshed = (0.0, 0.0)
        atexit.register(_close, weakref.ref(self))

    def attach(self) -> KvdepotCache:
        """Sets this cache as the cache of the Llama.

        Compared with `llama.set_cache(cache)`, completions skip the copy of `Llama.save_state`,
        which this cache does not need.

        Returns:
            The cache.
        """
        save_state = self._llama.save_state

        def spared() -> LlamaState:
            if sys._getframe(1).f_code is _COMPLETION:
                return self._mark(self._llama.n_tokens)
            state: LlamaState = save_state()
            return state

        self._llama.save_state = spared
        self._llama.set_cache(self)
        return self

    def __getitem__(self, key: Tokens[int]) -> LlamaState:
        """Loads the longest stored prefix into the Llama, unless the Llama already has more.

        Args:
            key: Tokens of the prompt.

        Returns:
            The tokens that the Llama has now, without a state.

        Raises:
            KeyError: The Llama has no prefix of the prompt.
        """
        tokens = list(key)
        if self._closed or not tokens:
            raise KeyError("no state was found: the prompt is empty, or the cache is closed")
        live = self._live(tokens)
        try:
            loaded = self._load(tokens, live)
            cached = loaded or live
        except Exception as error:
            self._fail("cannot load a stored state; computing the prompt", error)
            loaded, cached = 0, self._live(tokens)
        with self._lock:
            self._counts["prompts"] += 1
            self._counts["hits"] += loaded > 0
            self._counts["cached_tokens"] += loaded
            self._counts["last_cached_tokens"] = loaded
        if not self.states.sequence.can_be_cut:
            self._checkpoint(tokens, cached)
        if cached == 0:
            raise KeyError("no state of this prompt is stored")
        return self._mark(self._llama.n_tokens)

    def __setitem__(self, key: Tokens[int], value: Any) -> None:
        """Stores the new part of the Llama's own state.

        Args:
            key: Tokens of the conversation.
            value: State that was made of it; another number of tokens is not stored.
        """
        if self._closed:
            return
        if value.n_tokens != self._llama.n_tokens:
            logger.warning(
                "a state of %d tokens was not stored: the model now has %d tokens",
                value.n_tokens,
                self._llama.n_tokens,
            )
            return
        self.save("continued")

    def __contains__(self, key: Tokens[int]) -> bool:
        """Returns true if a prefix of these tokens is stored."""
        try:
            return not self._closed and self.states.find(list(key)) is not None
        except kvdepot.Error as error:
            self._fail("cannot look up a stored state; treating it as a miss", error)
            return False

    @property
    def cache_size(self) -> int:
        """Bytes in the last tier of the depot, from all writers."""
        return self._farthest("used_bytes")

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the last tier of the depot, in bytes."""
        return self._farthest("capacity_bytes")

    @capacity_bytes.setter
    def capacity_bytes(self, value: int) -> None:
        """Ignored: llama-cpp-python sets it for its own caches."""

    def save(self, reason: str = "asked") -> None:
        """Stores the new part of the Llama's present state, for example of an abandoned completion.

        Args:
            reason: One of `kvdepot.sessions.REASONS`.
        """
        try:
            snapshot = self.states.snapshot(reason=reason)
            if snapshot is not None and self._background:
                self._writer.put(snapshot)
            elif snapshot is not None:
                self._write(snapshot)
        except Exception as error:
            self._fail("cannot store the state of a prompt", error)

    def flush(self) -> None:
        """Waits until all pending states are written."""
        self._writer.flush()

    def close(self) -> None:
        """Writes all pending states and detaches the cache from the Llama. The depot stays open."""
        self._closed = True
        self._writer.close()
        if self._llama.cache is self:
            self._llama.set_cache(None)
            self._llama.__dict__.pop("save_state", None)

    def statistics(self) -> dict[str, int]:
        """Returns counts since the cache was created.

        Returns:
            A dictionary: `prompts`, and `hits` of them; `cached_tokens` that were loaded and
            `cache_write_tokens` that were written; `bytes_written`; `last_cached_tokens` and
            `last_cache_write_tokens` of the last prompt and save; `failed` uses of the depot;
            `dropped` states beyond `waiting_bytes`; `waiting_bytes` now.
        """
        with self._lock:
            counts = dict(self._counts)
        return counts | {
            "dropped": self._writer.dropped,
            "waiting_bytes": self._writer.waiting_bytes,
        }

    def _live(self, tokens: list[int]) -> int:
        """Tokens of a prompt that the Llama has already. A state that must not go on behind them is
        forgotten: llama-cpp-python would, and attend to what is not there."""
        sequence = self.states.sequence
        live = sequence.common(tokens)
        back = live
        if live == len(tokens) and (live < self._llama.n_tokens or self._llama._requires_eval):
            # Its last token is computed once more, for its logits.
            back -= 1
        if not sequence.can_go_back_to(back):
            sequence.forget()
            return 0
        return live

    def _load(self, tokens: list[int], live: int) -> int:
        """Tokens that have come from the depot; 0 where it has not more than the Llama."""
        states = self.states
        if len(tokens) <= live + 1:
            # The last token is computed in any case.
            return 0
        self._writer.wait_for(tokens, live + 1)
        found = states.find(tokens, live + 2)
        missing = len(tokens) - 1 - (len(found.tokens) if found else live)
        compute_s = self.costs.compute_s(missing) if 2 * missing < len(tokens) else None
        if missing > 0 and self._refresh(compute_s):
            found = states.find(tokens, live + 2)
        for _ in range(TRIES):
            if found is None:
                return 0
            count, nbytes = len(found.tokens), _bytes_of(found)
            # To compute most of it by mistake costs more than any load: costs decide on less.
            if 2 * live > count and not self.costs.pays(nbytes, count - live):
                return 0
            begin = time.monotonic()
            if states.load(found):
                self.costs.loaded(nbytes, time.monotonic() - begin)
                return count
            # What was there before may be gone.
            live = self._live(tokens)
            found = states.find(tokens, live + 2)
        return 0

    def _refresh(self, compute_s: float | None) -> bool:
        """Look what others have saved, unless that was done just now, or takes longer than to
        compute what is missing."""
        last, took = self._refreshed
        now = time.monotonic()
        if now - last < took / REFRESH_SHARE:
            return False
        if compute_s is not None and compute_s < took:
            self._refreshed = (last, took * FADING)
            return False
        self.states.store.refresh()
        end = time.monotonic()
        self._refreshed = (end, end - now)
        return True

    def _checkpoint(self, tokens: list[int], cached: int) -> None:
        """Compute a prompt but for its last token and store that: the next turn may begin with just
        this, whatever its answer was, and a state that cannot be cut is of use at its end alone.
        The ends of turns inside are stored too: an edited message goes on from the one before."""
        llama = self._llama
        if len(tokens) - 1 - cached < self.states.min_tokens:
            return
        if cached < llama.n_tokens:
            # What is cut off goes first; `_live` has seen that it may.
            llama.n_tokens = cached
        if cached == 0:
            self.states.sequence.forget()
        for end in [*self._ends_of_turns(tokens, cached), len(tokens) - 1]:
            llama.eval(tokens[llama.n_tokens : end])
            self.save("cold" if cached == 0 else "continued")

    def _ends_of_turns(self, tokens: list[int], cached: int) -> list[int]:
        """The ends of the last two turns behind what is cached: as chat templates have it, of the
        last message, unless the answer is to follow it, and of the message before."""
        vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        marks = {token for token in set(tokens) if llama_cpp.llama_vocab_is_eog(vocab, token)}
        ends = [at + 1 for at, token in enumerate(tokens) if token in marks][-TURNS:]
        kept: list[int] = []
        for end in ends:
            before = kept[-1] if kept else cached
            is_far = end - before >= self.states.min_tokens
            if is_far and len(tokens) - end > ANSWER_HEAD_TOKENS:
                kept.append(end)
        return kept

    def _write(self, snapshot: Snapshot) -> None:
        try:
            saved = self.states.write(snapshot)
        except Exception as error:
            self._fail(f"cannot store a state of {len(snapshot.tokens)} tokens", error)
            return
        with self._lock:
            self._counts["saves"] += 1
            for name in ("cache_write_tokens", "bytes_written"):
                self._counts[name] += saved[name]
            self._counts["last_cache_write_tokens"] = saved["cache_write_tokens"]

    def _fail(self, what: str, error: Exception) -> None:
        with self._lock:
            self._counts["failed"] += 1
        known = isinstance(error, (kvdepot.Error, OSError, MemoryError))
        logger.warning("%s: %r", what, error, exc_info=not known)

    def _mark(self, count: int) -> LlamaState:
        """A state that names its first tokens, and holds nothing else."""
        llama = self._llama
        return LlamaState(
            input_ids=llama.input_ids[:count].copy(),
            scores=np.empty((0, llama.n_vocab()), np.single),
            n_tokens=count,
            llama_state=b"",
            llama_state_size=0,
            seed=llama._seed,
        )

    def _farthest(self, name: str) -> int:
        tiers = list(self._depot.stats()["tiers"].values())
        return int(tiers[-1][name]) if tiers else 0  # type: ignore[literal-required]


COUNTS = (
    "prompts",
    "hits",
    "saves",
    "cached_tokens",
    "cache_write_tokens",
    "bytes_written",
    "last_cached_tokens",
    "last_cache_write_tokens",
    "failed",
)
_COMPLETION = llama_cpp.Llama._create_completion.__code__


def _bytes_of(found: kvdepot.sessions.Found) -> int:
    pieces = sum(size for _, _, size in found.pieces)
    return pieces + sum(size for _, size in found.objects)


def _close(cache: weakref.ref[KvdepotCache]) -> None:
    if (alive := cache()) is not None:
        alive.close()
