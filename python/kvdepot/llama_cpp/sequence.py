"""The one sequence of a Llama: its tokens, and its state as bytes, by llama.cpp's own functions."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

from kvdepot._native import LlamaLayout
from kvdepot.llama_cpp.identity import check_model
from kvdepot.llama_cpp.scratch import Bytes, scratch
from kvdepot.transformers.refusal import refused

SEQUENCE = 0
ALL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE
# A window's cache, or the recurrent state, without the rows of all tokens.
PART = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
# Enough that a model with several positions a token shows in its second cell.
PROBE_TOKENS = 2
# Rows are copied from here: a sequence that nothing is computed for, empty but within a call.
ASIDE = 1
# In front of a state, and of a part of one: magic and sequence.
FRONT_BYTES = 8
# In front of the cells: these, streams, and tokens.
CELLS_AT = 16
# A cell names its sequences behind its position and their number; one of more than the context has
# by right names none.
CELL_NAME_BYTES = 4
TABLE_HEAD_BYTES = 12


@dataclass
class Rows:
    """Rows of the last tokens of a state, and the part of it that is not rows."""

    first: int
    """The token of the first row."""
    layout: LlamaLayout | None
    """Where the rows lie in `state`, whose first token is `first`; None where there are none."""
    state: Bytes | None
    rest: Bytes | None
    """The window, or the recurrent state."""


class Sequence:
    """A Llama's sequence. Not for several threads at a time, as the Llama is not."""

    def __init__(self, llama: Any) -> None:
        """Look at a model's state: where nothing was computed, two tokens are, and forgotten.

        Raises kvdepot.InputError for models whose states are not handled.
        """
        check_model(llama)
        self.llama = llama
        self.is_recurrent = bool(llama_cpp.llama_model_is_recurrent(llama.model))
        self.layout: LlamaLayout | None = None
        """Where rows lie; None for a model that is recurrent alone, whose state has none."""
        rest_bytes = 0
        if not self.is_recurrent:
            self.layout, self._table_heads = self._look()
            rest_bytes = self.layout.rest_bytes
        self.can_be_cut = not self.is_recurrent and rest_bytes == 0
        """Whether the state at any earlier token can be had from a later one."""

    @property
    def tokens(self) -> list[int]:
        """The tokens that the state is of."""
        tokens: list[int] = self.llama.input_ids[: self.llama.n_tokens].tolist()
        return tokens

    @property
    def room(self) -> int:
        """Tokens that it has room for; llama.cpp rounds what was asked for up."""
        return min(int(self.llama.n_ctx()), len(self.llama.input_ids))

    def common(self, tokens: list[int]) -> int:
        """How many of these the sequence begins with."""
        most = min(len(tokens), self.llama.n_tokens)
        if most == 0:
            return 0
        same = self.llama.input_ids[:most] == np.asarray(tokens[:most], dtype=np.intc)
        return most if same.all() else int(same.argmin())

    def take(self) -> Bytes:
        """The whole state.

        Raises RuntimeError where llama.cpp does not give it, and kvdepot.Error where it finds no
        room.
        """
        return self._data(SEQUENCE, ALL)

    def take_rows(self, first: int) -> Rows:
        """The rows of the tokens from `first` on, and what is not rows.

        Raises kvdepot.InputError where the state is not one of all of the Llama's tokens, and as
        `take`.
        """
        rest_bytes = self._rest_bytes() if first > 0 else None
        if rest_bytes is not None:
            state = None if first == self.llama.n_tokens else self._data_of(first)
            layout = None if state is None else self._layout_of_run(state, first)
            if state is None or layout is not None:
                rest = self._data(SEQUENCE, PART)[FRONT_BYTES:] if rest_bytes > 0 else None
                return Rows(first, layout, state, rest)
        # All of it, or what is no state of these tokens, which is refused.
        state = self.take()
        layout = self.layout_of(state)
        rest = state[len(state) - layout.rest_bytes :] if layout.rest_bytes > 0 else None
        return Rows(0, layout, state, rest)

    def layout_of(self, state: Bytes) -> LlamaLayout:
        """The layout of the state that was taken just now.

        Raises kvdepot.InputError where it is not one of all of the Llama's tokens.
        """
        layout = LlamaLayout.read(state)
        if layout.tokens != self.llama.n_tokens:
            raise refused(
                "state's tokens", layout.tokens, f"{self.llama.n_tokens}, the number in input_ids"
            )
        if self.layout is not None and layout.shape != self.layout.shape:
            raise refused("state's shape", layout.shape, f"{self.layout.shape}, the earlier shape")
        return layout

    def put(self, state: Bytes, tokens: list[int]) -> bool:
        """Make the sequence one of these tokens with this state; where llama.cpp refuses it, an
        empty one, and the answer is False. The next token is computed before one is sampled."""
        llama = self.llama
        size = len(state)
        read = llama_cpp.llama_state_seq_set_data(llama.ctx, _pointer(state), size, SEQUENCE)
        if read != size:
            # Rows that were read before it was refused may be any numbers, and in a product with
            # a masked cell NaN stays NaN.
            self.forget(with_bytes=True)
            return False
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)
        llama._requires_eval = True
        if llama._logits_all:
            # Nobody may take those of other tokens for theirs.
            llama.scores[: len(tokens)] = np.nan
        return True

    def forget(self, *, with_bytes: bool = False) -> None:
        """Make it an empty sequence; `with_bytes` zeroes all cells as well."""
        self.llama.reset()
        memory = llama_cpp.llama_get_memory(self.llama.ctx)
        if memory is not None:
            # Otherwise the bytes of free cells are masked, as after any cut.
            llama_cpp.llama_memory_clear(memory, with_bytes)

    def can_go_back_to(self, tokens: int) -> bool:
        """Whether the sequence may go on behind so many of its tokens."""
        if self.can_be_cut or tokens >= self.llama.n_tokens:
            return True
        window = llama_cpp.llama_model_n_swa(self.llama.model)
        memory = llama_cpp.llama_get_memory(self.llama.ctx)
        if self.is_recurrent or window <= 0 or llama_cpp.llama_model_is_hybrid(self.llama.model):
            return False
        # What the window's cache still has begins here.
        first = llama_cpp.llama_memory_seq_pos_min(memory, SEQUENCE)
        return bool(0 <= first <= max(0, tokens - window))

    def _rest_bytes(self) -> int | None:
        """Bytes of the state that are not rows; None where it is not of the Llama's tokens alone,
        or has its rest elsewhere than a part of a state has."""
        if self.layout is None:
            return None
        context, count = self.llama.ctx, self.llama.n_tokens
        rest_bytes = 0
        if not self.can_be_cut:
            part = llama_cpp.llama_state_seq_get_size_ext(context, SEQUENCE, PART)
            rest_bytes = max(0, part - FRONT_BYTES)
        size = llama_cpp.llama_state_seq_get_size(context, SEQUENCE)
        last = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context), SEQUENCE)
        # As many cells as tokens, the last at its place, and no position twice.
        is_whole = last == count - 1 and size == self.layout.resized(count, rest_bytes).state_bytes
        return rest_bytes if is_whole else None

    def _data_of(self, first: int) -> Bytes:
        """The state of a sequence that has the tokens from `first` on alone."""
        memory = llama_cpp.llama_get_memory(self.llama.ctx)
        llama_cpp.llama_memory_seq_cp(memory, SEQUENCE, ASIDE, first, self.llama.n_tokens)
        try:
            # The state begins later by what its cells lack: rows lie as in any other.
            return self._data(ASIDE, ALL, CELL_NAME_BYTES * (self.llama.n_tokens - first))
        finally:
            # Unlike a removal, no kind of memory refuses it.
            llama_cpp.llama_memory_seq_keep(memory, SEQUENCE)

    def _layout_of_run(self, state: Bytes, first: int) -> LlamaLayout | None:
        """Where rows lie in the state of the tokens from `first` on; None where it is none."""
        if self.layout is None:
            return None
        count = self.llama.n_tokens - first
        rows = self.layout.resized(count)
        if len(state) < rows.state_bytes:
            return None
        numbers = state[CELL_NAME_BYTES * count : CELLS_AT + 12 * count].view("<i4")
        cells = numbers[CELLS_AT // 4 :].reshape(count, 2)
        wanted = np.arange(first, first + count)
        if numbers[3] != count or (cells[:, 0] != wanted).any() or cells[:, 1].any():
            return None
        if _heads(rows, state) != self._table_heads:
            return None
        return rows.resized(count, len(state) - rows.state_bytes)

    def _data(self, sequence: int, flags: int, front: int = 0) -> Bytes:
        context = self.llama.ctx
        size = llama_cpp.llama_state_seq_get_size_ext(context, sequence, flags)
        if size == 0:
            raise RuntimeError("llama.cpp returned no state")
        state = scratch(front + size)
        to = _pointer(state[front:])
        got = llama_cpp.llama_state_seq_get_data_ext(context, to, size, sequence, flags)
        if got != size:
            raise RuntimeError(f"llama.cpp returned {got} of the {size} bytes of its state")
        return state

    def _look(self) -> tuple[LlamaLayout, list[bytes]]:
        llama = self.llama
        if llama.n_tokens > 0:
            return self._look_at(self.take())
        try:
            llama.eval([max(0, llama.token_bos())] * PROBE_TOKENS)
            return self._look_at(self.take())
        finally:
            self.forget()

    @staticmethod
    def _look_at(state: Bytes) -> tuple[LlamaLayout, list[bytes]]:
        layout = LlamaLayout.read(state)
        return layout, _heads(layout, state)


def _heads(layout: LlamaLayout, state: Bytes) -> list[bytes]:
    """What stands in front of each table's rows: it does not depend on the tokens."""
    starts = [start for start, _, _ in layout.tables]
    return [state[start - TABLE_HEAD_BYTES : start].tobytes() for start in starts]


def _pointer(memory: Bytes) -> Any:
    return memory.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
