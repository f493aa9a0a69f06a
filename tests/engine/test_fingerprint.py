"""Weights are told apart by content, cheaply."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from kvdepot import vllm_fingerprint

pytestmark = pytest.mark.unit


def write_weights(path: Path, values: dict[str, bytes]) -> None:
    """A safetensors file with these tensors of bytes."""
    header, data = {}, b""
    for name, value in values.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(value)],
            "data_offsets": [len(data), len(data) + len(value)],
        }
        data += value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model(directory: Path, tensors: dict[str, bytes], config: str = "{}") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    write_weights(directory / "model.safetensors", tensors)
    return directory


def test_equal_content_is_equal_wherever_and_whenever_it_lies(tmp_path: Path) -> None:
    tensors = {"a": bytes(5000), "b": bytes(range(256)) * 9}
    one, two = model(tmp_path / "one", tensors), model(tmp_path / "two", tensors)
    os.utime(two / "model.safetensors", (1, 1))
    assert vllm_fingerprint.of_directory(one) == vllm_fingerprint.of_directory(two)


def test_another_fine_tuning_of_the_same_shape_differs(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": bytes(5000), "b": b"\1" * 5000})
    two = model(tmp_path / "two", {"a": bytes(5000), "b": b"\2" * 5000})
    assert vllm_fingerprint.of_directory(one) != vllm_fingerprint.of_directory(two)


def test_another_configuration_differs(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": b"x"}, '{"rope_theta": 1}')
    two = model(tmp_path / "two", {"a": b"x"}, '{"rope_theta": 2}')
    assert vllm_fingerprint.of_directory(one) != vllm_fingerprint.of_directory(two)


def test_a_tensor_by_another_name_differs(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": b"x" * 999})
    two = model(tmp_path / "two", {"b": b"x" * 999})
    assert vllm_fingerprint.of_directory(one) != vllm_fingerprint.of_directory(two)


def test_the_hugging_face_cache_names_files_after_their_content(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / ("ab" * 32)
    write_weights(blob, {"a": b"x" * 999})
    link = snapshot / "model.safetensors"
    link.symlink_to(Path("../../blobs") / blob.name)
    before = vllm_fingerprint.of_file(link)
    # Content that changed under the same name is not read: the name is the content's hash.
    write_weights(blob, {"a": b"y" * 999})
    assert vllm_fingerprint.of_file(link) == before


@pytest.mark.parametrize(
    "content",
    [b"", b"\1\2", struct.pack("<Q", 1 << 60) + b"x", struct.pack("<Q", 4) + b"nonsense"],
)
def test_a_file_that_is_no_safetensors_file_has_a_fingerprint_too(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert len(vllm_fingerprint.of_file(file)) == 64


def test_an_adapter_that_changes_in_place_is_noticed(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_weights(adapter / "adapter_model.safetensors", {"a": b"x" * 999})
    adapters = vllm_fingerprint.AdapterFingerprints()
    before = adapters.of(str(adapter))
    assert adapters.of(str(adapter)) == before
    write_weights(adapter / "adapter_model.safetensors", {"a": b"y" * 999})
    os.utime(adapter / "adapter_model.safetensors", ns=(5, 5))
    assert adapters.of(str(adapter)) != before
    assert adapters.of("some/model-id") != adapters.of("other/model-id")
