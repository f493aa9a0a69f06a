"""What several files of tests share that is no fixture."""

from __future__ import annotations

import importlib.util
import os
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
