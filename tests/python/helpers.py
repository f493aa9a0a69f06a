"""What several files of tests share that is no fixture."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import kvdepot
import pytest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def is_refused_in_a_child(call: Callable[[], Any]) -> bool:
    """Whether a forked child is told that what it uses is not its own."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except kvdepot.ClosedError:
            os._exit(7)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def ctrl_c(call: Callable[[], Any], limit: float = 10) -> float:
    """Has Ctrl-C end a call that waits, and says how many seconds after it the call has ended.

    By itself the call waits for `limit` seconds or more. A call that keeps other threads from
    running, or hears of Ctrl-C at its end only, takes most of that.
    """
    pressed = 0.0

    def press() -> None:
        nonlocal pressed
        pressed = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, press)

    def wait() -> None:
        timer.start()
        call()
        timer.join()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    ended = time.monotonic()
    timer.join()
    assert pressed - began < limit / 2, "no other thread ran"
    assert ended - pressed < limit / 2, "it has ended by itself"
    return ended - pressed
