"""What an engine does for others (`kv_role`), and requests whose prompt another engine computes.

With disaggregated prefill a proxy sends a request to a producer first, for one token, with
`do_remote_decode` among its `kv_transfer_params`; what comes back with the answer it sends with the
request to a consumer, which finds the prompt's blocks in the depot of both. The words are those of
vLLM's `NixlConnector`, so that its proxies do, and one of kvdepot's own. Beside another connector,
which may return vLLM's words too, it is kvdepot's own alone: vLLM ends the engine where two
connectors return the same word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# That the prompt's blocks were stored by another engine, or are about to be.
STORED = "kvdepot_stored"
PREFILLED = {"do_remote_prefill": True, "do_remote_decode": False}


@dataclass(frozen=True)
class Role:
    """Whether blocks are loaded, and stored."""

    loads: bool = True
    stores: bool = True


def of(kv_transfer_config: Any) -> Role:
    """A producer stores, a consumer loads, and `kv_both` does both."""
    return Role(kv_transfer_config.is_kv_consumer, kv_transfer_config.is_kv_producer)


def is_prefilled(params: dict[str, Any] | None, *, alone: bool) -> bool:
    """Whether a request says that another engine has stored its prompt. Beside another connector,
    vLLM's own words are meant for that one."""
    if not params:
        return False
    return bool(params.get(STORED) or (alone and params.get("do_remote_prefill")))


def handed_on(params: dict[str, Any] | None, role: Role, *, alone: bool) -> dict[str, Any] | None:
    """What goes back with the answer to a request that another engine goes on with."""
    if not (params and params.get("do_remote_decode") and role.stores):
        return None
    return {STORED: True} | (PREFILLED if alone else {})
