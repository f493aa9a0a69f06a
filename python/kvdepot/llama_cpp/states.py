"""Sequence states of a Llama in a depot: saved and restored in pieces.

A state that grows by appending is stored as pieces of its tokens' rows (`kvdepot_session::llama`
says where they lie), so that only what is new is written, and conversations share what they begin
with. What does not grow so, the window or the recurrent state, is an object of each session.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvdepot
import kvdepot.sessions
from kvdepot._beginnings import best
from kvdepot._native import LlamaLayout
from kvdepot.engine.weights import SAMPLED
from kvdepot.llama_cpp import identity
from kvdepot.llama_cpp.scratch import Bytes, scratch
from kvdepot.llama_cpp.sequence import Sequence
from kvdepot.transformers.refusal import refused

logger = logging.getLogger("kvdepot.llama_cpp")

# The object of a session that is not rows: a window, a recurrent state.
REST = "rest"
# Each try may read all of a session: what does not verify so often is a medium that is lost.
TRIES = 4
PIECE_TOKENS = 128
# Sessions that llama.cpp has refused, and that are passed over; the oldest are forgotten.
REFUSED_KEPT = 1024


@dataclass
class Snapshot:
    """New part of a state, in temporary files."""

    tokens: list[int]
    reason: str
    note: str
    context_tokens: int
    rows: Bytes | None = None
    """State of the tokens from `first` on."""
    first: int = 0
    layout: LlamaLayout | None = None
    """Layout of `rows`."""
    rest: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Size of the snapshot in bytes."""
        held = [memory for memory in (self.rows, self.rest) if memory is not None]
        if len(held) == 2 and np.may_share_memory(*held):
            # The rest ends the state of all tokens.
            held.pop()
        return sum(int(memory.nbytes) for memory in held)

    def buffers(self, runs: list[tuple[int, int]]) -> Any:
        """Returns the rows of runs of tokens.

        Args:
            runs: Runs as (first token, one past the last token).

        Returns:
            Memory per run, or one `Spans`.

        Raises:
            KeyError: The snapshot does not have these rows.
        """
        if not runs:
            return []
        if self.rows is None or self.layout is None or runs[0][0] < self.first:
            raise KeyError(runs[0])
        runs = [(first - self.first, end - self.first) for first, end in runs]
        if (spans := spans_of(self.layout, self.rows, runs)) is not None:
            return spans
        sizes = [(end - first) * self.layout.token_bytes for first, end in runs]
        pieces = np.split(scratch(sum(sizes)), np.cumsum(sizes)[:-1])
        for run, piece in zip(runs, pieces, strict=True):
            self.layout.gather(self.rows, *run, piece)
        return pieces


class States:
    """States of one Llama in a depot, for programs that load and save them explicitly.

    A Llama has one sequence. Its calls, and those of this object, must not run at the same time,
    except `write`.

    Args:
        llama: A `llama_cpp.Llama`.
        depot: An open depot.
        piece_tokens: Tokens per piece, the unit that conversations share, at least 1.
        min_tokens: Shortest state to store or load, in tokens, at least 1.
        weights: Identification of the model's file. `sampled` reads the header, and a page of each
            MiB and of each tensor. `full` reads the whole file, once for an unchanged file. Another
            text is added to the samples.
        salt: Name of anything else that changes states and is invisible to kvdepot, such as a
            control vector.

    Raises:
        kvdepot.InputError: The states of the model are not supported.

    Example:
        states = kvdepot.llama_cpp.States(llama, depot)
        states.save()
        cached = states.restore(tokens)
    """

    def __init__(
        self,
        llama: Any,
        depot: kvdepot.Depot,
        *,
        piece_tokens: int = PIECE_TOKENS,
        min_tokens: int = 1,
        weights: str = SAMPLED,
        salt: str | None = None,
    ) -> None:
        if piece_tokens < 1:
            raise refused("piece_tokens", piece_tokens, "1 or more")
        if min_tokens < 1:
            raise refused("min_tokens", min_tokens, "1 or more")
        self.llama = llama
        self.sequence = Sequence(llama)
        self.piece_tokens, self.min_tokens = piece_tokens, min_tokens
        self._refused: deque[str] = deque(maxlen=REFUSED_KEPT)
        layout = self.sequence.layout
        shape = layout.shape if layout is not None else "recurrent"
        self.store = kvdepot.sessions.open(
            depot,
            model=identity.model_of(llama),
            dtype=identity.types_of(llama),
            piece_tokens=piece_tokens,
            weights=identity.weights_of(llama, weights),
            layout=f"llama.cpp 1 {shape} {identity.numbers_of(llama)}",
            salt=salt,
        )

    def save(self, *, reason: str = "asked", note: str = "") -> dict[str, Any]:
        """Stores the Llama's present state. Only rows that are not stored yet are written.

        Args:
            reason: One of `kvdepot.sessions.REASONS`.
            note: Any text.

        Returns:
            A dictionary: `cached_tokens` that were stored already, `cache_write_tokens`, and
            `bytes_written`. All are 0 for fewer than `min_tokens` tokens.

        Raises:
            kvdepot.InputError: The state cannot be split by tokens.
            kvdepot.Error: A part was not stored, for example for lack of space.
        """
        snapshot = self.snapshot(reason=reason, note=note)
        if snapshot is None:
            return {"cached_tokens": 0, "cache_write_tokens": 0, "bytes_written": 0}
        return self.write(snapshot)

    def snapshot(self, *, reason: str = "asked", note: str = "") -> Snapshot | None:
        """Copies the new part of the Llama's present state to temporary files.

        Args:
            reason: One of `kvdepot.sessions.REASONS`.
            note: Any text.

        Returns:
            The snapshot for `write`; None for fewer than `min_tokens` tokens.

        Raises:
            kvdepot.InputError: The state cannot be split by tokens.
            kvdepot.Error: There is no space for the copy.
        """
        tokens = self.sequence.tokens
        if len(tokens) < self.min_tokens:
            return None
        snapshot = Snapshot(tokens, reason, note, self.llama.n_ctx())
        stored = self.store.prefix(tokens)
        if self.sequence.can_be_cut and stored == len(tokens):
            return snapshot
        if self.sequence.is_recurrent:
            snapshot.rest = self.sequence.take()
            return snapshot
        first = stored if stored == len(tokens) else stored - stored % self.piece_tokens
        taken = self.sequence.take_rows(first)
        snapshot.first, snapshot.layout = taken.first, taken.layout
        snapshot.rows, snapshot.rest = taken.state, taken.rest
        return snapshot

    def write(self, snapshot: Snapshot) -> dict[str, Any]:
        """Stores a snapshot. Another thread may call it during other calls.

        Args:
            snapshot: Result of `snapshot`.

        Returns:
            A dictionary, as `save`.

        Raises:
            kvdepot.Error: A part was not stored.
        """

        def rows(runs: list[tuple[int, int]]) -> Any:
            if self.sequence.is_recurrent:
                return [bytes(end - first) for first, end in runs]
            return snapshot.buffers(runs)

        try:
            saved = self.store.save(
                snapshot.tokens,
                rows,
                reason=snapshot.reason,
                note=snapshot.note,
                objects={} if snapshot.rest is None else {REST: snapshot.rest},
                context_tokens=snapshot.context_tokens,
            )
        except KeyError as error:
            raise kvdepot.Error(
                f"the model overwrote tokens {error} during their save; the state is not saved"
            ) from error
        return {
            "cached_tokens": saved["cached_tokens"],
            "cache_write_tokens": saved["cache_write_tokens"],
            "bytes_written": saved["bytes_written"],
        }

    def find(self, tokens: list[int], least: int = 1) -> kvdepot.sessions.Found | None:
        """Returns the session that saves the most computation for a prompt.

        If the state can be split by tokens, the session may cover the whole prompt; its last token
        is then computed again. Otherwise it covers at most all tokens except the last.

        Args:
            tokens: Tokens of the prompt.
            least: Least tokens that the session must cover, in addition to `min_tokens`.

        Returns:
            The session; None if there is none.

        Raises:
            kvdepot.Error: The depot cannot be read.
        """
        tokens = tokens[: self.sequence.room - 1]
        most = len(tokens) if self.sequence.can_be_cut else len(tokens) - 1
        least = max(least, self.min_tokens)
        if most < least:
            return None
        return best(
            self.store,
            tokens,
            most,
            can_be_cut=self.sequence.can_be_cut,
            min_tokens=least,
            logger=logger,
            passed_over=self._refused,
        )

    def restore(self, tokens: list[int]) -> int:
        """Replaces the Llama's state by the longest stored prefix of a prompt.

        If a state fails verification, or llama.cpp rejects it, the next best one is used. With
        sliding windows or recurrent layers, the Llama can continue only after these tokens. It
        cannot detect by itself that an earlier position is invalid.

        Args:
            tokens: Tokens of the prompt.

        Returns:
            The number of tokens that the Llama has now; 0 without a stored prefix.

        Raises:
            kvdepot.Error: The depot cannot be read.
        """
        self.store.refresh()
        for _ in range(TRIES):
            found = self.find(tokens)
            if found is None:
                break
            if self.load(found):
                return len(found.tokens)
        self.sequence.forget()
        return 0

    def load(self, found: kvdepot.sessions.Found) -> bool:
        """Replaces the Llama's state by that of a session.

        Args:
            found: A session from `find`.

        Returns:
            False if the session failed verification, or llama.cpp rejected it. The Llama's state is
            then empty or unchanged, and `find` skips the session.
        """
        tokens = found.tokens
        if len(tokens) >= self.sequence.room:
            return False
        rest_bytes = dict(found.objects).get(REST, 0)
        runs = [(first, end) for first, end, _ in found.pieces]
        layout = self.sequence.layout
        if layout is not None:
            layout = layout.resized(len(tokens), rest_bytes)
        size = rest_bytes if layout is None else layout.state_bytes
        state: Bytes = np.empty(size, np.uint8)
        objects = [state[size - rest_bytes :]] if rest_bytes else []
        if layout is None:
            pieces: Any = [np.empty(end - first, np.uint8) for first, end in runs]
        elif (pieces := spans_of(layout, state, runs)) is None:
            sizes = [(end - first) * layout.token_bytes for first, end in runs]
            pieces = [np.empty(size, np.uint8) for size in sizes]
        if not self.store.restore(found, pieces, objects)["whole"]:
            logger.warning(
                "a stored state of %d tokens is corrupt; computing the prompt", len(tokens)
            )
            return False
        if layout is not None:
            layout.write_head(state)
            if not isinstance(pieces, kvdepot.Spans):
                for run, piece in zip(runs, pieces, strict=True):
                    layout.scatter(piece, *run, state)
        if self.sequence.put(state, tokens):
            return True
        self._refused.append(found.id)
        logger.warning(
            "llama.cpp rejected a stored state of %d tokens; computing the prompt", len(tokens)
        )
        return False


def spans_of(
    layout: LlamaLayout, state: Bytes, runs: list[tuple[int, int]]
) -> kvdepot.Spans | None:
    """Returns the rows of runs of tokens in place, in a state; None for transposed values."""
    if any(units != 1 for _, _, units in layout.tables):
        return None
    base = state.ctypes.data
    tables = [(base + start, row, row) for start, row, _ in layout.tables]
    return kvdepot.Spans(tables, [range(*run) for run in runs], owner=state)
