"""Whatever the arguments are: an answer or an ordinary exception, never a panic or a crash."""

from __future__ import annotations

import random
from typing import Any

import kvdepot
import numpy as np
import pytest


def weird(source: random.Random) -> Any:
    """A value from a drawer of odd things."""
    things: list[Any] = [
        None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, float("nan"), float("inf"),
        "", "x", "\x00", "\ud800", "Cache", "key" * 20, b"", b"x", bytes(32), bytes(64),
        bytearray(10), memoryview(b"abc"), [], [[]], [None], [b""], [bytes(32)], [bytes(32)] * 3,
        (), (1, 2), (2**63, 2**63), {}, {"a": 1}, {1: 2}, set(), object(), int, len, ...,
        np.zeros(0), np.zeros((3, 32), np.uint8), np.zeros((2, 2)), np.array("x"), np.array(None),
        np.int64(5), range(3), iter([bytes(32)]), [[1, 2], [3]], [(4096, 8, 8)],
        [[bytes(16)]], [[bytes(16)] * 2], 1e400, slice(3), NotImplemented,
    ]  # fmt: skip
    return source.choice(things)


class Odd:
    """Its attributes lie."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if self._source.random() < 0.5:
            raise RuntimeError(name)
        return weird(self._source)

    def __iter__(self) -> Any:
        yield weird(self._source)
        raise RuntimeError("the end")

    def __len__(self) -> int:
        return -1

    def __repr__(self) -> str:
        raise RuntimeError("no words")


ROUNDS = 4000


def test_nonsense(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, source: random.Random, rounds: int
) -> None:
    names = [source.randbytes(32) for _ in range(3)]
    ns.put(names, [b"abc"] * 3).wait(30)
    mover = kvdepot.attach(depot.socket or "")
    pin = ns.pin(names[:1])[0]
    (held,) = ns.reserve([source.randbytes(32)], 10)
    assert pin is not None
    assert held is not None
    task = ns.put(names, [b"abc"] * 3)
    job = mover.verify([pin.placement])
    job.wait(30)
    targets = [
        kvdepot.open, kvdepot.check, kvdepot.attach, kvdepot.Spans,
        depot.namespace, depot.drain,
        ns.prefix, ns.contains, ns.where, ns.put, ns.get, ns.remove, ns.reserve, ns.commit,
        ns.abort, ns.pin, ns.unpin, ns.discard, task.wait, task.wait_released,
        mover.store, mover.load, mover.digest, mover.verify, mover.locate, job.wait,
    ]  # fmt: skip
    extras: list[Any] = [pin, held, [pin], [held], [pin.placement], task, ns, depot, names]
    answered = 0
    for _ in range(ROUNDS * rounds):
        target = source.choice(targets)
        arguments = [
            source.choice(extras) if source.random() < 0.3 else weird(source)
            for _ in range(source.randint(0, 4))
        ]
        if source.random() < 0.1:
            arguments.append(Odd(source))
        if target in (task.wait, task.wait_released, job.wait, depot.drain):
            arguments = arguments[:1]
        # Addresses are taken at their word: those that Spans could name are never used.
        arguments = [None if isinstance(one, kvdepot.Spans) else one for one in arguments]
        try:
            answer = target(*arguments)
        except SystemError:
            raise
        except Exception:
            # PyO3's PanicException is none, and goes through.
            continue
        answered += 1
        if isinstance(answer, kvdepot.Depot | kvdepot.Mover):
            answer.close()
    assert answered > 100
    ns.put(names, [b"abc"] * 3).wait(30)
    assert ns.prefix(names) == 3


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_objects_cannot_be_made_by_hand(number: int) -> None:
    kinds: list[Any] = [kvdepot.Depot, kvdepot.Namespace, kvdepot.Task, kvdepot.Pin]
    with pytest.raises(TypeError):
        kinds[number]()
