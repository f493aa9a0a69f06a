"""What names a model's weights: a GGUF file's header and samples."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import kvdepot
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: see `make llama`")

from gguf import GGUFReader, GGUFWriter
from kvdepot.engine import gguf, weights
from kvdepot.llama_cpp import identity


@pytest.mark.parametrize("kind", ["llama", "gemma", "mamba", "jamba"])
def test_tensors_lie_where_the_package_of_the_format_finds_them(
    kind: str, model_files: Callable[..., Path]
) -> None:
    path = model_files(kind)
    begin, tensors = gguf.read(path.read_bytes())
    theirs = GGUFReader(path)
    assert begin == theirs.data_offset
    assert {tensor.name.decode(): tensor.begin for tensor in tensors} == {
        tensor.name: tensor.data_offset for tensor in theirs.tensors
    }


def test_a_change_of_any_tensor_or_key_is_another_model(
    model_files: Callable[..., Path], tmp_path: Path
) -> None:
    data = model_files("llama").read_bytes()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    named = weights.of_file(copy)
    assert named == weights.of_file(model_files("llama"))
    assert named != weights.of_file(model_files("llama", 2))
    begin, tensors = gguf.read(data)
    ends = [tensor.begin for tensor in tensors[1:]] + [len(data)]
    # A training step changes nearly every value of a tensor that it trains.
    ranges = [(tensor.begin, end) for tensor, end in zip(tensors, ends, strict=True)]
    for first, end in [*ranges, (begin // 2, begin // 2 + 1), (30, 31)]:
        changed = bytearray(data)
        changed[first:end] = bytes(byte ^ 1 for byte in data[first:end])
        copy.write_bytes(changed)
        assert weights.of_file(copy) != named, first


@pytest.mark.parametrize("name", ["model.gguf", "sha256-1234"])
def test_a_page_of_each_mib_and_the_header_count_whatever_the_file_is_called(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    writer = GGUFWriter(file, "llama")
    writer.add_string("general.description", "x" * 10_000)
    writer.add_tensor("small", np.zeros(2000, np.float32))
    writer.add_tensor("rows", np.zeros(3 << 20, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    begin, (small, rows) = gguf.read(file.read_bytes())
    named = {weights.of_file(file)}
    changes = [(begin - 100, begin - 99), (small.begin, rows.begin)]
    changes += [(rows.begin + (mib << 20), rows.begin + (mib + 1 << 20)) for mib in range(12)]
    with file.open("r+b") as written:
        for first, end in changes:
            written.seek(first)
            written.write(b"1" * (end - first))
            written.flush()
            named.add(weights.of_file(file))
    assert len(named) == 1 + len(changes)


def test_any_bytes_are_read_or_refused(model_files: Callable[..., Path], seed: int) -> None:
    draw = random.Random(seed)
    data = model_files("jamba").read_bytes()
    begin, _ = gguf.read(data)
    for _ in range(300):
        changed = bytearray(data[: begin + 64])
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with contextlib.suppress(ValueError):
            gguf.read(bytes(changed[: draw.randrange(len(changed))]))
    with pytest.raises(ValueError, match="GGUF"):
        gguf.read(b"")


def test_a_file_of_another_kind_is_sampled(tmp_path: Path) -> None:
    other = tmp_path / "weights.gguf"
    for begun in (b"GGML", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16):
        other.write_bytes(begun + bytes(1 << 20))
        named = weights.of_file(other)
        other.write_bytes(begun + bytes((1 << 20) - 1) + b"1")
        assert weights.of_file(other) != named


@pytest.mark.parametrize("name", ["model", "model[Q4]", "model*"])
def test_each_part_of_a_split_model_counts_whatever_it_is_called(
    name: str, model_files: Callable[..., Path], tmp_path: Path
) -> None:
    def named(*seeds: int, setting: str = "sampled") -> str:
        paths = [tmp_path / f"{name}-{n:05}-of-{len(seeds):05}.gguf" for n in (1, 2)[: len(seeds)]]
        for path, seed in zip(paths, seeds, strict=True):
            path.write_bytes(model_files("llama", seed).read_bytes())
        llama = SimpleNamespace(model_path=str(paths[0]), lora_path=None)
        return identity.weights_of(llama, setting)

    assert len({named(1), named(2), named(1, 1), named(1, 2), named(2, 1)}) == 5
    mine = {named(1, setting="mine"), named(2, setting="mine"), named(1, setting="other")}
    assert len(mine | {named(1), named(1, setting="full")}) == 5
    with pytest.raises(kvdepot.InputError, match="weights"):
        named(1, setting="")
