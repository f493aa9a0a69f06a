"""Whole conversations from Python: saved, found, brought back, moved, and when to save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvdepot
import kvdepot.sessions
import pytest

PIECE = 64
ROW = 48


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvdepot.sessions.Sessions]:
    settings = {"posix": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}, "socket": "off"}
    with kvdepot.open("Posix", settings) as depot:
        yield kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=PIECE)


def rows(tokens: list[int], first: int, end: int) -> bytes:
    def one(at: int) -> bytes:
        return hashlib.shake_128(repr(tokens[: at + 1]).encode()).digest(ROW)

    return b"".join(one(at) for at in range(first, end))


def save(store: kvdepot.sessions.Sessions, tokens: list[int], **more: object) -> dict:
    def asked(runs: list[tuple[int, int]]) -> list[bytes]:
        return [rows(tokens, *run) for run in runs]

    return store.save(tokens, asked, **more)


def restore(store: kvdepot.sessions.Sessions, found: kvdepot.sessions.Found) -> dict:
    pieces = [bytearray(size) for _, _, size in found.pieces]
    objects = [bytearray(size) for _, size in found.objects]
    said = store.restore(found, pieces, objects)
    if said["whole"]:
        for piece, (first, end, _) in zip(pieces, found.pieces, strict=True):
            assert piece == rows(found.tokens, first, end)
    return said


def test_a_conversation_is_saved_found_and_brought_back(
    store: kvdepot.sessions.Sessions,
) -> None:
    tokens = list(range(300))
    saved = save(store, tokens, objects={"logits": b"\x01" * 40}, text=b"what was said")
    assert (saved["cached_tokens"], saved["cache_write_tokens"]) == (0, 300)
    more = save(store, tokens + list(range(100)), reason="continued", note="a")
    assert more["cache_write_tokens"] == 400 - 256
    prompt = tokens + list(range(150))
    longest, shorter = store.lookup(prompt)
    assert (len(longest.tokens), len(shorter.tokens)) == (400, 300)
    said = {"cached_tokens": 400, "cache_write_tokens": 0, "whole": True}
    assert restore(store, longest) == said
    assert restore(store, shorter)["cached_tokens"] == 300
    assert store.lookup_text(b"what was said, and more")[0].id == saved["id"]
    assert store.text(saved["id"]) == b"what was said"
    assert {row["reason"] for row in store.list()} == {"asked", "continued"}
    assert store.verify(more["id"][:10]) == []
    assert store.prefix(prompt) == 384


def test_it_goes_to_a_file_and_comes_back(store: kvdepot.sessions.Sessions, tmp_path: Path) -> None:
    saved = save(store, list(range(100)))
    path = tmp_path / "one.kvs"
    assert store.export(saved["id"], path) == path.stat().st_size
    store.remove(saved["id"])
    assert store.list() == []
    assert store.import_file(path) == saved["id"]
    assert restore(store, store.lookup(list(range(100)))[0])["whole"]
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    with pytest.raises(kvdepot.Error, match="piece 1 fails checksum verification"):
        store.import_file(path)


def test_what_is_wrong_is_said_and_leaves_nothing(store: kvdepot.sessions.Sessions) -> None:
    tokens = list(range(100))
    with pytest.raises(kvdepot.InputError, match="reason"):
        save(store, tokens, reason="because")
    with pytest.raises(kvdepot.InputError, match="tokens"):
        save(store, [])
    for wrong in (-1, 1 << 32, "a"):
        with pytest.raises(kvdepot.InputError, match=r"tokens\[1\]: .* ID, 0 to"):
            save(store, [0, wrong])  # type: ignore[list-item]
        with pytest.raises(kvdepot.InputError, match=r"tokens\[0\]"):
            store.lookup([wrong])  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        store.save(tokens, lambda runs: 1 / 0)
    with pytest.raises(kvdepot.InputError, match="rows"):
        store.save(tokens, lambda runs: [b"x"])
    with pytest.raises(kvdepot.Error, match="no session"):
        store.remove("12")
    assert store.list() == []


@pytest.mark.parametrize("pieces", [0, -1, (1 << 20) + 1, "256"])
def test_pieces_that_cannot_be_are_refused_by_their_name(tmp_path: Path, pieces: int) -> None:
    settings = {"posix": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}, "socket": "off"}
    of: Any = {"model": "m", "dtype": "f16", "piece_tokens": pieces}
    match = f"piece_tokens: '?{pieces}'? .* 1 to 1048576"
    with (
        kvdepot.open("Posix", settings) as depot,
        pytest.raises(kvdepot.InputError, match=match),
    ):
        kvdepot.sessions.open(depot, **of)
    with pytest.raises(kvdepot.InputError, match=match):
        kvdepot.sessions.open_files(tmp_path / "files", capacity="1MiB", **of)


def test_a_policy_says_when_a_checkpoint_is_due() -> None:
    policy = kvdepot.sessions.policy(disk_space="1GiB", write_budget_hour="600MiB")
    policy.start(25_000)
    assert policy.next_stop() is not None
    assert policy.prefill(5000, at=0.0) is None
    due = policy.prefill(24_576, at=1.0)
    assert due is not None
    assert (due["reason"], due["tokens"]) == ("cold", 24_576)
    policy.saved(due["save"], due["bytes"], at=2.0)
    # Another conversation: the hour has no room for it.
    policy.start(25_000)
    late = policy.switch(24_000, at=3.0)
    assert late == {"declined": "write budget"}
    with pytest.raises(kvdepot.InputError, match="disk_space"):
        kvdepot.sessions.policy(disk_space=0)
    with pytest.raises(kvdepot.Error):
        policy.saved(99, 1)
