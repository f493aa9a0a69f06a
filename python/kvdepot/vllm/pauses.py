"""Tells kvdepot's connectors whether vLLM's scheduler is paused.

`/pause` and `/sleep` wait until the engine has no work. Bringing a metric up to date is no such
work, but vLLM reports a pause to no connector.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler


@runtime_checkable
class Pausable(Protocol):
    """A connector that is told."""

    def set_paused(self, paused: bool) -> None:
        """The scheduler is paused from now on, or is no longer."""


def notice_pauses() -> None:
    """From now on every scheduler of this process tells its connectors."""
    set_state = Scheduler.set_pause_state
    if hasattr(set_state, "__wrapped__"):
        return

    @functools.wraps(set_state)
    def noticed(self: Scheduler, pause_state: PauseState) -> None:
        set_state(self, pause_state)
        outer: Any = self.connector
        for connector in (outer, *getattr(outer, "sub_connectors", ())):
            if isinstance(connector, Pausable):
                connector.set_paused(pause_state != PauseState.UNPAUSED)

    Scheduler.set_pause_state = noticed
