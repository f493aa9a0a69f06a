"""Gets into memory of a CUDA device, on one: `test_cuda.py` has the driver's failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvdepot
import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

SIZES = (1, 4095, 4096, 70_001, 1 << 20, (4 << 20) + 13)
PIPELINES: dict[str, dict[str, Any]] = {
    "Cache": {"cache": {"capacity": "256MiB"}},
    "Posix": {"posix": {"capacity": "256MiB"}},
}


def content(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@pytest.fixture(params=PIPELINES)
def space(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    settings = {"socket": "off", **PIPELINES[request.param]}
    if request.param == "Posix":
        settings["posix"] = settings["posix"] | {"path": str(tmp_path / "kv")}
    with kvdepot.open(request.param, settings) as depot:
        yield depot.namespace(model="m", dtype="uint8", block_tokens=16)


def test_blocks_of_all_sizes_reach_the_device(space: Any) -> None:
    keys = [bytes([number]) * 32 for number in range(len(SIZES) + 1)]
    blocks = [content(size, seed) for seed, size in enumerate(SIZES)]
    assert all(space.put(keys[:-1], [block.numpy() for block in blocks]).wait(60))
    for _ in range(3):
        there = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (*SIZES, 64)]
        assert space.get(keys, there).wait(60) == [True] * len(SIZES) + [False]
        for block, found in zip(blocks, there, strict=False):
            assert torch.equal(block, found.cpu())


def test_many_blocks_reach_slices_of_one_tensor(space: Any) -> None:
    size, count = 24_576, 300
    keys = [number.to_bytes(32, "little") for number in range(count)]
    blocks = content(size * count, 7).view(count, size)
    assert all(space.put(keys, list(blocks.numpy())).wait(60))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    paged = torch.zeros((count, size), dtype=torch.uint8, device="cuda")
    assert all(space.get([keys[at] for at in order], [paged[at] for at in order]).wait(60))
    assert torch.equal(paged.cpu(), blocks)


def test_what_lies_beside_a_destination_stays(space: Any) -> None:
    key = [bytes(32)]
    block = content(50_000, 5)
    assert space.put(key, [block.numpy()]).wait(60) == [True]
    memory = torch.full((60_000,), 77, dtype=torch.uint8, device="cuda")
    assert space.get(key, [memory[4_000:54_000]]).wait(60) == [True]
    expected = torch.full((60_000,), 77, dtype=torch.uint8)
    expected[4_000:54_000] = block
    assert torch.equal(memory.cpu(), expected)


def test_what_does_not_verify_is_a_miss(tmp_path: Path) -> None:
    posix = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with kvdepot.open("Posix", {"posix": posix, "socket": "off"}) as depot:
        space = depot.namespace(model="m", dtype="uint8", block_tokens=16)
        keys = [bytes([number]) * 32 for number in (1, 2)]
        blocks = [content(300_000, seed) for seed in (1, 2)]
        assert all(space.put(keys, [block.numpy() for block in blocks]).wait(60))
        block = blocks[0].numpy().tobytes()
        files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
        (rotten,) = [path for path in files if block in path.read_bytes()]
        there = bytearray(rotten.read_bytes())
        there[there.index(block) + 200_000] ^= 1
        rotten.write_bytes(there)
        found = [torch.zeros(300_000, dtype=torch.uint8, device="cuda") for _ in keys]
        assert space.get(keys, found).wait(60) == [False, True]
        assert torch.equal(found[1].cpu(), blocks[1])


def test_blocks_of_a_device_are_stored_and_come_back(space: Any) -> None:
    keys = [bytes([number]) * 32 for number in range(len(SIZES))]
    there = [content(size, seed).cuda() for seed, size in enumerate(SIZES)]
    torch.cuda.synchronize()
    assert all(space.put(keys, there).wait(60))
    back = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    assert all(space.get(keys, back).wait(60))
    assert all(map(torch.equal, there, back))
    plain = bytearray(SIZES[-1])
    assert space.get(keys[-1:], [plain]).wait(60) == [True]
    assert bytes(plain) == there[-1].cpu().numpy().tobytes()


@pytest.mark.parametrize("page", [24, 4096, 8191, 65_536, 2 << 20])
def test_pages_of_a_device_go_behind_what_it_computes(space: Any, page: int) -> None:
    """Layers of paged caches: what is stored is what a stream computes by then, and what is loaded
    lies beside everything else."""
    count, layers = 24, 3
    paged = [torch.zeros((count, page), dtype=torch.uint8, device="cuda") for _ in range(layers)]
    stream = torch.cuda.Stream()
    keys = [number.to_bytes(32, "little") for number in range(6)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(page)).tolist()
    rows = [order[at : at + 2] for at in range(0, 12, 2)]
    into = [order[at : at + 2] for at in range(12, 24, 2)]
    into[0][0] = -1
    spans = kvdepot.Spans(paged, rows)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # some tenth of a second
        for layer, cache in enumerate(paged):
            numbers = torch.arange(count * page, device="cuda", dtype=torch.int64) % (251 - layer)
            cache.copy_(numbers.view(count, page).to(torch.uint8))
        stored = space.put(keys, spans.with_rows(rows, stream.cuda_stream))
    assert all(stored.wait(60))
    torch.cuda.synchronize()
    before = [cache.cpu() for cache in paged]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        loaded = space.get(keys, spans.with_rows(into, stream.cuda_stream))
    assert all(loaded.wait(60))
    for cache, was in zip(paged, before, strict=True):
        expected = was.clone()
        for source, target in zip(rows, into, strict=True):
            for one, other in zip(source, target, strict=True):
                if other >= 0:
                    expected[other] = was[one]
        assert torch.equal(cache.cpu(), expected)
