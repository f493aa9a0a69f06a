"""`KvdepotCache` under llama-cpp-python's own completions: the same tokens as without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import kvdepot
import llama_cpp
import numpy as np
from kvdepot.llama_cpp import KvdepotCache
from llama_child import SETTINGS, logits_after, open_depot, tokens_of
from real_model import REASON, smollm

CHILD = Path(__file__).parent / "llama_child.py"
KINDS = ["llama", "gemma", "mamba", "jamba"]
TURNS = 4


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with open_depot(str(tmp_path / "depot")) as opened:
        yield opened


def answer(llama: Any, prompt: list[int], count: int = 20) -> list[int]:
    """The tokens that follow a prompt."""
    llama.create_completion(prompt, max_tokens=count, temperature=0, seed=1)
    # The last one was not computed.
    return [int(token) for token in llama._input_ids[len(prompt) :]]


def conversation(llama: Any, seed: int, turns: int = TURNS) -> Iterator[list[int]]:
    """The prompt of each turn, which begins with the turns before and their answers."""
    prompt = tokens_of(150, seed)
    for turn in range(turns):
        yield prompt
        prompt = [*llama._input_ids.tolist(), *tokens_of(60, seed * 100 + turn)[1:]]


def has_ties(judge: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether another order of additions could choose another token: states that were computed in
    other batches differ in their last digits, on some processors."""
    judge.reset()
    judge.eval([*prompt, *tokens])
    best = np.sort(judge.scores[len(prompt) - 1 : len(prompt) + len(tokens)])
    return bool((best[:, -1] - best[:, -2]).min() < 0.004)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "set"])
def test_interleaved_conversations_have_the_tokens_they_have_without(
    kind: str, attached: bool, make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    plain, judge = make_llama(kind), make_llama(kind, logits_all=True)
    expected: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    seeds: list[int] = []
    for seed in range(1, 60):
        if len(seeds) == 3:
            break
        plain.reset()
        turns = [(prompt, answer(plain, prompt)) for prompt in conversation(plain, seed)]
        if not any(has_ties(judge, *turn) for turn in turns):
            seeds.append(seed)
            expected |= {(seed, turn): both for turn, both in enumerate(turns)}
    assert len(seeds) == 3
    llama = make_llama(kind)
    cache = KvdepotCache(llama, depot, min_tokens=16)
    llama.set_cache(cache) if not attached else cache.attach()
    for turn in range(TURNS):
        for seed in seeds:
            prompt, tokens = expected[seed, turn]
            assert answer(llama, prompt) == tokens, (seed, turn)
            cached = cache.statistics()["last_cached_tokens"]
            if turn > 0:
                # All that the turn before had.
                before = expected[seed, turn - 1]
                assert cached == len(before[0]) + len(before[1])
    cache.flush()
    said = cache.statistics()
    assert (said["prompts"], said["hits"], said["failed"]) == (3 * TURNS, 3 * (TURNS - 1), 0)
    assert said["cache_write_tokens"] > 0
    cache.close()
    assert llama.cache is None
    assert "save_state" not in vars(llama)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_stored_whole_has_its_last_token_computed(
    kind: str, make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    prompt = tokens_of(300)
    llama = make_llama(kind)
    without = answer(llama, prompt)
    with kvdepot_cache(llama, depot) as cache:
        llama.reset()
        answer(llama, prompt, 1)
        cache.flush()
        for _ in range(2):
            other = make_llama(kind)
            with kvdepot_cache(other, depot) as second:
                assert answer(other, prompt) == without
                cached = second.statistics()["last_cached_tokens"]
                assert cached == (300 if kind == "llama" else 299)
                # What the Llama has itself it does not ask for.
                assert answer(other, prompt) == without


def test_a_real_model_goes_on_as_from_its_own_memory_to_the_bit(depot: kvdepot.Depot) -> None:
    file = smollm() or pytest.skip(REASON)
    page = (Path(__file__).parents[2] / "docs/sessions.md").read_text()[:2500]
    settings = SETTINGS | {"flash_attn": True}
    plain, storing, fresh = (llama_cpp.Llama(str(file), **settings) for _ in range(3))
    first, second = (
        plain.tokenize(f"{page}\n\nQuestion: What is a {word}?\nAnswer:".encode())
        for word in ("session", "piece")
    )
    with kvdepot_cache(storing, depot) as cache:
        before = answer(storing, first)
        cache.flush()
        with kvdepot_cache(fresh, depot) as other:
            answered = answer(fresh, second)
            cached = other.statistics()["last_cached_tokens"]
    assert cached >= 384
    # llama.cpp's own reuse of the same tokens: what comes behind them is taken back.
    assert answer(plain, first) == before
    plain.n_tokens = cached
    assert answer(plain, second) == answered
    assert logits_after(plain) == logits_after(fresh)
    for llama in (plain, storing, fresh):
        llama.close()


class kvdepot_cache:  # noqa: N801
    """An attached cache, closed at the end."""

    def __init__(self, llama: Any, depot: kvdepot.Depot, **settings: Any) -> None:
        self.cache = KvdepotCache(llama, depot, **settings).attach()

    def __enter__(self) -> KvdepotCache:
        return self.cache

    def __exit__(self, *_: object) -> None:
        self.cache.close()


def test_a_new_process_goes_on_and_writes_what_is_new(
    make_llama: Callable[..., Any], model_files: Callable[..., Path], tmp_path: Path
) -> None:
    order = {"do": "complete", "model": str(model_files("llama")), "tokens": 300}
    order |= {"depot": str(tmp_path / "depot"), "turns": 3}

    def run() -> dict[str, Any]:
        command = [sys.executable, str(CHILD), json.dumps(order)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        said: dict[str, Any] = json.loads(ended.stdout)
        return said

    first, second = run(), run()
    assert first["texts"] == second["texts"]
    assert first["cached"] == [0, 0, 0], "the Llama has it itself"
    # Its pieces are shared with the stored turn, which goes on inside of the third.
    assert second["cached"] == [256, 0, 0]
    assert first["counts"]["cache_write_tokens"] > 300
    # Turns that are stored are not written again.
    assert second["counts"]["cache_write_tokens"] == 0


def test_a_window_that_is_gone_is_not_attended_to(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    prompt = tokens_of(400)
    fork = [*prompt[:200], *tokens_of(80, 7)[1:]]
    plain = make_llama("gemma")
    without = answer(plain, fork)
    for settings in ({"swa_full": True}, {"swa_full": False}):
        llama = make_llama("gemma", **settings)
        with kvdepot_cache(llama, depot) as cache:
            answer(llama, prompt)
            cache.flush()
            llama.reset()
            answer(llama, prompt)
            # Of the tokens before 200 the restored window has none.
            assert answer(llama, fork) == without


def test_a_depot_that_fails_costs_time_alone(
    make_llama: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens_of(300)
    plain = make_llama()
    without = [answer(plain, prompt), answer(plain, [*prompt, 9, 9])]
    llama = make_llama()
    depot = open_depot(str(tmp_path / "depot"))
    cache = KvdepotCache(llama, depot).attach()
    first = answer(llama, prompt)
    depot.close()
    assert [first, answer(llama, [*prompt, 9, 9])] == without
    llama.reset()
    assert answer(llama, prompt) == without[0]
    cache.close()
    assert cache.statistics()["failed"] > 0
    assert "could be loaded" in caplog.text


def test_pieces_of_which_some_are_gone_are_computed(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    prompt = tokens_of(600)
    llama = make_llama()
    without = answer(llama, prompt)
    with open_depot(str(tmp_path / "depot")) as depot, kvdepot_cache(llama, depot):
        llama.reset()
        answer(llama, prompt)
    files = [path for path in (tmp_path / "depot").rglob("*") if path.is_file()]
    pieces = sorted(path for path in files if path.stat().st_size > 30_000)
    assert len(pieces) >= 4
    for path in pieces[::2]:
        path.unlink()
    with open_depot(str(tmp_path / "depot")) as depot:
        other = make_llama()
        with kvdepot_cache(other, depot) as cache:
            assert answer(other, prompt) == without
            assert cache.statistics()["last_cached_tokens"] < 600
            assert cache.statistics()["failed"] == 0


def test_two_caches_over_one_depot_share(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    prompt = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as one, open_depot(str(tmp_path / "depot")) as two:
        here, there = make_llama("gemma"), make_llama("gemma")
        first, second = KvdepotCache(here, one).attach(), KvdepotCache(there, two).attach()
        assert prompt not in second
        tokens = answer(here, prompt)
        first.flush()
        assert answer(there, prompt) == tokens
        assert second.statistics()["last_cached_tokens"] == 299
        assert prompt in second
        first.close()
        second.close()


def test_the_seam_of_the_package_is_kept(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    llama = make_llama()
    prompt = tokens_of(200)
    with kvdepot_cache(llama, depot, background=False) as cache:
        with pytest.raises(KeyError):
            cache[prompt]
        with pytest.raises(KeyError):
            cache[[]]
        answer(llama, prompt, 1)
        assert prompt in cache
        # A user's own state is whole, and another one's is not stored for this one's.
        state = llama.save_state()
        assert state.llama_state_size > 200
        llama.reset()
        cache[prompt] = state
        assert cache.statistics()["saves"] == 1
        found = cache[[*prompt, 3]]
        assert (found.n_tokens, found.input_ids.tolist()) == (200, prompt)
        assert llama._input_ids.tolist() == prompt
        with pytest.raises(ValueError, match="broadcast"):
            llama.load_state(found)
        assert 0 < cache.cache_size <= cache.capacity_bytes == 1 << 30
    assert prompt not in cache
    with pytest.raises(KeyError):
        cache[prompt]


def test_a_cache_that_is_forgotten_writes_at_the_end(
    model_files: Callable[..., Path], tmp_path: Path, make_llama: Callable[..., Any]
) -> None:
    code = f"""
import sys
sys.path.append({str(CHILD.parent)!r})
import llama_cpp
from kvdepot.llama_cpp import KvdepotCache
from llama_child import SETTINGS, open_depot, tokens_of
llama = llama_cpp.Llama({str(model_files("llama"))!r}, **SETTINGS)
depot = open_depot({str(tmp_path / "depot")!r})
KvdepotCache(llama, depot).attach()
llama.create_completion(tokens_of(500), max_tokens=1)
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    with open_depot(str(tmp_path / "depot")) as depot:
        llama = make_llama()
        with kvdepot_cache(llama, depot) as cache:
            assert cache[tokens_of(500)].n_tokens == 500
