"""Saved conversations, for engines that keep one state and extend it.

`open` is `Sessions`, `open_file` is `SessionFile`, `open_files` is `SessionFiles`, and `policy` is
`Policy`. docs/sessions.md has the guarantees.

Example:
    depot = kvdepot.open("Posix", {"posix": {"path": "/mnt/kv", "capacity": "64GiB"}})
    store = kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=256)
    store.save(tokens, lambda runs: [rows_of(first, end) for first, end in runs])
    for found in store.lookup(prompt):
        ...
"""

from typing import Final

from kvdepot._native import SessionCatalogue as Catalogue
from kvdepot._native import SessionFile, SessionFiles, Sessions
from kvdepot._native import SessionFound as Found
from kvdepot._native import SessionPolicy as Policy
from kvdepot._native import SessionSaver as Saver
from kvdepot._native import SessionSnapshot as Snapshot
from kvdepot._native import SessionStream as Stream

REASONS: Final = ("cold", "continued", "evict", "shutdown", "asked")
"""Reasons for a checkpoint."""

open = Sessions
open_file = SessionFile
open_files = SessionFiles
policy = Policy

__all__ = [
    "REASONS",
    "Catalogue",
    "Found",
    "Policy",
    "Saver",
    "SessionFile",
    "SessionFiles",
    "Sessions",
    "Snapshot",
    "Stream",
    "open",
    "open_file",
    "open_files",
    "policy",
]
