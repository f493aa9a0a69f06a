"""How an argument is refused: the field, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import kvdepot


def refused(field: str, value: Any, allowed: str) -> kvdepot.InputError:
    """The error that says so."""
    return kvdepot.InputError(f"{field} is {value}; allowed: {allowed}")
