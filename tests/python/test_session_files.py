"""Sessions that are files: `kvdepot.sessions.open_files` and `open_file`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kvdepot
import kvdepot.sessions
import pytest

ROW = 100
PIECE = 256
MODEL = {"model": "m", "dtype": "f16", "piece_tokens": PIECE, "weights": "w"}


def rows_of(tokens: list[int]) -> list[bytes]:
    """A buffer for each piece; each token's row is that token's number."""
    runs = [tokens[at : at + PIECE] for at in range(0, len(tokens), PIECE)]
    return [bytes(token % 251 for token in run for _ in range(ROW)) for run in runs]


def open_files(path: Path, **more: object) -> kvdepot.sessions.SessionFiles:
    options: dict[str, object] = {**MODEL, "capacity": "64MiB", **more}
    return kvdepot.sessions.open_files(path, **options)  # type: ignore[arg-type]


def bring_back(file: kvdepot.sessions.SessionFile) -> tuple[list[bytearray], list[bytearray]]:
    rows = [bytearray(size) for _, _, size in file.pieces]
    objects = [bytearray(size) for _, size in file.objects]
    said = {"cached_tokens": len(file.tokens), "cache_write_tokens": 0, "whole": True}
    assert file.restore(rows, objects) == said
    return rows, objects


def test_a_session_is_saved_as_a_file_found_and_brought_back(tmp_path: Path) -> None:
    store = open_files(tmp_path / "made")
    tokens = list(range(1000))
    saved = store.save(
        tokens, rows_of(tokens), objects={"logits": b"x" * 500}, text=b"a text", note="n"
    )
    assert (saved["cached_tokens"], saved["cache_write_tokens"]) == (0, 1000)
    path = tmp_path / "made" / f"{saved['id']}.kvs"
    assert path.stat().st_size == saved["bytes_written"]

    (found,) = store.lookup([*tokens, 7])
    assert (found.id, found.tokens, found.text) == (saved["id"], tokens, b"a text")
    assert found.pieces[-1] == (768, 1000, 232 * ROW)
    assert (found.objects, found.model, found.note) == ([("logits", 500)], "m", "n")
    rows, objects = bring_back(found)
    assert [bytes(row) for row in rows] == rows_of(tokens)
    assert objects == [bytearray(b"x" * 500)]
    assert store.lookup_text(b"a text, and more")[0].id == saved["id"]
    assert store.lookup(tokens[:500]) == []
    assert [one["tokens"] for one in store.list()] == [1000]

    # Another opener, another model, and the file alone.
    assert open_files(tmp_path / "made").lookup(tokens)[0].id == saved["id"]
    assert open_files(tmp_path / "made", weights="other").lookup(tokens) == []
    alone = kvdepot.sessions.open_file(path)
    assert alone.path == str(path)
    assert bring_back(alone)[0] == rows
    assert alone.copy_to(tmp_path / "copy") == alone.bytes
    other = open_files(tmp_path / "other")
    assert other.import_file(tmp_path / "copy") == saved["id"]
    assert other.export(saved["id"][:9], tmp_path / "again") == alone.bytes
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    store.remove(saved["id"])
    assert store.lookup(tokens) == []


def test_a_serializer_says_a_state_whose_length_nobody_knows(tmp_path: Path) -> None:
    store = open_files(tmp_path)
    parts = [bytes([number]) * 700_001 for number in range(13)]

    def said() -> Iterator[bytes]:
        yield from parts

    saved = store.save([1, 2, 3], objects={"state": said(), "more": b"end"})
    (found,) = store.lookup([1, 2, 3, 4])
    assert found.pieces == []
    assert found.objects == [("state", 13 * 700_001), ("more", 3)]
    _, objects = bring_back(found)
    assert objects[0] == b"".join(parts)
    taken: list[bytes] = []
    found.read(0, taken.append)
    assert b"".join(taken) == b"".join(parts)
    assert max(map(len, taken)) <= 4 << 20
    assert found.verify() == []
    before = (tmp_path / f"{saved['id']}.kvs").read_bytes()

    # Longer or shorter than predicted, or an exception in the middle: nothing has changed.
    for predicted in (13 * 700_001 - 1, 13 * 700_001 + 1):
        with pytest.raises(kvdepot.InputError, match="the predicted size"):
            store.save([1, 2, 3], objects={"state": said()}, predicted=predicted)

    def fails() -> Iterator[bytes]:
        yield parts[0]
        raise RuntimeError("the engine's own trouble")

    with pytest.raises(RuntimeError, match="own trouble"):
        store.save([1, 2, 3], objects={"state": fails()})
    with pytest.raises(RuntimeError, match="own trouble"):
        found.read(0, lambda _: next(fails_at_once()))
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {f"{saved['id']}.kvs", ".kvdepot-sessions.lock"}
    assert (tmp_path / f"{saved['id']}.kvs").read_bytes() == before


def fails_at_once() -> Iterator[bytes]:
    raise RuntimeError("the engine's own trouble")
    yield b""


def test_one_that_rots_is_said_and_found_no_more(tmp_path: Path) -> None:
    store = open_files(tmp_path)
    tokens = list(range(600))
    store.save(tokens[:300], rows_of(tokens[:300]))
    saved = store.save(tokens, rows_of(tokens))
    path = tmp_path / f"{saved['id']}.kvs"
    whole = bytearray(path.read_bytes())
    whole[4096 + PIECE * ROW + 4096] ^= 1
    path.write_bytes(whole)
    found = store.lookup(tokens)[0]
    rows = [bytearray(size) for _, _, size in found.pieces]
    said = {"cached_tokens": PIECE, "cache_write_tokens": 0, "whole": False}
    assert store.restore(found, rows) == said
    assert [len(one.tokens) for one in store.lookup(tokens)] == [300]
    assert store.verify(saved["id"]) == ["piece 1"]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(kvdepot.Error, match="bytes"):
        kvdepot.sessions.open_file(path)


def test_nonsense_is_refused_with_its_name(tmp_path: Path) -> None:
    store = open_files(tmp_path)
    for arguments, match in (
        ({"reason": "why"}, "reason"),
        ({"objects": {"a": b""}}, "member|buffers|objects"),
        ({}, "members"),
    ):
        with pytest.raises(kvdepot.InputError, match=match):
            store.save([1], **arguments)  # type: ignore[arg-type]
    with pytest.raises(kvdepot.InputError, match="tokens"):
        store.save([], objects={"a": b"x"})
    with pytest.raises(kvdepot.InputError, match="durability"):
        open_files(tmp_path, durability="never")
    with pytest.raises(kvdepot.InputError, match="capacity"):
        open_files(tmp_path / "small", capacity="8KiB").save([1], objects={"a": b"x" * 9000})
    with pytest.raises(kvdepot.InputError, match=r"rows: 1 pieces .* 3 pieces, one per"):
        store.save(list(range(2 * PIECE + 1)), [bytes(9)])
    (tmp_path / "a file").write_bytes(b"x")
    with pytest.raises(kvdepot.InputError, match=r"path: .* a directory"):
        open_files(tmp_path / "a file")
    with pytest.raises(kvdepot.Error, match="nowhere"):
        kvdepot.sessions.open_file(tmp_path / "nowhere")
    assert list(tmp_path.glob("*.kvs")) == []
