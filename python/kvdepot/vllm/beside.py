"""What the keys and values of a request's block depend on beside its tokens.

vLLM's block hash covers the tokens, the adapter's name and the images' hashes. It does not cover
the adapter's files, nor the options that say how an adapter is applied and how an image is read.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvdepot.engine import options
from kvdepot.engine import weights as engine_weights
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import options as vllm_options
from kvdepot.vllm import worker_calls
from kvdepot.vllm.adapters import AdapterFingerprints
from kvdepot.vllm.compat import OffloadKey

# The bytes of vLLM's key before those of its KV group.
_HASH_OF_KEY = itemgetter(slice(None, -4))


# Of some 260 bytes each.
HASHES = 1 << 18


class Hashes:
    """vLLM's hashes of blocks whose keys are made of more than the hash, of the latest `HASHES`."""

    def __init__(self) -> None:
        # The first of a plain dict is found slowly where others before it were deleted.
        self._of: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, key: bytes, block_hash: bytes) -> None:
        """A block of this hash is stored under this key. It is the latest one from now on."""
        self._of[key] = block_hash
        self._of.move_to_end(key)
        if len(self._of) > HASHES:
            self._of.popitem(last=False)

    def of(self, key: bytes) -> bytes:
        """The hash, as far as it is known; of most blocks it is the key. Any thread may ask."""
        return self._of.get(key, key)


@dataclass(frozen=True)
class Beside:
    """What is added to the hashes of a request's blocks."""

    adapter: bytes = b""
    """Fingerprint of the adapter's files, and of the options that apply it."""
    media: bytes = b""
    """Fingerprint of the options and files that images, audio and video are read by."""
    features: Sequence[Any] = ()
    """vLLM's list of the request's images and so on, in order; a session's may grow. Blocks that
    end behind the first token of the first one depend on `media`."""
    hashes: Hashes | None = None
    """Where the hashes of keys are noted that differ from them, if somebody wants them."""

    def key(self, block_hash: bytes, end_token: int | None) -> bytes:
        """The key of a block that ends at that token; None for a block whose place is unknown."""
        media = b""
        if self.features:
            begin = self.features[0].mm_position.offset
            media = self.media if end_token is None or end_token > begin else b""
        if not self.adapter and not media:
            return block_hash
        # Both have a fixed length.
        parts = len(self.adapter).to_bytes(8, "little") + self.adapter + media
        made = hashlib.sha256(block_hash + parts).digest()
        if self.hashes is not None:
            self.hashes.note(made, block_hash)
        return made

    def keys(self, keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int]) -> list[bytes]:
        """The keys of blocks that vLLM names so; `positions` has the tokens that they end at."""
        hashes = list(map(_HASH_OF_KEY, keys))
        if not self.adapter and not self.features:
            return hashes
        pairs = zip(hashes, keys, strict=True)
        return [self.key(block_hash, positions.get(key)) for block_hash, key in pairs]


NOTHING = Beside()


class Fingerprints:
    """What an engine's requests have beside their tokens."""

    def __init__(self, vllm_config: Any, weights: str) -> None:
        """`weights` is the setting of that name."""
        found = vllm_options.of(vllm_config)
        self._of_adapters = AdapterFingerprints(engine_weights.mode_of(weights))
        self._adapter_options = found.adapter
        self.hashes: Hashes | None = None
        """Where the hashes of keys are noted that differ from them; the connector sets it."""
        worker_calls.listen(vllm_config, self)
        self._media = b""
        if vllm_config.model_config.multimodal_config is not None:
            files = vllm_namespace.processor(vllm_config)
            self._media = options.digest_of([files, found.media]).encode()

    def of(self, request: Any) -> Beside:
        """For one of vLLM's requests; to be called once, before its first block is looked up."""
        adapter = b""
        if request.lora_request is not None:
            files = self._of_adapters.of(request.lora_request)
            adapter = options.digest_of([files, self._adapter_options]).encode()
        if not adapter and not self._media:
            return NOTHING
        return Beside(adapter, self._media, request.mm_features, self.hashes)

    def before_call(self, executor: Any, method: Any, arguments: Sequence[Any]) -> None:
        """An adapter that is loaded before its first request is identified before it is read."""
        if method == "add_lora" and arguments:
            self._of_adapters.of(arguments[0])

    def after_call(self, method: str) -> None:
        """As far as adapters go, no other method counts."""

    def reset(self) -> None:
        """vLLM's own cache is empty."""
        self._of_adapters.reset()
