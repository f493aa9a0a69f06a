"""Snapshots that wait: bounded, in order, and none is lost that need not be."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

import numpy as np
from kvdepot.llama_cpp import Snapshot
from kvdepot.llama_cpp.writer import Writer


class Medium:
    """Writes one when it is let."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.let = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def write(self, snapshot: Snapshot) -> None:
        self.begun.release()
        assert self.let.acquire(timeout=30)
        self.written.append(snapshot.tokens)


def snapshot(tokens: list[int], nbytes: int = 10, rest: bool = False) -> Snapshot:
    memory = np.zeros(nbytes, np.uint8)
    if rest:
        return Snapshot(tokens, "asked", "", 0, rest=memory)
    return Snapshot(tokens, "asked", "", 0, rows=memory)


def busy(medium: Medium, writer: Writer) -> None:
    """The first is being written."""
    writer.put(snapshot([0]))
    assert medium.begun.acquire(timeout=30)


def test_a_later_snapshot_of_a_conversation_takes_the_place_of_one_that_waits() -> None:
    medium = Medium()
    writer = Writer(medium.write, 1000)
    busy(medium, writer)
    for tokens in ([1, 2], [5], [1, 2, 3], [1, 2, 3, 4]):
        writer.put(snapshot(tokens))
    assert writer.waiting_bytes == 30
    medium.let.release(9)
    writer.flush()
    assert medium.written == [[0], [5], [1, 2, 3, 4]]
    assert (writer.dropped, writer.waiting_bytes) == (0, 0)


def test_a_state_that_cannot_be_cut_keeps_its_place() -> None:
    medium = Medium()
    writer = Writer(medium.write, 1000)
    busy(medium, writer)
    writer.put(snapshot([1, 2], rest=True))
    writer.put(snapshot([1, 2, 3], rest=True))
    medium.let.release(9)
    writer.close()
    assert medium.written == [[0], [1, 2], [1, 2, 3]]


def test_what_waits_is_bounded_and_the_oldest_goes() -> None:
    medium = Medium()
    writer = Writer(medium.write, 100)
    busy(medium, writer)
    for token in range(1, 6):
        writer.put(snapshot([token], 40))
    assert (writer.dropped, writer.waiting_bytes) == (3, 90)
    writer.put(snapshot([9], 1000))
    assert writer.dropped == 5, "one that is too large waits alone"
    medium.let.release(9)
    writer.flush()
    assert medium.written == [[0], [9]]
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.put(snapshot([1]))


def test_whoever_waits_for_a_beginning_waits_for_no_other() -> None:
    medium = Medium()
    writer = Writer(medium.write, 1000)
    busy(medium, writer)
    writer.put(snapshot([1, 2, 3, 4]))
    writer.wait_for([1, 2, 3, 4, 5], 4)
    writer.wait_for([1, 2, 9, 9], 2)
    writer.wait_for([1, 2, 3], 3)
    done = threading.Event()

    def wait() -> None:
        writer.wait_for([1, 2, 3, 9], 2)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.05)
    medium.let.release(9)
    thread.join(timeout=30)
    assert done.is_set()
    assert medium.written == [[0], [1, 2, 3, 4]]
    writer.close()
