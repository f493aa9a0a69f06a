"""Weights and adapters are told apart by content, and cheaply."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest
from kvdepot.engine import weights as engine_weights
from kvdepot.vllm.adapters import AdapterFingerprints

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
    assert engine_weights.of_directory(one) == engine_weights.of_directory(two)


def test_another_fine_tuning_of_the_same_shape_differs(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": bytes(5000), "b": b"\1" * 5000})
    two = model(tmp_path / "two", {"a": bytes(5000), "b": b"\2" * 5000})
    assert engine_weights.of_directory(one) != engine_weights.of_directory(two)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # What the engine made of it counts, and is named where the engine is known.
        ("config.json", False),
        ("README.md", False),
        ("tokenizer.json", False),
        ("generation_config.json", False),
        ("preprocessor_config.json", False),
        ("quantize_config.json", True),
        ("hf_quant_config.json", True),
        # By it vLLM chooses among files.
        ("model.safetensors.index.json", True),
        ("modeling_remote.py", True),
        ("of_a_later_version.json", True),
        ("consolidated.00.pth", True),
    ],
)
def test_every_file_counts_that_is_not_listed(tmp_path: Path, name: str, *, counts: bool) -> None:
    one, two = model(tmp_path / "one", {"a": b"x"}), model(tmp_path / "two", {"a": b"x"})
    (two / name).write_text("other")
    same = engine_weights.of_directory(one) == engine_weights.of_directory(two)
    assert same is not counts


def test_code_that_is_not_run_does_not_count(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one", {"a": b"x"}), model(tmp_path / "two", {"a": b"x"})
    (two / "modeling_remote.py").write_text("other")
    found = [engine_weights.of_directory(each, code=False) for each in (one, two)]
    assert found[0] == found[1]


def test_files_of_processors_have_a_fingerprint_of_their_own(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": b"x"})
    before = engine_weights.of_processor(one)
    (one / "preprocessor_config.json").write_text('{"size": 10}')
    between = engine_weights.of_processor(one)
    (one / "preprocessor_config.json").write_text('{"size": 20}')
    after = engine_weights.of_processor(one)
    (one / "speech_tokenizer").mkdir()
    (one / "speech_tokenizer/tokenizer.json").write_text("{}")
    folder = engine_weights.of_processor(one)
    assert len({before, between, after, folder}) == 4
    # Weights there count for all blocks, and are not read again.
    (one / "speech_tokenizer/model.safetensors").write_bytes(b"x")
    assert engine_weights.of_processor(one) == folder


def test_a_configuration_counts_where_it_is_not_handed_over(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": b"x"})
    found = []
    for config in ('{"a": 1}', '{"a": 1, "transformers_version": "5"}', '{"a": 2}', "no JSON"):
        (one / "config.json").write_text(config)
        found.append(engine_weights.of_directory(one, config=True))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def moment(directory: Path) -> float:
    """A time behind those of all files that are there, and before those of files to come."""
    clock = directory / "clock"

    def written() -> float:
        clock.touch()
        return clock.stat().st_ctime

    before = written()
    while (now := written()) == before:
        pass
    return (before + now) / 2


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(content)
    os.utime(beside, (1, 1))
    beside.replace(path)


def _lead_elsewhere(link: Path) -> None:
    link.unlink()
    link.symlink_to("other")


def _move(at: Path) -> None:
    (at / "real").rename(at / "old")
    (at / "other").rename(at / "real")


CHANGES_OF_FILES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "nothing": (Path.exists, None),
    "a file beside them": (lambda at: (at / "real/README.md").write_text("read me"), None),
    "a file was written": (
        lambda at: (at / "real/model.safetensors").write_bytes(b"new"),
        "model/model.safetensors",
    ),
    "a file was replaced by one with its time": (
        lambda at: _replace(at / "real/model.safetensors", b"new"),
        "model/model.safetensors",
    ),
    "a link leads to another directory": (lambda at: _lead_elsewhere(at / "hop"), "hop"),
    "another directory has its name": (_move, "model"),
}


@pytest.mark.parametrize("what", CHANGES_OF_FILES)
def test_files_that_are_replaced_are_noticed(tmp_path: Path, what: str) -> None:
    """Their directory is a link to a link."""
    for name in ("real", "other"):
        model(tmp_path / name, {"a": name.encode()})
    (tmp_path / "model").symlink_to("hop")
    (tmp_path / "hop").symlink_to("real")
    began = moment(tmp_path)
    change, named = CHANGES_OF_FILES[what]
    change(tmp_path)
    found = engine_weights.changed_since(engine_weights.files_of(tmp_path / "model"), began)
    assert found == (None if named is None else tmp_path / named)


MIB = 1 << 20


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_one_page_of_each_mib_is_read(tmp_path: Path, name: str) -> None:
    """A change of two MiB is noticed wherever it is; of one row it need not be."""
    one = tmp_path / name
    data = os.urandom(8 * MIB)
    write_weights(one, {"a": data[: 7 * MIB], "b": data[7 * MIB :]})
    before = engine_weights.of_file(one)
    whole = one.read_bytes()
    for at in range(4096, 6 * MIB, MIB // 2):
        changed = bytearray(whole)
        changed[at : at + 2 * MIB] = os.urandom(2 * MIB)
        one.write_bytes(changed)
        assert engine_weights.of_file(one) != before, at


def test_every_tensor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {f"layer {n}": bytes([n]) * 5000 for n in range(40)}
    write_weights(file, tensors)
    before = engine_weights.of_file(file)
    for name in tensors:
        write_weights(file, tensors | {name: b"\xff" * 5000})
        assert engine_weights.of_file(file) != before, name


class TestFull:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_every_byte_counts(self, tmp_path: Path) -> None:
        file = tmp_path / "model.bin"
        data = bytearray(os.urandom(3 * MIB))
        file.write_bytes(data)
        before = engine_weights.of_file(file, "full")
        sampled = engine_weights.of_file(file)
        # Between the pages that are read: one byte, which a sample may miss.
        for at in range(MIB + 5, MIB + 40 * 4096, 4096):
            data[at] ^= 1
            file.write_bytes(data)
            if engine_weights.of_file(file) == sampled:
                break
            data[at] ^= 1
        else:
            pytest.fail("no page is left out")
        assert engine_weights.of_file(file, "full") != before
        # Where default arenas are, too.
        assert (tmp_path / "cache/kvdepot").stat().st_mode & 0o777 == 0o700

    def test_a_file_that_is_as_it_was_is_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "model.bin"
        file.write_bytes(os.urandom(MIB))
        before = engine_weights.of_file(file, "full")

        def read(*_: Any) -> Any:
            raise AssertionError("read again")

        monkeypatch.setattr(engine_weights.hashlib, "file_digest", read)
        assert engine_weights.of_file(file, "full") == before

    def test_a_file_rewritten_with_its_old_time_is_read_again(self, tmp_path: Path) -> None:
        file = tmp_path / "model.bin"
        data = os.urandom(MIB)
        file.write_bytes(data)
        times = file.stat()
        before = engine_weights.of_file(file, "full")
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert engine_weights.of_file(file, "full") != before

    def test_a_damaged_cache_is_read_over(self, tmp_path: Path, cache: Path) -> None:
        file = tmp_path / "model.bin"
        file.write_bytes(os.urandom(MIB))
        before = engine_weights.of_file(file, "full")
        for kept in (cache / "kvdepot/weights").iterdir():
            kept.write_text('{"state": 3')
        assert engine_weights.of_file(file, "full") == before


def test_a_tensor_by_another_name_differs(tmp_path: Path) -> None:
    one = model(tmp_path / "one", {"a": b"x" * 999})
    two = model(tmp_path / "two", {"b": b"x" * 999})
    assert engine_weights.of_directory(one) != engine_weights.of_directory(two)


def test_the_hugging_face_cache_names_files_after_their_content(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / ("ab" * 32)
    write_weights(blob, {"a": b"x" * 999})
    link = snapshot / "model.safetensors"
    link.symlink_to(Path("../../blobs") / blob.name)
    before = engine_weights.of_file(link)
    # Content that changed under the same name is not read: the name is the content's hash.
    write_weights(blob, {"a": b"y" * 999})
    assert engine_weights.of_file(link) == before
    # An engine may have fetched it just now. A link that led to another snapshot is another matter.
    served = tmp_path / "served"
    served.symlink_to(snapshot)
    began = moment(tmp_path)
    link.unlink()
    link.symlink_to(Path("../../blobs") / blob.name)
    assert engine_weights.changed_since([served / link.name], began) is None
    served.unlink()
    served.symlink_to(snapshot)
    assert engine_weights.changed_since([served / link.name], began) == served


@pytest.mark.parametrize(
    "content",
    [b"", b"\1\2", struct.pack("<Q", 1 << 60) + b"x", struct.pack("<Q", 4) + b"nonsense"],
)
def test_a_file_that_is_no_safetensors_file_has_a_fingerprint_too(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert len(engine_weights.of_file(file)) == 64


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
        return SimpleNamespace(
            lora_int_id=number,
            lora_path=str(path),
            load_inplace=again,
            # Of vLLM 0.31.
            tensorizer_config_dict=None,
        )

    def test_the_files_count_not_the_id(self, adapter: Path) -> None:
        one, two = (AdapterFingerprints() for _ in range(2))
        before = one.of(self.request(adapter))
        assert before == one.of(self.request(adapter)) == two.of(self.request(adapter, 7))
        self.write(adapter, b"y")
        assert two.of(self.request(adapter, 8)) != before, "loaded as it is now"

    def test_files_that_change_under_a_loaded_adapter_are_not_trusted(self, adapter: Path) -> None:
        adapters = AdapterFingerprints()
        old = adapters.of(self.request(adapter))
        self.write(adapter, b"y")
        new = adapters.of(self.request(adapter, 2))
        # The engine may still have the old weights, or have loaded the new ones meanwhile.
        seen = {old, new, *(adapters.of(self.request(adapter)) for _ in range(2))}
        self.write(adapter, b"x")
        seen.add(adapters.of(self.request(adapter)))
        assert len(seen) == 5
        # Loaded again in place: vLLM's own cache still has blocks of what was there before.
        again = {adapters.of(self.request(adapter, again=True)) for _ in range(2)}
        assert not again & {old, new}
        assert len(again) == 2
        adapters.reset()
        assert adapters.of(self.request(adapter, again=True)) == old
        assert adapters.of(self.request(adapter)) == old
        self.write(adapter, b"y")
        assert adapters.of(self.request(adapter, again=True)) not in (old, new)
        adapters.reset()
        assert adapters.of(self.request(adapter, again=True)) != old

    def test_another_adapter_at_a_path_that_has_changed_is_not_trusted(self, adapter: Path) -> None:
        """vLLM's block hashes have its name and path."""
        adapters = AdapterFingerprints()
        adapters.of(self.request(adapter, 1))
        self.write(adapter, b"y")
        of_now = AdapterFingerprints().of(self.request(adapter, 2))
        assert adapters.of(self.request(adapter, 2)) != of_now
        adapters.reset()
        assert adapters.of(self.request(adapter, 2)) == of_now

    def test_files_that_are_written_while_they_are_read_end_no_request(
        self, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def written(*_: object) -> str:
            raise kvdepot.ConfigError("weights: changed while it was being read")

        monkeypatch.setattr(engine_weights, "of_directory", written)
        adapters = AdapterFingerprints("full")
        found = {adapters.of(self.request(adapter)) for _ in range(2)}
        assert len(found) == 2

    def test_an_id_that_gets_another_path_is_not_trusted(
        self, adapter: Path, tmp_path: Path
    ) -> None:
        other = shutil.copytree(adapter, tmp_path / "other")
        adapters = AdapterFingerprints()
        known = adapters.of(self.request(adapter))
        assert adapters.of(self.request(other)) != known
        adapters.reset()
        assert adapters.of(self.request(other, again=True)) == known

    def test_paths_are_resolved_as_the_engine_resolves_them(
        self, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for number, path in enumerate(["~/adapter", "adapter"]):
            adapters = AdapterFingerprints()
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
            adapters = AdapterFingerprints()
            found = adapters.of(self.request("some/adapter", number))
            assert found == adapters.of(self.request(snapshot, 9))
            seen.add(found)
        assert len(seen) == 2, "an update of the adapter is noticed"

    @pytest.mark.parametrize("path", ["/nowhere", "~/nowhere", "no/such-model", "no model id"])
    def test_files_that_are_not_here_are_never_the_same(self, path: str) -> None:
        pytest.importorskip("huggingface_hub")
        adapters = AdapterFingerprints()
        assert adapters.of(self.request(path)) != adapters.of(self.request(path))


class TestModels:
    """Where vLLM takes a model's files from, and what is refused."""

    @pytest.fixture(autouse=True)
    def vllm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("vllm")
        # Nothing of the user's own cache.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def weights(
        self, name: object, given: str = "sampled", *, engram: str | None = None, **load: Any
    ) -> str:
        from kvdepot.vllm import namespace as vllm_namespace

        return vllm_namespace.weights(self.config(name, engram, **load), given)

    def config(self, name: object, engram: str | None = None, **load: Any) -> Any:
        model_config = SimpleNamespace(
            model=str(name), tokenizer=str(name), revision=None, seed=0, trust_remote_code=False
        )
        chosen: dict[str, Any] = {"load_format": "auto", "download_dir": None}
        return SimpleNamespace(
            model_config=model_config,
            load_config=SimpleNamespace(**chosen | load),
            speculative_config=None,
            engram_config=engram,
            instance_id="",
        )

    def snapshot(self, cache: Path, *names: str, content: str = "ab") -> None:
        """What the hub's cache has of org/model."""
        home = cache / "models--org--model"
        snapshot = home / "snapshots" / ("c" * 40)
        snapshot.mkdir(parents=True)
        (home / "blobs").mkdir()
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("c" * 40)
        for number, name in enumerate(names):
            blob = home / "blobs" / (f"{content}{number:02}" * 16)
            write_weights(blob, {"a": b"x"})
            (snapshot / name).symlink_to(Path("../../blobs") / blob.name)

    @pytest.mark.parametrize("name", ["s3://bucket/model", "org/not-here"])
    def test_weights_that_are_not_files_here_have_to_be_named(self, name: str) -> None:
        with pytest.raises(kvdepot.ConfigError, match="'weights' in kv_connector_extra_config"):
            self.weights(name)
        with pytest.raises(kvdepot.ConfigError, match="--model"):
            self.weights(name, "full")
        one, two = (self.weights(name, text) for text in ("of monday", "of tuesday"))
        assert one != two
        assert one == self.weights(name, "of monday")

    def test_weights_that_other_options_lead_to_have_to_be_named(self, tmp_path: Path) -> None:
        one = model(tmp_path / "one", {"a": b"x"})
        with pytest.raises(kvdepot.ConfigError, match="load format 'tensorizer'"):
            self.weights(one, load_format="tensorizer")
        assert self.weights(one, "of monday", load_format="tensorizer")

    def test_a_text_is_added_to_what_can_be_identified(self, tmp_path: Path) -> None:
        one = model(tmp_path / "one", {"a": b"x"})
        two = model(tmp_path / "two", {"a": b"y"})
        texts = [self.weights(each, text) for each in (one, two) for text in ("t", "u")]
        assert len({*texts, self.weights(one)}) == 5

    def test_folders_that_a_model_loads_weights_from_count(self, tmp_path: Path) -> None:
        from kvdepot.vllm import namespace as vllm_namespace

        one = model(tmp_path / "one", {"a": b"x"})
        found = {self.weights(one)}
        for folder in vllm_namespace.SUBFOLDERS:
            for value in (b"x", b"y"):
                shutil.rmtree(one / folder, ignore_errors=True)
                model(one / folder, {"a": value})
                found.add(self.weights(one))
        assert len(found) == 1 + 2 * len(vllm_namespace.SUBFOLDERS)

    def test_a_tokenizer_counts_where_layers_read_it(self, tmp_path: Path) -> None:
        one = model(tmp_path / "one", {"a": b"x"})
        found = []
        for content in ("one", "two"):
            (one / "tokenizer.json").write_text(content)
            found.append([self.weights(one, engram=engram) for engram in (None, "engram")])
        (plain, engram), (plain_later, engram_later) = found
        assert plain == plain_later
        assert len({plain, engram, engram_later}) == 3

    @pytest.mark.parametrize(
        ("file", "engram", "changed"),
        [
            ("model.safetensors", None, (True, False)),
            # Audio is read by files of that folder, too.
            ("whisper-large-v3/config.json", None, (True, True)),
            ("whisper-large-v3/model.safetensors", None, (True, False)),
            ("tokenizer.json", "engram", (True, False)),
            ("tokenizer.json", None, (False, False)),
            ("preprocessor_config.json", None, (False, True)),
            ("", None, (True, False)),
        ],
    )
    def test_a_file_that_may_have_been_loaded_before_is_in_no_name(
        self, tmp_path: Path, file: str, engram: str | None, changed: tuple[bool, bool]
    ) -> None:
        """No other engine finds its blocks. Without a file, the model is a single file."""
        from kvdepot.vllm import namespace as vllm_namespace

        one = model(tmp_path / "one", {"a": b"x"})
        model(one / "whisper-large-v3", {"a": b"x"})
        for name in ("tokenizer.json", "preprocessor_config.json"):
            (one / name).write_text("{}")
        path = one / (file or "model.safetensors")
        config = self.config(one if file else path, engram)
        config.instance_id = str(int(moment(tmp_path) * 1e9))

        def names() -> tuple[str, str]:
            return vllm_namespace.weights(config, "sampled"), vllm_namespace.processor(config)

        assert names() == names()
        os.utime(path)
        assert tuple(one != other for one, other in zip(names(), names(), strict=True)) == changed

    def test_a_model_of_the_hub_is_found_where_vllm_was_told_to_put_it(
        self, tmp_path: Path
    ) -> None:
        # Weights in one cache; the configuration in another, as vLLM does it.
        self.snapshot(tmp_path / "elsewhere", "model.safetensors")
        self.snapshot(tmp_path / "hub", "config.json")
        assert self.weights("org/model", download_dir=str(tmp_path / "elsewhere"))

    def test_a_model_in_mistrals_own_format_is_found(self, tmp_path: Path) -> None:
        self.snapshot(tmp_path / "hub", "consolidated.safetensors", "params.json")
        first = self.weights("org/model")
        shutil.rmtree(tmp_path / "hub")
        self.snapshot(tmp_path / "hub", "consolidated.safetensors", "params.json", content="cd")
        assert self.weights("org/model") != first

    def test_a_snapshot_by_its_id_and_by_its_path_is_the_same(self, tmp_path: Path) -> None:
        self.snapshot(tmp_path / "hub", "model.safetensors")
        path = tmp_path / "hub/models--org--model/snapshots" / ("c" * 40)
        assert self.weights("org/model") == self.weights(path)
