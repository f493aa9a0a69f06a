"""Loaded is what takes less time to load than to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import kvdepot
import llama_cpp
from kvdepot.llama_cpp import KvdepotCache, States
from kvdepot.llama_cpp.costs import Costs
from llama_child import logits_after, open_depot, tokens_of

TOKENS = tokens_of(1700)
# Longer by a seventeenth.
LIVE = 1600


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with open_depot(str(tmp_path / "depot")) as opened:
        yield opened


def compute(llama: Any, tokens: list[int]) -> None:
    llama.eval(tokens)
    # llama.cpp takes the time when somebody wants the logits.
    llama_cpp.llama_synchronize(llama.ctx)


def measured_s(llama: Any) -> float:
    return float(llama_cpp.llama_perf_context(llama.ctx).t_p_eval_ms / 1000)


def stored(make_llama: Callable[..., Any], depot: kvdepot.Depot) -> tuple[Any, Any]:
    """A Llama whose state of TOKENS is in the depot, and one without tokens."""
    storing, llama = make_llama(), make_llama()
    storing.eval(TOKENS)
    States(storing, depot).save()
    return storing, llama


def test_a_state_that_is_a_little_longer_is_used(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    storing, llama = stored(make_llama, depot)
    logits = logits_after(storing)
    cache = KvdepotCache(llama, depot)
    llama.eval(TOKENS[:LIVE])
    assert cache[[*TOKENS, 7, 8]].n_tokens == 1700
    assert cache.statistics()["last_cached_tokens"] == 1700
    assert logits_after(llama) == logits
    # Of the last token, which is computed in any case, there is nothing to load.
    llama.n_tokens = 1699
    assert cache[TOKENS].n_tokens == 1699
    assert cache.statistics()["last_cached_tokens"] == 0
    cache.close()


def test_a_medium_that_was_slow_is_passed_over_and_tried_again(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    _, llama = stored(make_llama, depot)
    cache = KvdepotCache(llama, depot)
    compute(llama, TOKENS[:LIVE])
    # Ten minutes for one load: no machine takes that long to compute 100 tokens.
    cache.costs.loaded(1700 * 1024, 600.0)
    assert cache[[*TOKENS, 7, 8]].n_tokens == LIVE
    assert cache.statistics()["last_cached_tokens"] == 0
    for _ in range(100):
        if cache[[*TOKENS, 7, 8]].n_tokens > LIVE:
            break
    assert cache.statistics()["last_cached_tokens"] == 1700
    cache.close()


def test_a_state_that_the_llama_lacks_most_of_is_loaded_at_any_cost(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    _, llama = stored(make_llama, depot)
    cache = KvdepotCache(llama, depot)
    compute(llama, TOKENS[:800])
    cache.costs.loaded(1700 * 1024, 600.0)
    assert cache[[*TOKENS, 7, 8]].n_tokens == 1700
    cache.close()


def test_costs_are_those_that_were_measured(make_llama: Callable[..., Any]) -> None:
    llama = make_llama()
    costs = Costs(llama)
    assert costs.compute_s(1) is None
    assert costs.pays(1 << 60, 1), "nothing was measured"
    costs.loaded(1000, 10.0)
    assert costs.pays(1 << 60, 1), "no token was computed"
    compute(llama, TOKENS[:20])
    assert costs.compute_s(1) is None, "too few"
    compute(llama, TOKENS[20:300])
    token_s = costs.compute_s(1)
    assert token_s is not None
    assert costs.compute_s(50) == pytest.approx(50 * token_s)
    assert token_s == pytest.approx(measured_s(llama) / 300, rel=0.1)
    # 10 ms a byte.
    assert costs.pays(1000, int(11 / token_s))
    assert not costs.pays(1000, int(9 / token_s))
    # The counts of llama.cpp begin again.
    llama_cpp.llama_perf_context_reset(llama.ctx)
    compute(llama, TOKENS[300:400])
    assert costs.compute_s(100) == pytest.approx((100 * token_s + measured_s(llama)) / 2, rel=0.1)
