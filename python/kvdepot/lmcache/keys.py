"""LMCache's keys as kvdepot's identities, in both directions.

LMCache names a chunk `model@rank@group@hash[@salt]`: the native plug-in gets that text, the
Python adapter the same fields as an object. The chunk's hash becomes the key and everything else
the namespace, so that both surfaces share every block. A text of another form gets the SHA-256 of
itself as its key, in a namespace that has nothing else: it is served alike, and cannot be listed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any, NamedTuple

KEY_BYTES = 32


class Name(NamedTuple):
    """Everything in LMCache's key that is not the chunk's hash."""

    model: str
    rank: int
    group: int
    salt: str
    hash_bytes: int
    """Bytes of the hash: shorter ones are padded, and must not meet longer ones."""

    def fields(self, tenant: str | None, weights: str | None) -> dict[str, Any]:
        """The arguments of `Depot.namespace`.

        LMCache's keys say neither the element type nor the tokens of a chunk, nor which weights
        computed it. The hash covers the tokens; for the rest there are `tenant` and `weights`,
        texts of the operator's. The salt may be a secret, and tools do not show it; "@" occurs in
        none.
        """
        salts = self.salt if tenant is None else f"{self.salt}@{tenant}"
        return {
            "model": self.model,
            "dtype": "opaque",
            "block_tokens": 1,
            "layout": "lmcache",
            "group": f"{self.group:x}",
            "world": f"kv_rank {self.rank:08x}",
            "hash": f"lmcache, {self.hash_bytes} bytes",
            "salt": salts or None,
            "weights": weights,
        }

    def encode(self) -> bytes:
        """The name as it is kept beside the blocks."""
        return json.dumps(self._asdict(), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> Name:
        """The name that `encode` wrote; ValueError, TypeError or KeyError for anything else."""
        found = json.loads(text)
        model, rank, group, salt, hash_bytes = (found[field] for field in cls._fields)
        return cls(str(model), int(rank), int(group), str(salt), int(hash_bytes))


def whole(tenant: str | None, weights: str | None) -> dict[str, Any]:
    """The namespace of keys whose text is not LMCache's."""
    salt = None if tenant is None else f"@{tenant}"
    return {
        "model": "lmcache",
        "dtype": "opaque",
        "block_tokens": 1,
        "layout": "lmcache",
        "hash": "sha256 of the whole key",
        "salt": salt,
        "weights": weights,
    }


def names(tenant: str | None, weights: str | None) -> dict[str, Any]:
    """The namespace that holds the names of the others, by their digests."""
    return whole(tenant, weights) | {"layout": "lmcache names", "hash": "digest"}


def warn_of_names(logger: logging.Logger, weights: str) -> None:
    """Logs what no setting has named; `weights` is "the weights, " if that includes the weights,
    else empty."""
    logger.warning(
        "weights: not set; models that differ only in %sRoPE settings, quantization or adapters "
        "share blocks, because LMCache's keys lack these; set weights to a text that "
        "identifies the model",
        weights,
    )


def key(chunk_hash: bytes) -> bytes:
    """The key of a hash of at most 32 bytes."""
    return chunk_hash.ljust(KEY_BYTES, b"\0")


def key_of_text(text: str) -> bytes:
    """The key of a text that is not of LMCache's form."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def name_of(model: str, rank: int, group: int, salt: str, hash_bytes: int) -> Name | None:
    """The name, if it and its hash can be told from the key that it makes."""
    if not model or not 0 < hash_bytes <= KEY_BYTES or "@" in model + salt:
        return None
    try:
        (model + salt).encode()
    except UnicodeEncodeError:
        # No field of a namespace can hold it.
        return None
    return Name(model, rank, group, salt, hash_bytes)


def text_of(name: Name, chunk_hash: bytes) -> str:
    """LMCache's text of a key."""
    text = f"{name.model}@{name.rank:08x}@{name.group:x}@{chunk_hash.hex()}"
    return f"{text}@{name.salt}" if name.salt else text


def split(text: str) -> tuple[tuple[str, ...], str]:
    """What the keys of one name have in common as text, and the hash."""
    model, *rest = text.split("@", 4)
    if len(rest) < 3:
        return (), text
    rank, group, chunk, *salt = rest
    return (model, rank, group, str(len(chunk)), *salt), chunk


def hash_of(chunk: str) -> bytes | None:
    """The bytes of a hash, if LMCache would write them so."""
    try:
        found = bytes.fromhex(chunk)
    except ValueError:
        return None
    return found if found.hex() == chunk else None


def parse(text: str) -> tuple[Name, bytes] | None:
    """Name and hash of a text, if LMCache would write them as just this text."""
    try:
        model, rank, group, chunk, *salt = text.split("@", 4)
        chunk_hash = bytes.fromhex(chunk)
        name = name_of(model, int(rank, 16), int(group, 16), "".join(salt), len(chunk_hash))
    except ValueError:
        return None
    if name is None or text_of(name, chunk_hash) != text:
        return None
    return name, chunk_hash
