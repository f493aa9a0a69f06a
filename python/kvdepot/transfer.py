"""Transfer engine: batches of reads and writes between processes and hosts.

docs/transfer.md has the options and guarantees.

Example:
    with Engine() as engine:
        memory = engine.register([buffer])
        remote = engine.open("10.0.0.2:7000", "pages")
        task = engine.submit([("read", buffer, remote, 0, len(buffer))])
        assert task.wait(), task.errors
"""

from typing import Final

from kvdepot._native import Published, Registered
from kvdepot._native import TransferEngine as Engine
from kvdepot._native import TransferRemote as Remote
from kvdepot._native import TransferTask as Task

STATUSES: Final = (
    "pending",
    "done",
    "local",
    "range",
    "rights",
    "unknown",
    "checksum",
    "failed",
    "lost",
    "timed_out",
    "cancelled",
    "closed",
)
"""Names of the bytes of `Task.statuses`."""

__all__ = ["STATUSES", "Engine", "Published", "Registered", "Remote", "Task"]
