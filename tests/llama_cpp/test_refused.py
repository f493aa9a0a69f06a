"""Stored states that llama.cpp refuses: no trace of them is left, and each is tried once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

from kvdepot.llama_cpp import KvdepotCache, States
from llama_child import logits_after, open_depot, tokens_of

KINDS = ["gemma", "jamba", "mamba"]
# As 16 bits and as 32 it is not a number.
NAN = 0x7F


def store_torn(states: States) -> None:
    """Store a state that verifies, and whose rest ends too early for llama.cpp."""
    snapshot = states.snapshot()
    assert snapshot is not None
    snapshot.rest = snapshot.rest[:-100]
    states.write(snapshot)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_a_refused_state_are_those_without(
    kind: str, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama(kind)
    tokens = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        llama.eval(tokens)
        whole = states.sequence.take()
        store_torn(states)
        fresh = make_llama(kind)
        # Fewer tokens than are refused: what is left of those stands in masked cells.
        fresh.eval(tokens[:100])
        expected = logits_after(fresh)
        if states.sequence.layout is not None:
            # As where a computation went wrong: llama.cpp takes these numbers for keys and values.
            for start, unit, units in states.sequence.layout_of(whole).tables:
                whole[start : start + unit * units * len(tokens)] = NAN
            assert states.sequence.put(whole, tokens)
        for one in (states, States(make_llama(kind), depot)):
            assert one.restore([*tokens, 7]) == 0
            assert one.llama.n_tokens == 0
            one.llama.eval(tokens[:100])
            assert logits_after(one.llama) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_state_is_tried_once_and_the_next_best_is_used(
    kind: str,
    make_llama: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llama = make_llama(kind)
    tokens = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        llama.eval(tokens[:250])
        states.save()
        plain = make_llama(kind)
        assert States(plain, depot).restore([*tokens, 7]) == 250
        plain.eval(tokens[250:])
        expected = logits_after(plain)
        llama.eval(tokens[250:])
        store_torn(states)
        # Nothing of what is computed is worth a save.
        other = make_llama(kind)
        cache = KvdepotCache(other, depot, min_tokens=100)
        for turn in range(3):
            other.reset()
            cache.states.sequence.forget()
            with caplog.at_level("WARNING", "kvdepot.llama_cpp"):
                assert cache[[*tokens, 7, turn]].n_tokens == 250
            other.eval(tokens[250:])
            assert logits_after(other) == expected
        assert caplog.text.count("a stored state of 300 tokens") == 1
        cache.close()


def test_a_refused_state_that_is_stored_again_is_used(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama("gemma")
    tokens = tokens_of(300)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        llama.eval(tokens)
        store_torn(states)
        assert states.restore([*tokens, 7]) == 0
        llama.eval(tokens)
        states.save()
        logits = logits_after(llama)
        assert states.restore([*tokens, 7]) == 300
        assert logits_after(llama) == logits


def test_a_state_that_the_context_has_no_room_for_is_not_asked_for(
    make_llama: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama = make_llama()
    tokens = tokens_of(900)
    with open_depot(str(tmp_path / "depot")) as depot:
        llama.eval(tokens)
        States(llama, depot).save()
        small = make_llama(n_ctx=512)
        assert States(small, depot).restore(tokens) == 384
        assert States(small, depot).restore(tokens[:450]) == 384
        small.eval(tokens[384:450])
        logits = logits_after(small)
        llama.reset()
        llama.eval(tokens[:384])
        llama.eval(tokens[384:450])
        assert logits_after(llama) == logits
        assert not [record for record in caplog.records if record.name.startswith("kvdepot")]
