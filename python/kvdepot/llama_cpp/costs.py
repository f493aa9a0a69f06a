"""Whether to load or to compute, by what both took before."""

from __future__ import annotations

from typing import Any

import llama_cpp

# A few tokens take as long as a batch: they are counted with those that follow.
LEAST_TOKENS = 32
# A medium that was slow once is tried again.
FADING = 3 / 4


class Costs:
    """Seconds to compute a token and to load a byte: each new measurement counts as much as all
    before."""

    def __init__(self, llama: Any) -> None:
        """llama.cpp itself times the tokens of prompts that `llama` computes from now on."""
        self._llama = llama
        self._read = self._perf()
        self._token_s: float | None = None
        self._byte_s: float | None = None

    def compute_s(self, tokens: int) -> float | None:
        """Seconds to compute so many tokens; None before any was measured."""
        count, seconds = self._perf()
        if count < self._read[0]:
            # Its user has set the counts to zero.
            self._read = (0, 0.0)
        new = count - self._read[0]
        if new >= LEAST_TOKENS:
            self._token_s = _mean(self._token_s, (seconds - self._read[1]) / new)
            self._read = (count, seconds)
        return None if self._token_s is None else self._token_s * tokens

    def pays(self, nbytes: int, tokens: int) -> bool:
        """Whether so many bytes take less time to load than so many tokens to compute. True before
        both were measured: a first load is how it becomes known."""
        compute_s = self.compute_s(tokens)
        if compute_s is None or self._byte_s is None:
            return True
        if self._byte_s * nbytes < compute_s:
            return True
        self._byte_s *= FADING
        return False

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Note how long a load took."""
        self._byte_s = _mean(self._byte_s, seconds / max(1, nbytes))

    def _perf(self) -> tuple[int, float]:
        perf = llama_cpp.llama_perf_context(self._llama.ctx)
        return int(perf.n_p_eval), perf.t_p_eval_ms / 1000


def _mean(before: float | None, new: float) -> float:
    return new if before is None else (before + new) / 2
