"""A save takes its copies of a state in scratch files: no memory of the process."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import kvdepot
import numpy as np
from hosts import until
from kvdepot.llama_cpp import KvdepotCache, States
from kvdepot.llama_cpp.scratch import folder
from llama_child import logits_after, open_depot, tokens_of

# Settings under which rows lie together, values lie transposed, or most of a state is a rest.
KINDS = [
    pytest.param("llama", {"flash_attn": True}, id="rows"),
    pytest.param("llama", {}, id="transposed"),
    pytest.param("gemma", {"swa_full": True}, id="window-full"),
    pytest.param("gemma", {"swa_full": False}, id="window"),
    pytest.param("jamba", {}, id="hybrid"),
    pytest.param("mamba", {}, id="recurrent"),
]


@contextmanager
def traced() -> Iterator[list[int]]:
    """The most bytes that Python and NumPy have allocated at a time, and those that are left."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        said: list[int] = []
        yield said
        left, peak = tracemalloc.get_traced_memory()
        said += [peak - before, left - before]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_save_allocates_an_eighth_of_the_state_at_most(
    kind: str, settings: dict[str, Any], make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama(kind, **settings)
    tokens = tokens_of(1500)
    llama.eval(tokens)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        size = states.sequence.take().nbytes
        # What does not grow with the state: a list of tokens has 40 bytes each.
        most = size // 8 + 40 * len(tokens)
        with traced() as saved:
            assert states.save()["cache_write_tokens"] == 1500
        assert saved[0] <= most
        assert saved[1] < 10_000, "nothing is kept for the next one"
        with traced() as waiting:
            llama.reset()
            states.sequence.forget()
            llama.eval(tokens_of(1500, 2))
            snapshot = states.snapshot()
        assert snapshot is not None
        assert snapshot.nbytes > size // 2
        assert waiting[0] <= most
        logits = logits_after(llama)
        states.write(snapshot)
        assert states.restore([*tokens_of(1500, 2), 7]) == 1500
        assert logits_after(llama) == logits


@pytest.mark.parametrize("kind", ["llama", "gemma", "jamba"])
def test_a_save_copies_the_rows_of_new_tokens_alone(
    kind: str, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llama = make_llama(kind)
    tokens = tokens_of(1200)
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot, piece_tokens=128)
        llama.eval(tokens[:1024])
        states.save()
        llama.eval(tokens[1024:])
        before = states.sequence.take().tobytes()
        snapshot = states.snapshot()
        assert snapshot is not None
        assert (snapshot.first, len(snapshot.rows)) == (1024, pytest.approx(0, abs=len(before) / 3))
        # What was copied is no part of the sequence.
        assert states.sequence.take().tobytes() == before
        logits = logits_after(llama)
        states.write(snapshot)
        other = make_llama(kind)
        assert States(other, depot).restore([*tokens, 7]) == 1200
        assert logits_after(other) == logits


def test_a_state_that_finds_no_room_is_refused_before_it_is_copied(
    make_llama: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llama = make_llama()
    tokens = tokens_of(1500)
    llama.eval(tokens)
    with open_depot(str(tmp_path / "depot")) as depot:
        states, cache = States(llama, depot), KvdepotCache(llama, depot, background=False)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        # As a file system that is full has it, for whoever asks for more than so much.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with traced() as refused:
                with pytest.raises(kvdepot.Error, match=r"cannot allocate \d+ bytes for a state"):
                    states.save()
                cache.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert refused[0] < 200_000
        assert cache.statistics()["failed"] == 1
        assert "cannot store the state" in caplog.text
        assert list(tmp_path.iterdir()) == [tmp_path / "depot"]
        # With room again it is stored.
        assert states.save()["cache_write_tokens"] == 1500
        logits = logits_after(llama)
        assert states.restore([*tokens, 7]) == 1500
        assert logits_after(llama) == logits
        cache.close()


@pytest.mark.parametrize("kind", ["llama", "gemma", "jamba"])
def test_snapshots_hold_no_descriptor_and_free_their_memory(
    kind: str, make_llama: Callable[..., Any], tmp_path: Path, descriptors: Any
) -> None:
    llama = make_llama(kind)
    llama.eval(tokens_of(1000))

    def mapped() -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in maps if f" {folder()}/" in line and line.endswith("(deleted)")}

    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        states.save()
        llama.eval(tokens_of(1100)[1000:])
        files, before = descriptors(), mapped()
        held = [states.snapshot() for _ in range(40)]
        # The depot may open some of its own.
        assert len(descriptors() - files) < 20
        assert len(mapped() - before) >= 40
        states.write(held[0])
        held.clear()
    # A thread of the depot's may be the last to let go.
    until("the snapshots are unmapped", lambda: not mapped() - before)


def test_a_state_with_other_tokens_aside_is_the_llamas_own(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    import llama_cpp

    llama = make_llama(flash_attn=True)
    llama.eval(tokens_of(300))
    with open_depot(str(tmp_path / "depot")) as depot:
        states = States(llama, depot)
        states.save()
        # Nothing is left of the sequence that rows were copied from.
        memory = llama_cpp.llama_get_memory(llama.ctx)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == -1
        assert np.array_equal(states.sequence.tokens, tokens_of(300))
