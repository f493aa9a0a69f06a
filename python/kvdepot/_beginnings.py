"""What a depot has of the beginning of a prompt, for engines whose states grow by appending."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import kvdepot
import kvdepot.sessions


def best(
    store: kvdepot.sessions.Sessions,
    tokens: list[int],
    most: int,
    *,
    can_be_cut: bool,
    min_tokens: int,
    logger: logging.Logger,
    passed_over: Collection[str] = (),
) -> kvdepot.sessions.Found | None:
    """The session with the most that is of use for these tokens, at most `most` of them: it may be
    longer than that by what is to be cut off. None where that is less than `min_tokens`. Those
    whose names are in `passed_over` are of no use.

    A state that can be cut may go on from any of its tokens; one that cannot, from its last.
    """
    if not can_be_cut:
        found = _longest(store, tokens[:most], passed_over)
        return found if found and len(found.tokens) >= min_tokens else None
    found = _longest(store, tokens, passed_over)
    usable = min(len(found.tokens), most) if found else 0
    # Pieces that another conversation, or a longer one, begins with are made a session of their
    # own: that writes a manifest.
    shared = store.prefix(tokens[:most])
    if shared > usable and shared >= min_tokens:
        other = _session_of(store, tokens[:shared], passed_over, logger)
        found, usable = (other, shared) if other else (found, usable)
    return found if usable >= min_tokens else None


def _longest(
    store: kvdepot.sessions.Sessions, tokens: list[int], passed_over: Collection[str]
) -> kvdepot.sessions.Found | None:
    found = next(iter(store.lookup(tokens, 1)), None)
    if found is None or found.id not in passed_over:
        return found
    others = store.lookup(tokens, 1 + len(passed_over))
    return next((other for other in others if other.id not in passed_over), None)


def _session_of(
    store: kvdepot.sessions.Sessions,
    tokens: list[int],
    passed_over: Collection[str],
    logger: logging.Logger,
) -> kvdepot.sessions.Found | None:
    def gone(runs: list[tuple[int, int]]) -> Any:
        raise LookupError(runs)

    try:
        store.save(tokens, gone, note="shared beginning")
    except (LookupError, kvdepot.Error) as error:
        logger.info("a stored prefix of %d tokens is not used: %r", len(tokens), error)
        return None
    return _longest(store, tokens, passed_over)
