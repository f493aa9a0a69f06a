"""Tells kvdepot's connectors whether vLLM's scheduler is paused.

`/pause` and `/sleep` wait until the engine has no work. Bringing a metric up to date is no such
work, but vLLM reports a pause to no connector.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from kvdepot.vllm import compat


@runtime_checkable
class Pausable(Protocol):
    """A connector that is told."""

    def set_paused(self, paused: bool) -> None:
        """The scheduler is paused from now on, or is no longer."""


def notice_pauses() -> None:
    """From now on every scheduler of this process tells its connectors."""
    compat.on_pause(_tell)


def _tell(connector: Any, paused: bool) -> None:
    if isinstance(connector, Pausable):
        connector.set_paused(paused)
