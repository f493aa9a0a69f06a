"""What kvdepot finds in an arena, and what a reader written from the document alone finds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import kvdepot
import pytest
import xxhash
from kvd_forge import Forge
from kvd_reader import (
    LEAF,
    PAGE,
    RECORD,
    TABLE,
    Arena,
    BlockFile,
    NotAnArenaError,
    Record,
    open_medium,
    xxh3_64,
)

pytestmark = pytest.mark.integration

COMMAND = Path(sys.executable).parent / "kvdepot"
READER = Path(__file__).parent / "kvd_reader.py"
# Around a granule, around a leaf, one byte, and several leaves with a short tail.
LENGTHS = [1, 4095, 4096, 4097, 100_000, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 777]


def lines(*command: str | Path) -> list[dict[str, object]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_identity(blocks: list[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(blocks, key=lambda block: (block["namespace"], block["key"]))


def agree_on_blocks(path: Path) -> list[dict[str, object]]:
    """The blocks, after checking that both list the same with the same fields."""
    ours = by_identity(lines(COMMAND, "ls", path, "--blocks", "--json"))
    theirs = by_identity(lines(sys.executable, READER, path))
    fields = list(theirs[0]) if theirs else []
    assert [{field: block[field] for field in fields} for block in ours] == theirs
    return theirs


def agree_on_payloads(path: Path) -> set[str]:
    """The keys of the blocks that do not verify, after checking that both name the same."""
    *bad, totals = lines(COMMAND, "verify", path, "--json")
    *bad_there, totals_there = lines(sys.executable, READER, path, "--verify")
    assert {block["key"] for block in bad} == {block["key"] for block in bad_there}
    assert totals["blocks"] == totals_there["blocks"]
    assert totals["bad"] == totals_there["bad"]
    return {str(block["key"]) for block in bad_there}


def fill(path: Path, capacity: str, lengths: list[int], seed: int) -> list[bytes]:
    """Puts blocks of these lengths; returns their keys."""
    random = Random(seed)
    keys = [random.randbytes(32) for _ in lengths]
    with kvdepot.open("Dax", {"dax": {"path": str(path), "capacity": capacity}}) as depot:
        for name in ("model-a", "model-b"):
            ns = depot.namespace(model=name, dtype="float32", block_tokens=16)
            task = ns.put(keys, [random.randbytes(length) for length in lengths])
            assert all(task.wait(timeout=30))
    return keys


@pytest.fixture
def forge(tmp_path: Path, seed: int) -> Forge:
    path = tmp_path / "arena.kvd"
    fill(path, "1MiB", [5000, 20_000, 3, 8192], seed)
    return Forge(path)


def newest(forge: Forge) -> Record:
    return forge.survey()[0][-1]


def test_lengths_around_granules_and_leaves(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "arena.kvd"
    fill(path, "32MiB", LENGTHS, seed)
    blocks = agree_on_blocks(path)
    assert sorted(block["length"] for block in blocks) == sorted(LENGTHS * 2)
    assert agree_on_payloads(path) == set()


def test_large_arena_aligns_its_data_to_huge_pages(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "arena.kvd"
    fill(path, "64MiB", [LEAF, 10], seed)
    assert len(agree_on_blocks(path)) == 4
    with path.open("rb") as medium:
        assert Arena(medium).superblock.data % (2 << 20) == 0
    assert agree_on_payloads(path) == set()


def test_an_arena_that_evicted_and_removed(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "arena.kvd"
    random = Random(seed)
    with kvdepot.open("Dax", {"dax": {"path": str(path), "capacity": "1MiB"}}) as depot:
        ns = depot.namespace(model="m", dtype="float32", block_tokens=16)
        for _ in range(60):
            key = random.randbytes(32)
            data = random.randbytes(random.randrange(1, 60_000))
            assert ns.put([key], [data]).wait(timeout=30) == [True]
            if random.random() < 0.2:
                ns.remove([key])
    assert 0 < len(agree_on_blocks(path)) < 60
    assert agree_on_payloads(path) == set()


def test_the_directory_describes_the_namespaces(forge: Forge) -> None:
    with forge.path.open("rb") as medium:
        described = Arena(medium).namespaces()
    named = {str(block["namespace"]) for block in agree_on_blocks(forge.path)}
    assert set(described) == named
    assert sorted(text.split()[0] for text in described.values()) == [
        "model=model-a",
        "model=model-b",
    ]


def test_a_flipped_payload_byte_is_found_in_every_extent(forge: Forge) -> None:
    blocks, _ = forge.survey()
    bad = blocks[::3]
    for record in bad:
        forge.flip(record.extents[-1][0] + (record.length - 1) % 4096)
    assert agree_on_payloads(forge.path) == {record.key.hex() for record in bad}


def test_bytes_behind_the_payload_mean_nothing(forge: Forge) -> None:
    record = next(record for record in forge.survey()[0] if record.length % 4096)
    forge.flip(record.extents[-1][0] + record.extents[-1][1] - 1)
    assert agree_on_payloads(forge.path) == set()


@pytest.mark.parametrize("at", [0, 1, 2, 5, 8, 16, 33, 64, 96, 104, 120])
def test_a_rotted_record_takes_its_block_along(forge: Forge, at: int) -> None:
    before = agree_on_blocks(forge.path)
    victim = newest(forge)
    forge.flip(TABLE + RECORD * victim.slot + at)
    after = agree_on_blocks(forge.path)
    assert [block for block in before if block not in after] == [victim.as_json()]


def test_a_record_in_another_slot_is_damage(forge: Forge) -> None:
    slot, _ = forge.vacant(0)
    with forge.path.open("rb") as medium:
        medium.seek(TABLE + RECORD * newest(forge).slot)
        entry = medium.read(RECORD)
    before = agree_on_blocks(forge.path)
    forge.write(TABLE + RECORD * slot, entry)
    assert agree_on_blocks(forge.path) == before


@pytest.mark.parametrize("copy", [0, PAGE])
def test_one_superblock_is_enough(forge: Forge, copy: int) -> None:
    before = agree_on_blocks(forge.path)
    forge.flip(copy + 40)
    assert agree_on_blocks(forge.path) == before


def test_both_superblocks_gone_is_refused_by_both(forge: Forge) -> None:
    forge.flip(40)
    forge.flip(PAGE + 40)
    for command in ([COMMAND, "ls"], [sys.executable, READER]):
        done = subprocess.run([*command, forge.path], capture_output=True, check=False, timeout=60)
        assert done.returncode != 0
        assert done.stderr


@pytest.mark.parametrize("live", [True, False])
def test_a_higher_record_over_the_same_bytes_outranks(forge: Forge, live: bool) -> None:
    blocks, _ = forge.survey()
    victim, last = blocks[0], blocks[-1]
    slot, _ = forge.vacant(0)
    # It has only the last granule in common with the victim.
    offset, size = victim.extents[-1]
    forge.write_record(
        replace(
            victim,
            slot=slot,
            live=live,
            key=bytes(32),
            sequence=last.sequence + 1,
            extents=((offset + size - 4096, 4096),),
            length=9,
        )
    )
    keys = {block["key"] for block in agree_on_blocks(forge.path)}
    same = {block.key.hex() for block in blocks if block.namespace == victim.namespace}
    other = {block.key.hex() for block in blocks} - same
    assert (bytes(32).hex() in keys) == live
    assert other <= keys
    listed = forge.survey()[0]
    assert victim not in listed


@pytest.mark.parametrize("live", [True, False])
def test_a_lower_record_over_the_same_bytes_is_outranked(forge: Forge, live: bool) -> None:
    blocks, _ = forge.survey()
    slot, _ = forge.vacant(0)
    forge.write_record(
        replace(blocks[-1], slot=slot, live=live, key=bytes(32), sequence=1, length=9)
    )
    assert [block.key for block in forge.survey()[0]] == [block.key for block in blocks]
    assert len(agree_on_blocks(forge.path)) == len(blocks)


@pytest.mark.parametrize("live", [True, False])
def test_a_repeated_identity_leaves_the_higher_record(forge: Forge, live: bool) -> None:
    blocks, _ = forge.survey()
    victim = blocks[0]
    slot, (offset,) = forge.vacant(1)
    forge.write_record(
        replace(
            victim,
            slot=slot,
            live=live,
            sequence=blocks[-1].sequence + 1,
            extents=((offset, 4096),),
            length=9,
        )
    )
    agree_on_blocks(forge.path)
    kept = [
        block
        for block in forge.survey()[0]
        if (block.namespace, block.key) == (victim.namespace, victim.key)
    ]
    assert [block.slot for block in kept] == ([slot] if live else [])


@pytest.mark.parametrize("extents", [((4096, 4096),), ((1 << 20, 4096),), ((1 << 40, 4096),)])
def test_extents_outside_the_data_are_damage(
    forge: Forge, extents: tuple[tuple[int, int], ...]
) -> None:
    before = agree_on_blocks(forge.path)
    slot, _ = forge.vacant(0)
    forge.write_record(
        replace(
            newest(forge), slot=slot, key=bytes(32), sequence=1 << 50, extents=extents, length=9
        )
    )
    assert agree_on_blocks(forge.path) == before


def test_kvdepot_reads_what_the_document_says_how_to_write(forge: Forge, seed: int) -> None:
    random = Random(seed + 1)  # other keys than the fixture's
    whole_key, split_key = random.randbytes(32), random.randbytes(32)
    data = random.randbytes(3 * 4096 + 5)
    before = agree_on_blocks(forge.path)
    # Its namespace is that of the last put.
    whole = forge.add_block(newest(forge), whole_key, [data])
    forge.add_block(whole, split_key, [random.randbytes(length) for length in (1000, 1, 4096)])
    parts = {block["key"]: block["parts"] for block in agree_on_blocks(forge.path)}
    assert parts[whole_key.hex()] == 1
    assert parts[split_key.hex()] == 3
    assert agree_on_payloads(forge.path) == set()
    with kvdepot.open("Dax", {"dax": {"path": str(forge.path)}}) as depot:
        ns = depot.namespace(model="model-b", dtype="float32", block_tokens=16)
        buffer = bytearray(len(data))
        assert ns.get([whole_key], [buffer]).wait(timeout=30) == [True]
        assert bytes(buffer) == data
        # Listing works beside the owner.
        assert len(agree_on_blocks(forge.path)) == len(before) + 2


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_rotted_part_is_named(forge: Forge, seed: int, part: int) -> None:
    random = Random(seed + 1)  # other keys than the fixture's
    parts = [random.randbytes(1000) for _ in range(3)]
    block = forge.add_block(newest(forge), random.randbytes(32), parts)
    forge.flip(block.extents[0][0] + 1000 * part + 500)
    assert agree_on_payloads(forge.path) == {block.key.hex()}


def test_a_rotted_part_table_is_named(forge: Forge, seed: int) -> None:
    random = Random(seed + 1)  # other keys than the fixture's
    block = forge.add_block(newest(forge), random.randbytes(32), [b"left", b"right"])
    forge.flip(block.extents[0][0] + block.length - 3)
    assert agree_on_payloads(forge.path) == {block.key.hex()}


def block_files(tmp_path: Path, pipeline: str = "Posix") -> dict[bytes, bytes]:
    """What is stored in files of `tmp_path/blocks`: a block of each of the lengths."""
    keys = {bytes([number] * 32): length for number, length in enumerate(LENGTHS)}
    contents = {key: Random(key).randbytes(length) for key, length in keys.items()}
    settings = {"posix": {"path": str(tmp_path / "blocks"), "capacity": "64MiB"}}
    if "Cache" in pipeline:
        settings["cache"] = {"capacity": "16MiB"}
    with kvdepot.open(pipeline, settings) as depot:
        ns = depot.namespace(model="model-a", dtype="float32", block_tokens=16)
        stored = ns.put(list(contents), [bytearray(data) for data in contents.values()])
        assert all(stored.wait(60))
        assert depot.drain(60)
    return contents


def file_of(tmp_path: Path, key: bytes) -> Path:
    (path,) = (tmp_path / "blocks/blocks").glob(f"*/{key.hex()}-*")
    return path


def write_header(path: Path, count: int, digests: bytes) -> None:
    """Has a block's file record these leaves."""
    damaged = bytearray(path.read_bytes())
    damaged[100:104] = count.to_bytes(4, "little")
    damaged[104:4088] = digests.ljust(3984, b"\0")
    damaged[4088:PAGE] = xxh3_64(bytes(damaged[:4088])).to_bytes(8, "little")
    path.write_bytes(damaged)


@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_leaves_of_a_block_file_are_recorded_and_the_rotten_one_is_named(
    tmp_path: Path, pipeline: str
) -> None:
    contents = block_files(tmp_path, pipeline)
    for key, data in contents.items():
        path = file_of(tmp_path, key)
        leaves = [data[at : at + LEAF] for at in range(0, len(data), LEAF)]
        digests = [xxhash.xxh3_128_intdigest(leaf).to_bytes(16, "little") for leaf in leaves]
        page = path.read_bytes()[:PAGE]
        assert int.from_bytes(page[100:104], "little") == len(leaves)
        assert page[104:4088] == b"".join(digests).ljust(3984, b"\0")
        assert lines(COMMAND, "verify", path, "--json")[-1]["sound"] == 1
    # Its second MiB, and its last byte.
    damaged = bytearray(path.read_bytes())
    assert len(leaves) == 3
    damaged[PAGE + LEAF + 99] ^= 4
    damaged[PAGE + len(data) - 1] ^= 4
    path.write_bytes(damaged)
    for place in (path, tmp_path / "blocks"):
        (bad, totals) = lines(COMMAND, "verify", place, "--json")
        assert bad["key"] == key.hex()
        assert bad["rotten"] == [[LEAF, LEAF], [2 * LEAF, 777]]
        assert f"bytes {LEAF} to {2 * LEAF - 1} of the payload" in str(bad["fault"])
        assert totals["bad"] == 1
    assert totals["blocks"] == len(LENGTHS)
    (bad, _) = lines(sys.executable, READER, path, "--verify")
    assert bad["fault"] == f"leaf at {LEAF}"


def test_a_block_file_without_leaves_is_whole_and_one_with_wrong_ones_is_none(
    tmp_path: Path,
) -> None:
    contents = block_files(tmp_path)
    key, data = list(contents.items())[-1]
    path = file_of(tmp_path, key)
    right = path.read_bytes()[104 : 104 + 48]
    write_header(path, 0, b"")
    (totals,) = lines(COMMAND, "verify", path, "--json")
    assert totals["sound"] == 1
    assert lines(sys.executable, READER, path, "--verify") == [{"blocks": 1, "bad": 0}]
    wrong = {
        "records 2 leaves, but the payload has 3": (2, right[:32]),
        "records 250 leaves, but holds at most 249": (250, right),
        "do not match the payload": (3, right[16:] + right[:16]),
    }
    for says, (count, digests) in wrong.items():
        write_header(path, count, digests)
        (bad, totals) = lines(COMMAND, "verify", path, "--json")
        assert totals["bad"] == 1
        assert says in str(bad["fault"])
        assert bad["rotten"] == []
        with path.open("rb") as medium, pytest.raises(NotAnArenaError, match="leaves"):
            open_medium(medium)
    # Its payload is what was put, and who loads it looks at nothing else.
    settings = {"posix": {"path": str(tmp_path / "blocks"), "capacity": "64MiB"}}
    with kvdepot.open("Posix", settings) as depot:
        ns = depot.namespace(model="model-a", dtype="float32", block_tokens=16)
        buffer = bytearray(len(data))
        assert ns.get([key], [buffer]).wait(30) == [True]
        assert bytes(buffer) == data


def test_verify_names_what_is_no_block_in_a_directory(tmp_path: Path) -> None:
    keys = list(block_files(tmp_path))
    one, two, three = (file_of(tmp_path, key) for key in keys[:3])
    one.write_bytes(two.read_bytes())
    two.write_bytes(b"KVDBLOCK")
    three.write_bytes(three.read_bytes() + bytes(PAGE))
    *bad, totals = lines(COMMAND, "verify", tmp_path / "blocks", "--json")
    assert (totals["blocks"], totals["bad"]) == (len(LENGTHS), 3)
    faults = {str(block["path"]): str(block["fault"]) for block in bad}
    assert "identifies a different block" in faults[str(one)]
    assert "less than a header" in faults[str(two)]
    assert "its header requires" in faults[str(three)]


def test_a_reader_of_block_files_finds_what_posix_stores(tmp_path: Path) -> None:
    contents = block_files(tmp_path)
    seen = {}
    for path in (tmp_path / "blocks/blocks").glob("*/*"):
        with path.open("rb") as medium:
            file = open_medium(medium)
            (record,) = file.blocks()
            assert file.fault(record) is None
            seen[record.key] = file.payload(record)
            assert path.name == f"{record.key.hex()}-{record.namespace.hex()}"
            weighed = sum(
                (2 * at + 1) * byte for at, byte in enumerate(record.namespace + record.key)
            )
            assert path.parent.name == f"{weighed % 2**32 % 256:03x}"
        assert lines(sys.executable, READER, path, "--verify") == [{"blocks": 1, "bad": 0}]
    assert seen == contents
    damaged = bytearray(path.read_bytes())
    damaged[PAGE] ^= 1
    path.write_bytes(damaged)
    *bad, totals = lines(sys.executable, READER, path, "--verify")
    assert totals == {"blocks": 1, "bad": 1}
    assert bad[0]["fault"] == "leaf at 0"


@pytest.mark.parametrize("salt", [None, "ours"])
def test_macs_of_a_block_file_are_what_its_page_says(tmp_path: Path, salt: str | None) -> None:
    secret = bytes(range(32))
    keys = tmp_path / "keys"
    keys.write_text(f"{salt or '-'} {secret.hex()}\n")
    keys.chmod(0o600)
    settings = {
        "posix": {"path": str(tmp_path / "blocks"), "capacity": "64MiB"},
        "mac_key_file": str(keys),
    }
    data = Random(1).randbytes(2 * LEAF + 777)
    with kvdepot.open("Posix", settings) as depot:
        ns = depot.namespace(model="model-a", dtype="float32", block_tokens=16, salt=salt)
        assert ns.put([bytes(32)], [bytearray(data)]).wait(60) == [True]
        with pytest.raises(kvdepot.InputError, match="salt"):
            depot.namespace(model="model-a", dtype="float32", block_tokens=16, salt="theirs")
    path = file_of(tmp_path, bytes(32))
    with path.open("rb") as medium:
        block = open_medium(medium)
        assert isinstance(block, BlockFile)
        assert block.is_proven(secret)
        assert not block.is_proven(bytes(32))
        assert block.fault(block.record) is None
    assert lines(COMMAND, "verify", path, "--json")[-1]["sound"] == 1
