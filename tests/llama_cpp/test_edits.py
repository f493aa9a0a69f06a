"""A conversation of which a message is edited goes on from the end of the turn before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import kvdepot
from kvdepot.llama_cpp import KvdepotCache
from llama_child import logits_after, open_depot, tokens_of

KINDS = ["gemma", "mamba", "jamba"]
# <|im_end|>, and what a template puts in front of an answer.
END = 4
HEAD = [3, 70, 71]


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    with open_depot(str(tmp_path / "depot")) as opened:
        yield opened


def message(seed: int, count: int = 80) -> list[int]:
    return tokens_of(count + 1, seed)[1:]


def history(messages: int) -> list[int]:
    """Messages that end, behind the first token."""
    return [1, *(token for seed in range(messages) for token in [*message(seed), END])]


# Templates that end each message, and those that end answers alone.
@pytest.mark.parametrize("tail", [[END, *HEAD], []], ids=["each", "answers"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_message_is_computed_from_the_turn_before(
    kind: str, tail: list[int], make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    before = history(8)
    asked, *edits = ([*before, *message(seed), *tail] for seed in (100, 101, 102))
    llama = make_llama(kind)
    cache = KvdepotCache(llama, depot).attach()
    llama.create_completion(asked, max_tokens=20, temperature=0, seed=1)
    cache.flush()
    # In another process, and where the Llama's own state is of what was asked before.
    for one, edited in zip((make_llama(kind), llama), edits, strict=True):
        own = cache if one is llama else KvdepotCache(one, depot).attach()
        one.create_completion(edited, max_tokens=1, temperature=0, seed=1)
        assert one.n_tokens == len(edited)
        if kind == "gemma" and one is llama:
            # What its window needs is there still.
            assert own.statistics()["last_cached_tokens"] == 0
        else:
            assert own.statistics()["last_cached_tokens"] == len(before)
        if kind != "gemma":
            # As llama.cpp itself goes on, in the same steps.
            plain = make_llama(kind)
            for end in (len(before), len(edited) - 1, len(edited)):
                plain.eval(edited[plain.n_tokens : end])
            assert logits_after(one) == logits_after(plain)
        own.flush()
    cache.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_that_grows_stores_no_end_of_a_turn_twice(
    kind: str, make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    llama = make_llama(kind)
    cache = KvdepotCache(llama, depot, background=False).attach()
    saves = []
    prompt = [*history(2), *message(50), END, *HEAD]
    for turn in range(3):
        llama.create_completion(prompt, max_tokens=40, temperature=0, seed=1)
        saves.append(cache.statistics()["saves"])
        prompt = [*llama._input_ids.tolist(), END, *message(60 + turn), END, *HEAD]
    # The end of the turn before, the prompt and the answer; then prompts and answers.
    assert saves == [3, 5, 7]
    cache.close()


def test_what_has_no_turns_is_stored_at_its_end(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> None:
    llama = make_llama("jamba")
    cache = KvdepotCache(llama, depot, background=False)
    for saves, prompt in enumerate((tokens_of(300), [*tokens_of(300, 2), END], [END] * 300), 1):
        llama.reset()
        with pytest.raises(KeyError):
            cache[prompt]
        assert cache.statistics()["saves"] == saves
        assert llama.n_tokens == len(prompt) - 1
    cache.close()
