"""The one sequence of a Llama: its tokens, and its state as bytes, by llama.cpp's own functions."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import llama_cpp
import numpy as np

from kvdepot._native import LlamaLayout
from kvdepot.llama_cpp.identity import check_model
from kvdepot.transformers.refusal import refused

SEQUENCE = 0
# Enough that a model with several positions a token shows in its second cell.
PROBE_TOKENS = 2
Bytes: TypeAlias = Any
"""A NumPy array of bytes: NumPy is not installed where types are checked."""


class Sequence:
    """A Llama's sequence. Not for several threads at a time, as the Llama is not."""

    def __init__(self, llama: Any) -> None:
        """Look at a model's state: where nothing was computed, two tokens are, and forgotten.

        Raises kvdepot.InputError for models whose states are not handled.
        """
        check_model(llama)
        self.llama = llama
        self._room: Bytes = np.empty(0, np.uint8)
        self.is_recurrent = bool(llama_cpp.llama_model_is_recurrent(llama.model))
        self.layout: LlamaLayout | None = None
        """Where rows lie; None for a model that is recurrent alone, whose state has none."""
        rest_bytes = 0
        if not self.is_recurrent:
            self.layout = self._look()
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
        """The whole state, in memory that the next call overwrites.

        Raises RuntimeError where llama.cpp does not give it.
        """
        context = self.llama.ctx
        size = llama_cpp.llama_state_seq_get_size(context, SEQUENCE)
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        state = self._room[:size]
        got = llama_cpp.llama_state_seq_get_data(context, _pointer(state), size, SEQUENCE)
        if size == 0 or got != size:
            raise RuntimeError(f"llama.cpp gave {got} of the {size} bytes of its state")
        return state

    def layout_of(self, state: Bytes) -> LlamaLayout:
        """The layout of the state that was taken just now.

        Raises kvdepot.InputError where it is not one of all of the Llama's tokens.
        """
        layout = LlamaLayout.read(state)
        if layout.tokens != self.llama.n_tokens:
            raise refused(
                "state's tokens", layout.tokens, f"{self.llama.n_tokens}, as input_ids has"
            )
        if self.layout is not None and layout.shape != self.layout.shape:
            raise refused("state's shape", layout.shape, f"{self.layout.shape}, as it was before")
        return layout

    def put(self, state: Bytes, tokens: list[int]) -> bool:
        """Make the sequence one of these tokens with this state; where llama.cpp refuses it, an
        empty one, and the answer is False. The next token is computed before one is sampled."""
        llama = self.llama
        size = len(state)
        read = llama_cpp.llama_state_seq_set_data(llama.ctx, _pointer(state), size, SEQUENCE)
        if read != size:
            self.forget()
            return False
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)
        llama._requires_eval = True
        if llama._logits_all:
            # Nobody may take those of other tokens for theirs.
            llama.scores[: len(tokens)] = np.nan
        return True

    def forget(self) -> None:
        """Make it an empty sequence."""
        self.llama.reset()
        memory = llama_cpp.llama_get_memory(self.llama.ctx)
        if memory is not None:
            # Without its bytes: those of free cells are masked, as after any cut.
            llama_cpp.llama_memory_clear(memory, False)

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

    def _look(self) -> LlamaLayout:
        llama = self.llama
        if llama.n_tokens > 0:
            return LlamaLayout.read(self.take())
        try:
            llama.eval([max(0, llama.token_bos())] * PROBE_TOKENS)
            return LlamaLayout.read(self.take())
        finally:
            self.forget()


def _pointer(memory: Bytes) -> Any:
    return memory.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
