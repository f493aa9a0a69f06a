"""A model of the server: what it counts and keeps, in this process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest

pytest.importorskip("llama_cpp.server.app")

from kvdepot.llama_cpp import KvdepotCache, server_model
from kvdepot.llama_cpp.server_model import ServedLlama
from llama_child import SETTINGS

PROMPT = list(range(5, 205))
OTHER = list(range(204, 4, -1))


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    posix = {"path": str(tmp_path / "depot"), "capacity": "64MiB"}
    with kvdepot.open("Posix", {"posix": posix, "socket": "off"}) as opened:
        yield opened


@pytest.fixture
def serve(
    make_llama: Callable[..., Any], depot: kvdepot.Depot
) -> Callable[[], tuple[ServedLlama, KvdepotCache]]:
    """A new model with a cache, as a server has it."""

    def made() -> tuple[ServedLlama, KvdepotCache]:
        llama = make_llama(n_ctx=1024)
        cache = KvdepotCache(llama, depot)
        return ServedLlama.serve(llama, cache), cache

    return made


def complete(llama: ServedLlama, prompt: list[int], tokens: int = 4) -> int:
    """How many of a prompt's tokens were not computed for its answer."""
    llama.create_completion(prompt, max_tokens=tokens, temperature=0.0)
    return llama._note.cached_tokens


def hold(cache: KvdepotCache) -> threading.Event:
    """Let nothing be written before this is set."""
    write, go = cache.states.write, threading.Event()

    def wait(snapshot: Any) -> dict[str, Any]:
        assert go.wait(60)
        return write(snapshot)

    cache.states.write = wait  # type: ignore[method-assign]
    return go


def test_what_waits_is_written_before_a_model_goes(serve: Callable[..., Any]) -> None:
    llama, cache = serve()
    go = hold(cache)
    complete(llama, PROMPT)
    assert cache.statistics()["waiting_bytes"] > 0
    ending = threading.Thread(target=llama.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive(), "it did not wait"
    go.set()
    ending.join(60)
    assert cache.statistics()["bytes_written"] > 0
    later, _ = serve()
    assert complete(later, PROMPT) == len(PROMPT) // 128 * 128


def test_a_model_that_computes_is_not_closed(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_model, "END_S", 0.05)
    llama, cache = serve()
    go = hold(cache)
    complete(llama, PROMPT)
    with llama._computing:
        flushing = threading.Timer(0.5, go.set)
        flushing.start()
        assert not llama.finish()
        assert cache.statistics()["waiting_bytes"] == 0
        assert llama.cache is cache
    assert llama.finish()
    assert llama.cache is None


def test_counts_are_of_what_was_computed(serve: Callable[..., Any]) -> None:
    llama, cache = serve()
    assert complete(llama, PROMPT) == 0
    assert llama._note.prompt_tokens == len(PROMPT)
    assert llama._note.completion_tokens == 4
    # All of it is in the model's memory, and the last token is computed for its logits.
    assert complete(llama, PROMPT) == len(PROMPT) - 1
    cache.flush()
    assert complete(llama, OTHER) == 0
    assert complete(llama, PROMPT) == len(PROMPT) // 128 * 128
    assert complete(llama, PROMPT[:150] + OTHER) == 150


def test_an_answer_that_nobody_waits_for_is_kept(serve: Callable[..., Any]) -> None:
    llama, cache = serve()
    answer = llama.create_completion(PROMPT, max_tokens=9, temperature=0.0, stream=True)
    next(answer)
    assert cache.statistics()["saves"] == 0
    complete(llama, OTHER)
    answer.close()
    cache.flush()
    assert complete(llama, PROMPT) == len(PROMPT) // 128 * 128


@pytest.mark.parametrize("echo", [False, True])
def test_a_model_that_was_closed_leaves_its_memory_at_once(
    echo: bool, model_files: Callable[..., Path], depot: kvdepot.Depot
) -> None:
    import llama_cpp

    llama = llama_cpp.Llama(str(model_files("llama")), **SETTINGS, logits_all=True)
    served = ServedLlama.serve(llama, KvdepotCache(llama, depot))
    complete(served, PROMPT)
    if echo:
        # Answered without the cache.
        served.create_completion("a" * 50, max_tokens=2, echo=True, logprobs=1)
    model = weakref.ref(served)
    gc.collect()
    gc.disable()
    try:
        served.close()
        del llama, served
        assert model() is None
    finally:
        gc.enable()
