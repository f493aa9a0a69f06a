"""Sessions from Python that are written chunk by chunk, or in the background, and policies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvdepot
import kvdepot.sessions
import pytest
from helpers import ctrl_c

PIECE = 64
ROW = 48
Rows = Callable[[list[tuple[int, int]]], list[bytes]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvdepot.sessions.Sessions]:
    settings = {"posix": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}, "socket": "off"}
    with kvdepot.open("Posix", settings) as depot:
        yield kvdepot.sessions.open(depot, model="m", dtype="f16", piece_tokens=PIECE)


def row(token: int, at: int) -> bytes:
    return hashlib.shake_128(f"{token} {at}".encode()).digest(ROW)


def rows(tokens: list[int], first: int, end: int) -> bytes:
    return b"".join(row(tokens[at], at) for at in range(first, end))


def asked(tokens: list[int]) -> Rows:
    return lambda runs: [rows(tokens, *run) for run in runs]


def is_whole(store: kvdepot.sessions.Sessions, tokens: list[int]) -> bool:
    found = store.lookup(tokens, 1)
    if not found or found[0].tokens != tokens:
        return False
    pieces = [bytearray(size) for _, _, size in found[0].pieces]
    objects = [bytearray(size) for _, size in found[0].objects]
    said = store.restore(found[0], pieces, objects)
    assert said == {"cached_tokens": len(tokens), "cache_write_tokens": 0, "whole": True}
    return b"".join(pieces) == rows(tokens, 0, len(tokens))


def blocks(tmp_path: Path) -> int:
    return sum(1 for path in (tmp_path / "kv" / "blocks").rglob("*") if path.is_file())


def test_a_session_is_streamed(store: kvdepot.sessions.Sessions) -> None:
    tokens = list(range(300))
    with store.stream() as stream:
        for first in range(0, 300, 70):
            end = min(first + 70, 300)
            stream.append(tokens[first:end], [rows(tokens, first, end)])
        assert (stream.tokens, stream.cached_tokens) == (tokens, 0)
        assert store.list() == []
        saved = stream.commit(text=b"said", reason="continued", objects={"logits": b"\x01" * 40})
    assert (saved["cached_tokens"], saved["cache_write_tokens"]) == (0, 300)
    assert is_whole(store, tokens)
    assert store.lookup_text(b"said, and more")[0].id == saved["id"]
    with store.stream([*tokens, 7]) as stream:
        assert stream.cached_tokens == 256
        assert stream.room == PIECE
        longer = [*tokens, 7]
        stream.append(longer[256:], [rows(longer, 256, 280), bytearray(rows(longer, 280, 301))])
        saved = stream.commit()
    assert (saved["cached_tokens"], saved["cache_write_tokens"]) == (256, 45)
    assert is_whole(store, longer)


def test_a_stream_that_is_left_leaves_nothing(
    store: kvdepot.sessions.Sessions, tmp_path: Path
) -> None:
    tokens = list(range(300))

    def fail() -> None:
        with store.stream() as stream:
            stream.append(tokens, [rows(tokens, 0, 300)])
            assert blocks(tmp_path) == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert blocks(tmp_path) == 0
    stream = store.stream()
    with pytest.raises(kvdepot.InputError, match="rows"):
        stream.append([1, 2], [b""])
    with pytest.raises(kvdepot.InputError, match="noted"):
        stream.commit(noted="what?")  # type: ignore[call-arg]
    with pytest.raises(kvdepot.InputError, match="reason"):
        stream.commit(reason="because")
    stream.abort()
    with pytest.raises(kvdepot.InputError, match="ended"):
        stream.append([1], [b"x"])


def test_a_payload_that_is_not_as_long_as_predicted_leaves_nothing(
    store: kvdepot.sessions.Sessions, tmp_path: Path
) -> None:
    tokens = list(range(300))

    def chunks(more: int) -> Callable[[list[tuple[int, int]]], Iterator[bytes]]:
        def written(runs: list[tuple[int, int]]) -> Iterator[bytes]:
            payload = b"".join(rows(tokens, *run) for run in runs)
            payload = payload + b"x" * more if more > 0 else payload[: len(payload) + more]
            for at in range(0, len(payload), 1000):
                yield payload[at : at + 1000]

        return written

    for more in (1, 4000, -1, -9000):
        with pytest.raises(kvdepot.Error, match="expected"):
            store.save_chunks(tokens, ROW, chunks(more))
        assert blocks(tmp_path) == 0

    def fails(runs: list[tuple[int, int]]) -> Iterator[bytes]:
        yield rows(tokens, 0, 200)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.save_chunks(tokens, ROW, fails)
    with pytest.raises(ZeroDivisionError):
        store.save_chunks(tokens, lambda first, end: 1 // 0, chunks(0))
    with pytest.raises(kvdepot.InputError, match="0 bytes"):
        store.save_chunks(tokens, 0, chunks(0))
    assert (store.list(), blocks(tmp_path)) == ([], 0)
    saved = store.save_chunks(tokens, lambda first, end: (end - first) * ROW, chunks(0), note="n")
    assert saved["cache_write_tokens"] == 300
    assert is_whole(store, tokens)


def test_the_engine_goes_on_while_it_is_saved(store: kvdepot.sessions.Sessions) -> None:
    tokens = list(range(500))
    memory = bytearray(rows(tokens, 0, 500))
    view = memoryview(memory)
    with kvdepot.sessions.Saver(store, memory="1MiB", pace="200KiB") as saver:
        snapshot = saver.begin(
            tokens, lambda runs: [view[first * ROW : end * ROW] for first, end in runs]
        )
        assert snapshot.left == 500 * ROW
        copied = 0
        while snapshot.left:
            step = snapshot.step(bytes=1000)
            assert step["copied"] <= 1000
            copied += step["copied"]
        assert copied == 500 * ROW
        # All was copied: the memory is the engine's again.
        memory[:] = bytes(len(memory))
        saved = snapshot.wait(timeout=60)
        assert snapshot.progress()["over"]
        assert saved["cache_write_tokens"] == 500
        assert is_whole(store, tokens)
        longer = tokens + tokens
        saver.begin(longer, asked(longer)).finish()
    # The end of the block has waited for it.
    assert is_whole(store, longer)


def test_room_is_bounded_and_what_is_given_up_leaves_nothing(
    store: kvdepot.sessions.Sessions, tmp_path: Path
) -> None:
    tokens = list(range(640))
    saver = kvdepot.sessions.Saver(store, memory=3 * PIECE * ROW, pace="1KiB")
    with pytest.raises(kvdepot.Error, match="not enough memory for the save"):
        saver.begin(tokens, asked(tokens), whole=True)
    snapshot = saver.begin(tokens, asked(tokens))
    assert snapshot.step(seconds=1.0)["full"]
    assert saver.memory_used <= 3 * PIECE * ROW
    with pytest.raises(TimeoutError):
        snapshot.finish(timeout=0.05)
    with pytest.raises(TimeoutError):
        snapshot.wait(timeout=0.05)
    saver.cancel()
    with pytest.raises(kvdepot.Error, match="cancelled"):
        snapshot.step(bytes=1)
    with pytest.raises(kvdepot.Error, match="cancelled"):
        snapshot.wait()
    assert (store.list(), blocks(tmp_path)) == ([], 0)
    with pytest.raises(kvdepot.Error, match="closed"):
        saver.begin(tokens, asked(tokens))
    with pytest.raises(kvdepot.InputError, match="exactly one of bytes and seconds"):
        snapshot.step()
    with pytest.raises(kvdepot.InputError, match="both policy and save"):
        saver.begin(tokens, asked(tokens), save=1)


def test_ctrl_c_ends_a_wait_and_the_save_is_cancelled(
    store: kvdepot.sessions.Sessions, tmp_path: Path
) -> None:
    tokens = list(range(640))

    def saves() -> None:
        with kvdepot.sessions.Saver(store, memory="1MiB", pace="64B") as saver:
            snapshot = saver.begin(tokens, asked(tokens))
            snapshot.finish()
            # By its pace it would take minutes.
            snapshot.wait()

    ctrl_c(saves, limit=40)
    assert (store.list(), blocks(tmp_path)) == ([], 0)


def test_a_policy_is_told_what_became_of_a_save(store: kvdepot.sessions.Sessions) -> None:
    policy = kvdepot.sessions.policy(
        min_tokens=10, token_bytes=ROW, fixed_bytes="1MiB", write_budget_hour="4MiB"
    )
    tokens = list(range(640))
    saver = kvdepot.sessions.Saver(store, memory="1MiB")
    policy.start(640)
    due = policy.switch(640)
    assert due is not None
    left = policy.bytes_left()
    assert left is not None
    snapshot = saver.begin(tokens, asked(tokens), policy=policy, save=due["save"])
    snapshot.finish()
    saved = snapshot.wait()
    # What was granted and not written is given back.
    assert policy.bytes_left() == left + due["bytes"] - saved["bytes_written"]
    with pytest.raises(kvdepot.Error, match="not in progress"):
        policy.failed(due["save"])
    longer = [*tokens, *tokens]
    policy.start(1280, live=640)
    due = policy.switch(1280)
    assert due is not None
    # It is dropped before all was copied.
    del snapshot
    snapshot = saver.begin(longer, asked(longer), policy=policy, save=due["save"])
    before = policy.bytes_left()
    assert before is not None
    del snapshot
    deadline = time.monotonic() + 60
    while policy.bytes_left() != before + due["bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    saver.close()


def test_a_save_that_is_refused_at_its_beginning_ends_its_grant(
    store: kvdepot.sessions.Sessions,
) -> None:
    policy = kvdepot.sessions.policy(
        min_tokens=10, token_bytes=ROW, fixed_bytes="1MiB", write_budget_hour="4MiB"
    )
    tokens = list(range(640))
    whole = policy.bytes_left()
    saver = kvdepot.sessions.Saver(store, memory="1KiB")

    def fails(runs: list[tuple[int, int]]) -> list[bytes]:
        raise KeyError("no rows")

    # No room, rows that do not come, a wrong argument.
    refusals: list[tuple[Rows, dict[str, object]]] = [
        (asked(tokens), {}),
        (fails, {}),
        (asked(tokens), {"within": -1.0}),
        (asked(tokens), {"reason": "nobody's"}),
    ]
    for given, more in refusals:
        policy.start(640)
        due = policy.switch(640)
        assert due is not None
        assert policy.bytes_left() != whole
        with pytest.raises((kvdepot.Error, KeyError)):
            saver.begin(tokens, given, policy=policy, save=due["save"], **more)
        assert policy.bytes_left() == whole
    saver.close()


def test_a_policy_that_starts_again_knows_what_was_written() -> None:
    policy = kvdepot.sessions.policy(
        write_budget_hour="600MiB", write_budget_day="1GiB", fixed_bytes="1KiB", whole=True
    )
    settings = policy.settings
    assert (settings["write_budget_hour"], settings["whole"]) == (600 << 20, True)
    again = kvdepot.sessions.policy(**settings)
    assert again.settings == settings
    assert kvdepot.sessions.policy().bytes_left() is None
    assert again.bytes_left(at=5000.0) == 600 << 20
    again.recall(500 << 20, at=4000.0)
    assert again.bytes_left(at=5000.0) == 100 << 20
    assert again.switch(20_000, at=5000.0) == {"declined": "write budget"}
    assert again.switch(60_000, at=5000.0) == {"declined": "larger than a whole write budget"}
    again.lost(0)


def test_a_catalogue_says_what_goes() -> None:
    catalogue = kvdepot.sessions.Catalogue()
    for number, tokens in enumerate((10_000, 20_000, 30_000), 1):
        catalogue.insert(
            number, tokens=tokens, bytes=100, parent=number - 1 or None, used=1000.0 * number
        )
    catalogue.set_other(1, 50)
    assert catalogue.bytes == 350
    # The one that two longer ones have superseded goes first.
    assert catalogue.make_room(50, 350, at=5000.0) == [1]
    assert catalogue.pin(1)
    assert catalogue.make_room(50, 350, at=5000.0) == [2]
    assert catalogue.make_room(300, 350, at=5000.0) is None
    assert catalogue.unpin(1)
    assert not catalogue.unpin(1)
    assert catalogue.hit(2, at=5000.0)
    assert catalogue.remove(1)
    assert not catalogue.remove(1)
    first = catalogue.entries()[0]
    assert (first["id"], first["hits"], first["parent"], first["used"]) == (2, 1, None, 5000.0)
    assert catalogue.make_room(0, "1GiB") == []
    with pytest.raises(kvdepot.InputError, match="reason"):
        catalogue.insert(9, tokens=1, bytes=1, reason="asked")
