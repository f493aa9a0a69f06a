"""vLLM's scheduler, its CPU tier and kvdepot's behind it, with a model whose KV is all checked.

A stand-in does vLLM's copies between the device and the CPU tier, in host memory.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest

pytest.importorskip("vllm")

import torch
from engine_double import BLOCK, EngineDouble, full, vllm_config, window
from engine_harness import ROOT, flip
from engine_tiers import Tiers, content, names
from kvdepot.vllm import memory_weights
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm.beside import Beside
from kvdepot.vllm.compat import versions
from kvdepot.vllm.tier import KvdepotTier
from kvdepot.vllm.tiering import KvdepotTieringConnector
from vllm.config import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

pytestmark = pytest.mark.integration

OURS = {"kv_connector": "KvdepotTieringConnector", "kv_connector_module_path": "kvdepot.vllm"}
VLLMS = {"kv_connector": "OffloadingConnector"}

Start = Callable[..., EngineDouble]


class HostHandler:
    """In place of vLLM's handler, which asserts a device: the same rows, copied at once."""

    def __init__(
        self,
        gpu_tensors: list[torch.Tensor],
        cpu_tensors: list[torch.Tensor],
        blocks_per_chunk: int,
        layer_refs_per_group: list[list[CanonicalKVCacheRef]],
        gpu_to_cpu: bool,
        host_memory_is_pinned: bool,
    ) -> None:
        self.sides = [(gpu_tensors, 1), (cpu_tensors, blocks_per_chunk)]
        if not gpu_to_cpu:
            self.sides.reverse()
        (self.refs,) = layer_refs_per_group
        self.done: list[TransferResult] = []

    def transfer_async(self, job_id: int, source: Any, destination: Any) -> bool:
        device = source if isinstance(source, GPULoadStoreSpec) else destination
        (count,), (index,) = device.group_sizes, device.block_indices
        for ref in self.refs:
            addresses = []
            for spec, (tensors, chunk) in zip((source, destination), self.sides, strict=True):
                found = torch.empty(count, dtype=torch.int64).numpy().view("uint64")
                tensor = tensors[ref.tensor_idx]
                compute_sub_block_ptrs(spec.block_ids, chunk, found, tensor, index % chunk)
                addresses.append(found)
            for start, end in zip(*addresses, strict=True):
                ctypes.memmove(int(end), int(start), ref.page_size_bytes)
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, jobs: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class StandIn(HostHandler):
    def __init__(self, *, canonical_layout: bool, **others: Any) -> None:
        assert not canonical_layout
        super().__init__(**others)

    def shutdown(self) -> None:
        # The tensors are views of what vLLM unmaps.
        self.sides.clear()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts one engine after the other over one directory."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(ROOT / "build" / "vllm-cache"))
    monkeypatch.setattr(gpu_worker, "SingleDirectionOffloadingHandler", StandIn)
    monkeypatch.setattr(TieringOffloadingSpec, "get_worker", TieringOffloadingSpec.create_worker)
    # vLLM 0.31 asks for it; torch with CUDA has none without a driver.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    started: list[EngineDouble] = []

    def one(
        groups: Any,
        connector: dict[str, str] = OURS,
        chunks: int = 64,
        drafter: int | None = None,
        **settings: Any,
    ) -> EngineDouble:
        while started:
            started.pop().close()
        # A busy machine is no file system that hangs.
        place = {"path": str(tmp_path / "kv"), "capacity": "64MiB", "lookup_timeout": "60s"}
        tier = {"type": "KvdepotTier", "module_path": "kvdepot.vllm", "pipeline": "Posix"}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * 4096,
            "offload_prompt_only": False,
            "secondary_tiers": [tier | {"posix": place} | settings],
        }
        transfer = connector | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
        started.append(EngineDouble(tmp_path, groups, transfer, drafter=drafter))
        return started[-1]

    yield one
    for engine in started:
        engine.close()


def tier(engine: EngineDouble) -> KvdepotTier:
    (found,) = engine.connector.scheduler.manager.secondary_tiers
    assert isinstance(found, KvdepotTier)
    return found


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=tokens)


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "kv" / "blocks").glob("*/*") if path.is_file()]


@pytest.mark.parametrize("connector", [OURS, VLLMS], ids=["ours", "vllm's"])
@pytest.mark.parametrize("groups", [[full()], [window(4 * BLOCK)]], ids=["full", "window"])
def test_a_restarted_engine_serves_what_the_last_one_has_stored(
    start: Start, connector: dict[str, str], groups: Any
) -> None:
    named = {} if connector is OURS else {"weights": "w"}
    asked = prompt(1, 200)
    engine = start(groups, connector, **named)
    assert engine.ask(asked) == [0]
    engine = start(groups, connector, **named)
    assert engine.ask(asked) == [200 // BLOCK * BLOCK]
    assert engine.faults == []


@pytest.mark.parametrize("groups", [[full()], [window(4 * BLOCK)]], ids=["full", "window"])
def test_with_a_drafters_group_all_but_the_last_block_is_served(start: Start, groups: Any) -> None:
    """As without a tier of vLLM's between."""
    lengths = [blocks * BLOCK + more for blocks in (7, 12) for more in (0, 1, BLOCK - 1)]
    asked = [prompt(length, length) for length in lengths]
    engine = start(groups, drafter=0)
    assert engine.ask(*asked) == [0] * len(asked)
    engine = start(groups, drafter=0)
    found = [engine.ask(one)[0] for one in asked]
    assert found == [(length // BLOCK - 1) * BLOCK for length in lengths]
    assert engine.faults == []


def test_a_rotten_chunk_is_computed_and_stored_again(tmp_path: Path, start: Start) -> None:
    asked = prompt(2, 200)
    start([full()]).ask(asked)
    rotten = random.Random(3).sample(files(tmp_path), 3)
    for path in rotten:
        flip(path, path.stat().st_size - 10)
    engine = start([full()])
    (cached,) = engine.ask(asked)
    assert cached < 200 // BLOCK * BLOCK
    assert engine.faults == []
    engine = start([full()])
    assert engine.ask(asked) == [200 // BLOCK * BLOCK]
    assert engine.faults == []


def test_in_a_crowd_every_byte_is_that_of_its_tokens(
    tmp_path: Path, start: Start, seed: int
) -> None:
    """A CPU tier for little more than a prompt, common beginnings, rot, resets, new weights."""
    chance = random.Random(seed)
    engine = start([full()], chunks=16, pipeline="Cache|Posix", cache={"capacity": "1MiB"})
    known = [prompt(n, 160) for n in range(4)]
    hits = 0
    for _ in range(40):
        some = [
            chance.choice(known)[: chance.randrange(20, 160)] + prompt(chance.randrange(9), 20)
            for _ in range(chance.randrange(1, 5))
        ]
        hits += sum(engine.ask(*some))
        what = chance.randrange(5)
        if what == 0 and (found := files(tmp_path)):
            path = chance.choice(found)
            flip(path, path.stat().st_size - 10)
        elif what == 1:
            engine.reset(external=False)
        elif what == 2:
            engine.settle()
            assert engine.change_weights()
        assert engine.faults == []
    assert hits > 0


def test_other_weights_and_options_are_other_names(start: Start, tmp_path: Path) -> None:
    def digests(connector: dict[str, str] = OURS, **settings: Any) -> list[bytes]:
        engine = start([full()], connector, **settings)
        return [namespace.digest for namespace in tier(engine)._namespaces.values()]

    first = digests()
    assert first == digests()
    assert first != digests(salt="s")
    given = digests(VLLMS, weights="w")
    assert given != first
    assert digests(weights="w") not in (first, given)


def test_the_fingerprint_of_an_engine_is_of_its_files_too(start: Start, tmp_path: Path) -> None:
    config = vllm_config(tmp_path, OURS | {"kv_role": "kv_both"}, 64, True)
    config.load_config.load_format = "auto"
    # These files were not loaded.
    config.instance_id = ""
    found = set()
    for byte in (b"x", b"y"):
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(byte * 1000)
        for spec in (full(), window(32)):
            groups = [KVCacheGroupSpec(["layer.0"], spec)]
            caches = SimpleNamespace(kv_cache_groups=groups)
            found.add(vllm_namespace.of_engine(config, caches, "sampled"))
    assert len(found) == 4


def test_an_adapter_whose_files_have_changed_finds_nothing(start: Start, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    asked = prompt(5, 200)
    whole = 200 // BLOCK * BLOCK
    for rank, cached in ((8, 0), (8, whole), (16, 0)):
        (adapter / "adapter_config.json").write_text(json.dumps({"r": rank}))
        engine = start([full()])
        engine.lora = LoRARequest("a", 1, str(adapter))
        assert engine.ask(asked) == [cached]
        assert engine.faults == []


def test_how_an_image_is_read_is_part_of_the_name(tmp_path: Path) -> None:
    """Of chunks that end behind its first token."""
    image = [SimpleNamespace(mm_position=SimpleNamespace(offset=2))]
    keys = names("a", 4)
    place = {"path": str(tmp_path / "kv"), "capacity": "64MiB", "lookup_timeout": "60s"}
    engine = Tiers({"pipeline": "Posix", "posix": place})
    engine.tier.set_beside("request-1", Beside(media=b"large", features=image))
    engine.store(*keys)
    for request, (media, found) in enumerate(((b"small", 2), (b"large", 4)), 2):
        engine.forget()
        engine.tier.set_beside(f"request-{request}", Beside(media=media, features=image))
        assert engine.load(*keys) == [content(each) for each in keys[:found]]
    engine.close()


def test_weights_that_change_in_memory_find_nothing_and_come_back(start: Start) -> None:
    engine = start([full()])
    asked, other = prompt(7, 200), prompt(8, 200)
    engine.ask(asked)
    engine.reload(1)
    # vLLM's own tiers have KV of the weights before, and offer it.
    engine.ask(asked)
    engine.ask(other)
    engine.faults.clear()
    engine.reset(external=False)
    # Its CPU tier is not empty yet.
    engine.ask(asked)
    engine.faults.clear()
    engine.reset(external=True)
    assert engine.ask(asked, other) == [0, 0]
    assert engine.faults == []
    engine.reset(external=True)
    assert min(engine.ask(asked, other)) > 0, "stored since the reset"
    engine.reload(0)
    engine.reset(external=True)
    assert engine.ask(asked)[0] > 0
    assert engine.ask(other) == [0]
    assert engine.faults == []


def test_a_change_that_nobody_watches_withdraws_what_was_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_weights, "SAMPLE_STEPS", 20)
    engine = start([full()])
    asked = prompt(9, 200)
    engine.ask(prompt(10, 200))
    engine.weights = 1
    engine.ask(asked)
    for seed in range(20):
        engine.ask(prompt(seed, 20))
    engine.weights = 0
    engine.reset(external=True)
    engine.faults.clear()
    assert engine.ask(asked) == [0]
    assert engine.faults == []


@pytest.mark.parametrize("tiers", [None, [], [{"type": "fs", "root_dir": "/x"}]], ids=str)
def test_the_connector_without_its_tier_is_refused(tmp_path: Path, tiers: Any) -> None:
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers}
    transfer = OURS | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = vllm_config(tmp_path, transfer, 64, True)
    with pytest.raises(kvdepot.ConfigError, match=r"secondary_tiers: .*KvdepotTier"):
        KvdepotTieringConnector(config, KVConnectorRole.SCHEDULER, None)
    with pytest.raises(kvdepot.ConfigError, match=r"secondary_tiers: .*KvdepotTier"):
        KvdepotTieringConnector.build_prom_metrics(config)


@pytest.mark.parametrize("spec", ["CPUOffloadingSpec", "Mine", None], ids=str)
def test_a_spec_without_tiers_behind_it_is_refused(tmp_path: Path, spec: Any) -> None:
    tiers = [{"type": "KvdepotTier", "module_path": "kvdepot.vllm"}]
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers, "spec_name": spec}
    transfer = OURS | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = vllm_config(tmp_path, transfer, 64, True)
    with pytest.raises(kvdepot.ConfigError, match=rf"spec_name: '?{spec}.*'TieringOffloadingSpec'"):
        KvdepotTieringConnector(config, KVConnectorRole.SCHEDULER, None)


def test_an_untested_version_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = KvdepotTieringConnector.requires_piecewise_for_cudagraph
    entry = {"type": "KvdepotTier", "module_path": "kvdepot.vllm", "pipeline": "Cache"}
    extra = {"secondary_tiers": [entry]}
    assert not ask(extra)
    monkeypatch.setattr(versions, "here", lambda: (0, 40))
    with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
        ask(extra)
    # In the workers, too, and in the API server's process.
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
        KvdepotTieringConnector(config, KVConnectorRole.WORKER, None)
    with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
        KvdepotTieringConnector.build_prom_metrics(config)
    assert not ask({"secondary_tiers": [entry | {"allow_untested_vllm": True}]})
    with pytest.raises(kvdepot.ConfigError, match="allow_untested_vllm: 'yes'"):
        ask({"secondary_tiers": [entry | {"allow_untested_vllm": "yes"}]})


def test_hashes_that_may_collide_are_refused(tmp_path: Path) -> None:
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [{"type": "KvdepotTier"}]}
    transfer = OURS | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = vllm_config(tmp_path, transfer, 64, True)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(kvdepot.ConfigError, match="--prefix-caching-hash-algo: 'xxhash'"):
        KvdepotTieringConnector(config, KVConnectorRole.SCHEDULER, None)


def test_pooling_of_whole_prompts_is_refused(tmp_path: Path) -> None:
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [{"type": "KvdepotTier"}]}
    transfer = OURS | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = vllm_config(tmp_path, transfer, 64, True)
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="MEAN")
    with pytest.raises(kvdepot.ConfigError, match="--pooler-config: seq_pooling_type 'MEAN'"):
        KvdepotTieringConnector(config, KVConnectorRole.SCHEDULER, None)
