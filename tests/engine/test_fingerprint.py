"""Weights are told apart by content, cheaply."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.vllm import fingerprint as vllm_fingerprint

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


class TestAdapters:
    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Path:
        directory = tmp_path / "adapter"
        directory.mkdir()
        self.write(directory, b"x")
        return directory

    def write(self, directory: Path, value: bytes) -> None:
        path = directory / "adapter_model.safetensors"
        write_weights(path, {"a": value * 999})
        # Files that follow each other within the clock's resolution.
        os.utime(path, ns=(value[0], value[0]))

    def request(self, path: object, number: int = 1, *, again: bool = False) -> Any:
        return SimpleNamespace(lora_int_id=number, lora_path=str(path), load_inplace=again)

    def test_the_files_count_not_the_id(self, adapter: Path) -> None:
        one, two = (vllm_fingerprint.AdapterFingerprints() for _ in range(2))
        before = one.of(self.request(adapter))
        assert before == one.of(self.request(adapter)) == two.of(self.request(adapter, 7))
        self.write(adapter, b"y")
        assert two.of(self.request(adapter, 8)) != before, "loaded as it is now"

    def test_files_that_change_under_a_loaded_adapter_are_not_trusted(self, adapter: Path) -> None:
        adapters = vllm_fingerprint.AdapterFingerprints()
        old = adapters.of(self.request(adapter))
        self.write(adapter, b"y")
        new = adapters.of(self.request(adapter, 2))
        # The engine may still have the old weights, or have loaded the new ones meanwhile.
        seen = {old, new, *(adapters.of(self.request(adapter)) for _ in range(2))}
        self.write(adapter, b"x")
        seen.add(adapters.of(self.request(adapter)))
        assert len(seen) == 5
        assert adapters.of(self.request(adapter, again=True)) == old
        self.write(adapter, b"y")
        assert adapters.of(self.request(adapter, again=True)) == new

    def test_an_id_that_gets_another_path_is_not_trusted(
        self, adapter: Path, tmp_path: Path
    ) -> None:
        other = shutil.copytree(adapter, tmp_path / "other")
        adapters = vllm_fingerprint.AdapterFingerprints()
        known = adapters.of(self.request(adapter))
        assert adapters.of(self.request(other)) != known
        assert adapters.of(self.request(other, again=True)) == known

    def test_paths_are_resolved_as_the_engine_resolves_them(
        self, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for number, path in enumerate(["~/adapter", "adapter"]):
            adapters = vllm_fingerprint.AdapterFingerprints()
            expected = adapters.of(self.request(adapter, 9))
            assert adapters.of(self.request(path, number)) == expected

    def test_a_model_id_is_found_in_the_hugging_face_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
        model = tmp_path / "models--some--adapter"
        (model / "refs").mkdir(parents=True)
        seen = set()
        for number, (commit, value) in enumerate([("a" * 40, b"x"), ("b" * 40, b"y")]):
            snapshot = model / "snapshots" / commit
            snapshot.mkdir(parents=True)
            (snapshot / "adapter_config.json").write_text("{}")
            self.write(snapshot, value)
            (model / "refs" / "main").write_text(commit)
            adapters = vllm_fingerprint.AdapterFingerprints()
            found = adapters.of(self.request("some/adapter", number))
            assert found == adapters.of(self.request(snapshot, 9))
            seen.add(found)
        assert len(seen) == 2, "an update of the adapter is noticed"

    @pytest.mark.parametrize("path", ["/nowhere", "~/nowhere", "no/such-model", "no model id"])
    def test_files_that_are_not_here_are_never_the_same(self, path: str) -> None:
        pytest.importorskip("huggingface_hub")
        adapters = vllm_fingerprint.AdapterFingerprints()
        assert adapters.of(self.request(path)) != adapters.of(self.request(path))
