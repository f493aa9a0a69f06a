"""A connector beside kvdepot's under vLLM's MultiConnector.

It moves nothing, and wants the handshake for itself, as those between engines do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass
class Address(KVConnectorHandshakeMetadata):
    rank: str = "mine"


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Offers nothing, stores nothing, and wants its own handshake."""

    heard: Any = None

    def get_handshake_metadata(self) -> Address:
        return Address()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if not all(isinstance(found, Address) for found in metadata.values()):
            raise ValueError("Neighbour expects Address for handshake metadata")
        self.heard = metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        # The words of vLLM's NixlConnector.
        goes_on = (request.kv_transfer_params or {}).get("do_remote_decode")
        words = {"do_remote_prefill": True, "do_remote_decode": False, "remote_port": 1}
        return False, words if goes_on else None
