"""Which options a block's name covers: every one that vLLM has, unless a list says otherwise."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest
from identity.engines import configured
from kvdepot.engine import options

pytest.importorskip("vllm", reason="engine: vLLM is not installed (make test installs it)")
import torch
import vllm.config
from kvdepot.vllm import namespace as vllm_namespace
from kvdepot.vllm import option_tables as tables
from kvdepot.vllm import options as vllm_options
from kvdepot.vllm import variable_tables as variables
from kvdepot.vllm.compat import versions
from kvdepot.vllm.connector import KvdepotConnector
from kvdepot.vllm.faults import Faults, SafeDepot
from vllm import envs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

pytestmark = pytest.mark.unit

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 256,
}
# Sections of vLLM's configuration that are left out unless an option asks for them.
ASKED_FOR = {
    "lora_config": "LoRAConfig",
    "speculative_config": None,
    "diffusion_config": "DiffusionConfig",
    "engram_config": "EngramConfig",
    "attention_config.hisparse_config": "HiSparseConfig",
    "model_config.multimodal_config": "MultiModalConfig",
    "model_config.pooler_config": "PoolerConfig",
    "kv_events_config": "KVEventsConfig",
    "kv_transfer_config": "KVTransferConfig",
    "ec_transfer_config": "ECTransferConfig",
    "reasoning_config": "ReasoningConfig",
    "watermark_config": "WatermarkConfig",
    "weight_transfer_config": "WeightTransferConfig",
}
# Where vLLM's own hash of a configuration, which is for compiled code, has an option that the list
# calls harmless: why the list is right.
MORE_CAREFUL = {
    "a compiled graph depends on it; what it computes does not": """
        aux_output_config. compilation_config. device_config. kernel_config. offload_config.
        parallel_config. scheduler_config. attention_config. lora_config. ec_manager_config.
        cache_config.hash_block_size cache_config.kv_cache_layout cache_config.kv_offloading_
        cache_config.swa_bounded_replay load_config. speculative_config. ec_transfer_config.
        kv_transfer_config. kv_events_config. observability_config. profiler_config.
        structured_outputs_config. reasoning_config. watermark_config. weight_transfer_config.
        logging_config.
    """,
    "the files and the resolved configuration count": """
        model_config.model model_config.model_weights model_config.revision
        model_config.code_revision model_config.hf_text_config model_config.trust_remote_code
        model_config.word_embeddings_untied_by_checkpoint model_config.generation_config
        model_config.override_generation_config
    """,
    "sleep, limits and answers": """
        model_config.enable_ model_config.sleep_ model_config.max_logprobs model_config.runner
        model_config.is_submodel_config model_config.allow_deprecated_quantization
        model_config.renderer_num_workers model_config.pooler_config model_config.disable_cascade
        model_config.multimodal_config.
    """,
}


def write_model(directory: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps((config or LLAMA) | more))
    return directory


def engine_config(directory: Path, **arguments: Any) -> Any:
    """What vLLM makes of its options."""
    from vllm.engine.arg_utils import EngineArgs

    chosen = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    return configured(EngineArgs(model=str(directory), **(chosen | arguments)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(write_model(tmp_path_factory.mktemp("options") / "model"))


def sections(found: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every configuration in a configuration, by its dotted name."""
    yield prefix.rstrip("."), found
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if dataclasses.is_dataclass(value) and "vllm.config" in type(value).__module__:
            yield from sections(value, f"{prefix}{field.name}.")


def all_options(config: Any) -> Iterator[tuple[str, str]]:
    """Section and name of each option that `create_engine_config` can build."""
    known = dict(sections(config))
    for section, name in ASKED_FOR.items():
        if name is not None:
            known.setdefault(section, getattr(vllm.config, name, None) or _config_class(name))
    known["speculative_config"] = vllm.config.SpeculativeConfig
    for section, of_section in known.items():
        for field in dataclasses.fields(of_section):
            if f"{section}.{field.name}".lstrip(".") not in known:
                yield section, field.name


def _config_class(name: str) -> Any:
    import importlib
    import pkgutil

    for found in pkgutil.iter_modules(vllm.config.__path__):
        module = importlib.import_module(f"vllm.config.{found.name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)


def listed() -> dict[str, list[str]]:
    """Option -> the tables that it stands in."""
    found: dict[str, list[str]] = {}
    for section, reasons in tables.HARMLESS.items():
        for names in reasons.values():
            for name in names.split():
                found.setdefault(f"{section}.{name}".lstrip("."), []).append("harmless")
    for kind, table in (
        ("counts", tables.COUNTS),
        ("adapter", tables.UNDER_ADAPTERS),
        ("media", tables.FOR_MEDIA),
        ("resolved", tables.RESOLVED),
    ):
        for section, names in table.items():
            for name in names.split():
                found.setdefault(f"{section}.{name}".lstrip("."), []).append(kind)
    return found


def of_other_versions(table: Any) -> set[str]:
    """What a table has for other versions of vLLM than the one that is installed."""
    here = versions.here()
    assert here is not None

    def minor(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    later = {name for first, names in table.SINCE.items() if minor(first) > here
             for name in names.split()}  # fmt: skip
    earlier = {name for last, names in table.UNTIL.items() if minor(last) < here
               for name in names.split()}  # fmt: skip
    return later | earlier


def test_every_option_stands_in_one_table(config: Any) -> None:
    known = listed()
    assert [name for name, kinds in known.items() if len(kinds) != 1] == []
    options_of_vllm = {f"{section}.{name}".lstrip(".") for section, name in all_options(config)}
    drafts = ("speculative_config.draft_model_config", "speculative_config.draft_load_config")
    nobody_looked_at = sorted(options_of_vllm - set(known) - set(drafts))
    assert nobody_looked_at == [], "put each into a table of kvdepot.vllm.option_tables"
    whole = dict(sections(config)) | ASKED_FOR
    gone = set(known) - options_of_vllm - set(whole) - of_other_versions(tables)
    assert sorted(name for name in gone if ".quantization_config" not in name) == []
    assert not options_of_vllm & of_other_versions(tables)
    assert len(options_of_vllm) > 400


def test_every_environment_variable_stands_in_one_table() -> None:
    harmless = [name for names in variables.HARMLESS_VARIABLES.values() for name in names.split()]
    counted = variables.COUNTED_VARIABLES.split()
    both = harmless + counted
    assert len(both) == len(set(both))
    assert sorted(set(envs.environment_variables) - set(both)) == []
    # One that vLLM writes and does not list.
    others = of_other_versions(variables)
    assert set(both) - set(envs.environment_variables) == {"VLLM_DIST_IDENT"} | others


def test_every_other_variable_that_vllm_reads_was_looked_at() -> None:
    """Its layers also read variables without its prefix."""
    read = re.compile(
        r"""(?:environ(?:\.get|\.setdefault|\.pop)?|getenv)\s*[\[(]\s*["']([A-Za-z_0-9]+)["']"""
    )
    found = set()
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        found |= set(read.findall(file.read_text(encoding="utf-8")))
    found -= set(envs.environment_variables)
    others = {name for name in found if not name.startswith("VLLM_")}
    counted = {*vllm_options.OTHER_VARIABLES, *vllm_options.MEDIA_VARIABLES}
    looked_at = {name for names in OTHERS_LOOKED_AT.values() for name in names.split()}
    assert counted & looked_at == set()
    assert sorted(others - counted - looked_at) == []
    # Gone from vLLM, or of the libraries below it.
    elsewhere = of_other_versions(OTHERS_BY_VERSION)
    assert sorted(looked_at - others) == sorted(elsewhere)


def test_other_variables_count(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = texts(config)
    for name in vllm_options.OTHER_VARIABLES:
        monkeypatch.setenv(name, "1")
        assert texts(config).base != before.base, name
        monkeypatch.delenv(name)
    for name in vllm_options.MEDIA_VARIABLES:
        monkeypatch.setenv(name, "1")
        assert texts(config).media != before.media, name
        assert texts(config).base == before.base, name
        monkeypatch.delenv(name)


def test_vllms_own_list_of_variables_agrees() -> None:
    """What vLLM leaves out for compiled code may change KV; what it counts may not. Each of these
    was looked at."""
    harmless = {name for names in variables.HARMLESS_VARIABLES.values() for name in names.split()}
    counted_by_vllm = harmless & set(envs.compile_factors())
    elsewhere = of_other_versions(variables) | of_other_versions(COUNTED_BY_VERSION)
    assert sorted(counted_by_vllm) == sorted(set(LOOKED_AT.split()) - elsewhere)


def test_vllms_own_hashes_agree(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that vLLM compiles code by is not called harmless without a reason."""
    import vllm.config.utils as utils

    seen: list[tuple[Any, set[str]]] = []
    found = utils.get_hash_factors

    def recorded(of: Any, ignored_factors: set[str]) -> Any:
        seen.append((of, ignored_factors))
        return found(of, ignored_factors)

    monkeypatch.setattr(utils, "get_hash_factors", recorded)
    reasons = [prefix for text in MORE_CAREFUL.values() for prefix in text.split()]
    compared, bad = 0, []
    for section, of_section in sections(config):
        if not section or not hasattr(of_section, "compute_hash"):
            continue
        seen.clear()
        of_section.compute_hash()
        for of, ignored in seen:
            if of is not of_section:
                continue
            for name in {field.name for field in dataclasses.fields(of)} - ignored:
                full = f"{section}.{name}"
                compared += 1
                is_known = any(full.startswith(prefix) for prefix in reasons)
                if vllm_options.kind_of(full) == "harmless" and not is_known:
                    bad.append(full)
    assert bad == []
    assert compared > 100


def another(value: Any) -> Any:
    """A value that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 17
    return secrets.token_hex(4) if isinstance(value, str) else "another"


def texts(config: Any) -> vllm_options.Options:
    return vllm_options.of(config)


def test_each_option_counts_or_does_not(config: Any) -> None:
    """Changed one at a time, in the configuration itself."""
    before, tried, wrong = texts(config), 0, []
    for section, of_section in list(sections(config)):
        for field in dataclasses.fields(of_section):
            full = f"{section}.{field.name}".lstrip(".")
            value = getattr(of_section, field.name)
            kind = vllm_options.kind_of(full)
            if dataclasses.is_dataclass(value) or kind in ("resolved", "adapter", "media"):
                continue
            if full in ("model_config.hf_text_config", "parallel_config.world_size"):
                continue
            if full in ("lora_config", "speculative_config", "quant_config"):
                continue
            object.__setattr__(of_section, field.name, another(value))
            try:
                changed = texts(config).base != before.base
            finally:
                object.__setattr__(of_section, field.name, value)
            tried += 1
            if changed != (kind == "base"):
                wrong.append((full, kind))
    assert wrong == []
    assert tried > 250
    assert texts(config) == before


def test_an_option_that_nobody_has_listed_counts(config: Any) -> None:
    assert vllm_options.kind_of("cache_config.of_a_later_version") == "base"
    assert vllm_options.kind_of("of_a_later_version") == "base"
    said = dict(vllm_options.variables({"VLLM_OF_A_LATER_VERSION": "1", "HOME": "/root"}))
    assert said == {"VLLM_OF_A_LATER_VERSION": "1"}


def test_what_kubernetes_writes_into_every_pod_does_not_count() -> None:
    """For a service whose name begins with vllm."""
    written = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR")
    environment = {f"VLLM_ROUTER_{name}": "10.0.0.7" for name in written}
    assert list(vllm_options.variables(environment)) == []


def test_a_later_version_with_more_options_keeps_the_names() -> None:
    """What equals its default is left out, so that an upgrade does not lose the store."""

    @dataclasses.dataclass
    class Section:
        known: int = 1

    @dataclasses.dataclass
    class Later(Section):
        new: str = "as before"

    assert dict(options.walk(Section(2))) == dict(options.walk(Later(2))) == {"known": 2}
    assert dict(options.walk(Later(2, "other"))) == {"known": 2, "new": "other"}


def test_secrets_enter_no_name(config: Any) -> None:
    @dataclasses.dataclass
    class Section:
        hf_token: str = ""
        api_key: str = ""
        max_tokens: int = 0
        extra: dict[str, str] = dataclasses.field(default_factory=dict)

    extra = {"s3_secret_access_key": "hunter2", "s3_access_key_id": "hunter2", "region": "here"}
    found = options.text_of(dict(options.walk(Section("hunter2", "hunter2", 3, extra))))
    assert "hunter2" not in found
    assert json.loads(found) == {"max_tokens": 3, "extra": {"region": "here"}}
    values = {"VLLM_API_KEY": "hunter2", "VLLM_NEW_SECRET": "hunter2", "VLLM_X_TOKEN": "hunter2"}
    assert list(vllm_options.variables(values)) == []


def test_nothing_of_a_models_configuration_is_taken_for_a_secret(config: Any) -> None:
    before = texts(config)
    config.model_config.hf_config.num_experts_per_token = 4
    try:
        assert texts(config).base != before.base
    finally:
        del config.model_config.hf_config.num_experts_per_token


def test_two_starts_have_the_same_names(tmp_path: Path) -> None:
    """Ports, ids, paths, names and sizes differ; keys and values do not."""
    one = write_model(tmp_path / "one")
    two = write_model(tmp_path / "two", _name_or_path="elsewhere", transformers_version="9.9")
    other = engine_config(
        two,
        max_num_seqs=3,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.5,
        max_model_len=2048,
        served_model_name="another",
        seed=7,
        enforce_eager=False,
        generation_config="vllm",
        distributed_executor_backend="uni",
    )
    assert texts(engine_config(one)) == texts(other)


def group_of_layers() -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return KVCacheGroupSpec(["layer.0"], spec)


# Of an engine that is started with one option more. The connector is the default's, too.
TRANSFER = {
    "kv_connector": "KvdepotConnector",
    "kv_connector_module_path": "kvdepot.vllm",
    "kv_role": "kv_both",
}
HARMLESS_ARGUMENTS: dict[str, dict[str, Any]] = {
    # A directory that exists: offline, vLLM takes any other for a name in the hub.
    "--tokenizer": {"tokenizer": str(Path(__file__).parent)},
    "--enable-lora --max-loras": {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4},
    "--gpu-memory-utilization": {"gpu_memory_utilization": 0.3},
    "--scheduling-policy": {"scheduling_policy": "priority"},
    "--no-enforce-eager -O0": {"enforce_eager": False, "optimization_level": 0},
    "--hf-token": {"hf_token": "hf_of_this_test"},
    "kv_producer": {"kv_transfer_config": TRANSFER | {"kv_role": "kv_producer"}},
    "kv_consumer": {"kv_transfer_config": TRANSFER | {"kv_role": "kv_consumer"}},
    "VLLM_CPU_KVCACHE_SPACE": {"environment": {"VLLM_CPU_KVCACHE_SPACE": "2"}},
}
COUNTED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--dtype": {"dtype": "bfloat16"},
    "--hf-overrides": {"hf_overrides": {"rms_norm_eps": 0.5}},
    "--model-impl": {"model_impl": "transformers"},
    "salt": {"salt": "of this test"},
    "VLLM_CPU_ATTN_SPLIT_KV": {"environment": {"VLLM_CPU_ATTN_SPLIT_KV": "0"}},
}


@pytest.fixture(scope="module")
def namespace_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., bytes]]:
    """The digest of the namespace of an engine with these arguments, as its connector's two sides
    make it."""
    model = write_model(tmp_path_factory.mktemp("namespace") / "model")
    (model / "pytorch_model.bin").write_bytes(b"weights")
    group = group_of_layers()
    offloaded = SimpleNamespace(
        group_idx=0, tokens_per_chunk=32, sliding_window_size_in_chunks=None
    )
    mover = SimpleNamespace(device="cpu", rank=0, payload_bytes=lambda: [4096])
    with kvdepot.open("Cache", {"cache": {"capacity": "1MiB"}}) as depot:

        def digest(salt: str | None = None, **arguments: Any) -> bytes:
            chosen = {"kv_transfer_config": TRANSFER} | arguments
            chosen["kv_transfer_config"] = vllm.config.KVTransferConfig(
                **chosen["kv_transfer_config"]
            )
            config = engine_config(model, **chosen)
            connector: Any = SimpleNamespace(
                _vllm_config=config,
                _settings=SimpleNamespace(share_versions=False),
                _kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
                _offloaded_groups=lambda: [group],
                _half=SimpleNamespace(mover=mover, spec=SimpleNamespace(replicated_layout=False)),
                manager=SimpleNamespace(depot=SafeDepot(depot, Faults(None)), writers=1),
                scheduler=SimpleNamespace(config=SimpleNamespace(kv_group_configs=[offloaded])),
            )
            geometry = KvdepotConnector._geometry(connector)
            weights = vllm_namespace.weights(config, "sampled")
            fields = vllm_namespace.fields(config, salt, weights)
            return KvdepotConnector._groups(connector, fields, [geometry])[0].namespace.digest

        yield digest


@pytest.fixture(scope="module")
def namespace(namespace_of: Callable[..., bytes]) -> bytes:
    """That of an engine without further arguments."""
    return namespace_of()


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        *(pytest.param(given, True, id=name) for name, given in HARMLESS_ARGUMENTS.items()),
        *(pytest.param(given, False, id=name) for name, given in COUNTED_ARGUMENTS.items()),
    ],
)
def test_one_more_argument_changes_the_namespace_or_does_not(
    namespace_of: Callable[..., bytes],
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
    *,
    arguments: dict[str, Any],
    same: bool,
) -> None:
    """Of those that users change from one start to the next, each through vLLM's own arguments."""
    given = dict(arguments)
    for name, value in given.pop("environment", {}).items():
        monkeypatch.setenv(name, value)
    assert (namespace_of(**given) == namespace) is same


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        # On the same side of the length that the model was trained at.
        (512, 1024, True),
        (2048, 4096, True),
        (1024, 4096, False),
    ],
)
def test_the_length_counts_where_longrope_reads_it(
    tmp_path: Path, *, one: int, two: int, same: bool
) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    }
    model = write_model(
        tmp_path / "phi3",
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        rope_scaling=rope,
        rope_parameters=rope,
        original_max_position_embeddings=1024,
        pad_token_id=0,
    )
    found = [texts(engine_config(model, max_model_len=length)).base for length in (one, two)]
    assert (found[0] == found[1]) is same


def test_the_length_counts_for_rope_that_nobody_has_looked_at(config: Any) -> None:
    model = config.model_config
    assert vllm_options.length_of(model) is None
    before = model.hf_config.rope_parameters
    try:
        model.hf_config.rope_parameters = {"rope_type": "of_a_later_version", "rope_theta": 1.0}
        assert vllm_options.length_of(model) == {"length": model.max_model_len}
    finally:
        model.hf_config.rope_parameters = before


def test_llama_4_scales_its_queries_by_length(config: Any, tmp_path: Path) -> None:
    model = config.model_config
    lengths = {}
    before = model.hf_config.architectures, model.max_model_len, model.override_generation_config
    try:
        model.hf_config.architectures = ["Llama4ForCausalLM"]
        for length in (1024, 32768, 40000, 80000):
            model.max_model_len = length
            lengths[length] = vllm_options.length_of(model)
        model.override_generation_config = {"attn_temperature_tuning": False}
        assert vllm_options.length_of(model) == lengths[1024]
    finally:
        (
            model.hf_config.architectures,
            model.max_model_len,
            model.override_generation_config,
        ) = before
    assert lengths[1024] == lengths[32768] != lengths[40000] == lengths[80000]


def test_the_length_counts_that_a_model_was_built_with(tmp_path: Path) -> None:
    """vLLM makes of -1 what fits into its memory, once the model is there."""
    directory = write_model(tmp_path / "model", max_position_embeddings=1 << 16)
    found = []
    for given, fitted in ((-1, 1024), (1 << 16, 1 << 16), (1024, 1024)):
        model = engine_config(directory, max_model_len=given).model_config
        model.hf_config.architectures = ["Llama4ForCausalLM"]
        model.max_model_len = fitted
        found.append(vllm_options.length_of(model))
    assert found[0] == found[1] != found[2]


def test_what_a_model_writes_into_its_configuration_changes_nothing(config: Any) -> None:
    """Under one executor the scheduler sees it, under the other it does not."""
    hf_config = config.model_config.hf_config
    architectures = hf_config.architectures
    for of_model, changes in (("Llama4ForCausalLM", False), ("LlamaForCausalLM", True)):
        hf_config.architectures = [of_model]
        before = texts(config)
        hf_config.attn_temperature_tuning = True
        try:
            assert (texts(config) != before) is changes, of_model
        finally:
            del hf_config.attn_temperature_tuning
            hf_config.architectures = architectures


def test_quantization_of_the_command_line_counts(config: Any) -> None:
    before = texts(config).base
    config.model_config.quantization_config = {"weight_dtype": "int8"}
    try:
        assert texts(config).base != before
    finally:
        config.model_config.quantization_config = None


def test_a_file_of_quantization_counts(config: Any, tmp_path: Path) -> None:
    """Of `--hf-overrides`: the resolved configuration has its path alone."""
    file = tmp_path / "torchao_config.json"
    found = [texts(config).base]
    try:
        config.model_config.hf_overrides = {"quantization_config_file": str(file)}
        for content in ("one", "two"):
            file.write_text(content)
            found.append(texts(config).base)
    finally:
        config.model_config.hf_overrides = {}
    assert len(set(found)) == 3


TOWER = {"enable_tower_connector_lora": True}


def test_adapters_options_count_under_adapters_alone(config: Any) -> None:
    from vllm.config import LoRAConfig

    before = texts(config)

    def found(**more: Any) -> vllm_options.Options:
        config.lora_config = LoRAConfig(**more)
        now = texts(config)
        config.lora_config = None
        assert now.base == before.base
        return now

    counting = ({"target_modules": ["o_proj"]}, {"lora_dtype": "float16"}, TOWER)
    assert found(max_loras=4, max_cpu_loras=4).adapter == found().adapter
    assert len({found().adapter, *(found(**more).adapter for more in counting)}) == 4


def test_processor_options_count_for_media_alone(config: Any) -> None:
    from vllm.config import MultiModalConfig

    found = []
    for more in (
        {},
        {"mm_processor_cache_gb": 1},
        {"mm_processor_kwargs": {"max_pixels": 100}},
        {"mm_encoder_attn_dtype": "fp8"},
        {"video_pruning_rate": 0.5},
    ):
        config.model_config.multimodal_config = MultiModalConfig(**more)
        found.append(texts(config))
    config.model_config.multimodal_config = None
    assert len({one.base for one in found}) == 1
    assert found[0].media == found[1].media
    assert len({one.media for one in found}) == 4


def test_a_gpus_capability_counts_under_quantized_weights_or_kv(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of FP8 round activations where the GPU can multiply FP8, and nowhere else."""
    from vllm.platforms.interface import DeviceCapability

    group = group_of_layers()
    found: dict[tuple[str | None, str], set[str]]
    found = {(None, "auto"): set(), ("fp8", "auto"): set(), (None, "fp8"): set()}
    for major in (8, 9):
        platform = SimpleNamespace(
            get_device_capability=lambda major=major: DeviceCapability(major, 0)
        )
        monkeypatch.setattr(vllm_namespace, "current_platform", platform)
        for (quantization, dtype), layouts in found.items():
            monkeypatch.setattr(config.model_config, "quantization", quantization)
            monkeypatch.setattr(config.cache_config, "cache_dtype", dtype)
            layouts.add(vllm_namespace.layout_of_group(config, group, {}, "cuda"))
    assert [len(layouts) for layouts in found.values()] == [1, 2, 2]


def test_other_packages_that_patch_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    entry = importlib.metadata.EntryPoint("patches", "patches:go", vllm_options.PLUGINS[0])
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [entry] if group == vllm_options.PLUGINS[0] else [],
    )
    assert vllm_options.plugins() == ["patches "]
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert vllm_options.plugins() == []


# Variables without vLLM's prefix that its sources read, and why they change no keys and values.
OTHERS_LOOKED_AT = {
    "written by vLLM itself": """
        AITER_BF16_FP8_MOE_BOUND COMPILE_ONLY CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE
        CUDA_MPS_PIPE_DIRECTORY HIP_ONLINE_TUNING NCCL_ALGO NCCL_COLLNET_ENABLE NCCL_LAUNCH_MODE
        NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_NET_DISABLE
        NCCL_PROTO NCCL_RAS_ENABLE NCCL_SOCKET_NTHREADS PYTORCH_NVML_BASED_CUDA_CHECK
        PYTORCH_ROCM_ARCH TILELANG_CLEANUP_TEMP_FILES TORCHINDUCTOR_COMPILE_THREADS
        TORCHINDUCTOR_CPP_DYNAMIC_THREADS TRITON_CACHE_AUTOTUNING
    """,
    "which kernel adds the same numbers, and how it is compiled": """
        ARCH CUTE_DSL_PTXAS_PATH FA_CLC FA_DISABLE_2CTA FLASH_ATTENTION_ARCH
        FLASH_ATTENTION_NUM_SMS FLASH_ATTENTION_TRITON_AMD_ENABLE FLA_CI_ENV FLA_COMPILER_MODE
        FLA_USE_CUDA_GRAPH FLA_USE_TMA FMHA_GMEM_CHECK FMHA_SM100_BLACKWELL_PREFILL
        FMHA_SM100_DECODE_Q8KV4_ARCH FMHA_SM100_KVOUTER_CPP FORCE_NUM_KV_SPLITS
        GDN_RECOMPUTE_SUPPRESS_LEVEL GPU_TRACE MINIMAX_KERNELS_KVOUTER_COUNT_REPLICAS
        MINIMAX_KERNELS_KVOUTER_CPP MM_SPARSE_ATTN_AOT_DISABLE MSA_Q8KV4_SPLIT_MODE
        NUMEXPR_MAX_THREADS OMP_NUM_THREADS SM_TIMING TORCH_COMPILE_DISABLE XPU_USE_TRITON_KERNEL
    """,
    "devices, ranks and the network": """
        CCL_ATL_TRANSPORT CUDA_DEVICE_ORDER EP_DISABLE_GIN GPU_PINNED_MIN_XFER_SIZE
        HIP_VISIBLE_DEVICES JAX_PLATFORMS LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
        MORI_SHMEM_HEAP_SIZE
        NCCL_ASYNC_ERROR_HANDLING NCCL_GRAPH_REGISTER NCCL_MAX_CTAS NCCL_NO_CACHE
        PYTORCH_CUDA_ALLOC_CONF RANK RAY_ADDRESS RAY_CGRAPH_get_timeout RAY_USAGE_STATS_ENABLED
        UCX_MEMTYPE_CACHE UCX_RCACHE_MAX_UNRELEASED WORLD_SIZE
    """,
    "where files and libraries are": """
        CONDA_EXE CONDA_PREFIX CRIU_CUDA_PLUGIN_DIR CUDACXX CUDA_MODULE_LOADING CUDA_PATH
        CUDNN_LIBRARY CUTE_CUBIN_PATH CUTE_DSL_DUMP_DIR FLASHINFER_CUBINS_REPOSITORY
        FLASH_ATTENTION_CUTE_DSL_CACHE_DIR FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED
        FLYDSL_RUNTIME_CACHE_DIR LD_PRELOAD MINFER_FMHA_CACHE_DIR MINIMAX_KERNELS_CUTE_AOT_CACHE
        MM_SPARSE_ATTN_AOT_CACHE OUTLINES_CACHE_DIR PATH PROGRAMFILES ProgramFiles ROCM_HOME
        ROCM_PATH SYSTEMROOT TORCHINDUCTOR_CACHE_DIR TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR
        TRITON_CACHE_DIR UV WINDIR XDG_CACHE_HOME XDG_CONFIG_HOME
    """,
    "weights behind them have to be named": """
        AWS_ENDPOINT_URL RUNAI_STREAMER_S3_ENDPOINT
    """,
    "other connectors": """
        LMCACHE_CONFIG_FILE LMCACHE_FORCE_SKIP_SAVE LMCACHE_USE_UPSTREAM_MP MOONCAKE_CONFIG_PATH
    """,
    "logs, traces, metrics and answers": """
        CUTE_DSL_KEEP_CUBIN CUTE_DSL_KEEP_PTX CUTE_DSL_PTXAS_VERBOSE DG_USE_NVIDIA_TOOLS
        DO_NOT_TRACK FA_LOG_LEVEL LLGUIDANCE_LOG_LEVEL MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS
        MINIMAX_LOG_COMPILE OTEL_EXPORTER_OTLP_TRACES_ENDPOINT PROMETHEUS_MULTIPROC_DIR
        PROTON_LAUNCH_METADATA_NOSYNC SAVE_TO_PYTORCH_BENCHMARK_FORMAT SKIP_COMPUTE_SANITIZER
        TRACEPARENT TRACESTATE TRITON_PRINT_AUTOTUNING traceparent tracestate
    """,
    "secrets": """
        EXA_API_KEY MODELSCOPE_API_TOKEN OPENAI_API_KEY
    """,
    "a part of the name of its own": """
        PYTHONHASHSEED
    """,
}
# Of these, what not every version reads. Most of 0.33's are of kernels in its wheel for CUDA.
OTHERS_BY_VERSION = SimpleNamespace(
    SINCE={
        "0.32": """
            FLYDSL_RUNTIME_CACHE_DIR MORI_SHMEM_HEAP_SIZE NCCL_GRAPH_REGISTER NCCL_NO_CACHE
        """,
        "0.33": """
            ARCH COMPILE_ONLY CUDACXX CUDA_MPS_PIPE_DIRECTORY CUTE_CUBIN_PATH CUTE_DSL_DUMP_DIR
            CUTE_DSL_KEEP_CUBIN CUTE_DSL_KEEP_PTX CUTE_DSL_PTXAS_PATH CUTE_DSL_PTXAS_VERBOSE
            DG_USE_NVIDIA_TOOLS FA_CLC FA_DISABLE_2CTA FA_LOG_LEVEL FLASH_ATTENTION_ARCH
            FLASH_ATTENTION_CUTE_DSL_CACHE_DIR FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED
            FLASH_ATTENTION_NUM_SMS FMHA_GMEM_CHECK FMHA_SM100_BLACKWELL_PREFILL
            FMHA_SM100_DECODE_Q8KV4_ARCH FMHA_SM100_KVOUTER_CPP GPU_TRACE MASTER_ADDR MASTER_PORT
            MINFER_FMHA_CACHE_DIR MINIMAX_KERNELS_CUTE_AOT_CACHE
            MINIMAX_KERNELS_KVOUTER_COUNT_REPLICAS MINIMAX_KERNELS_KVOUTER_CPP
            MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS MINIMAX_LOG_COMPILE MM_SPARSE_ATTN_AOT_CACHE
            MM_SPARSE_ATTN_AOT_DISABLE MSA_Q8KV4_SPLIT_MODE NCCL_RAS_ENABLE PATH
            PROTON_LAUNCH_METADATA_NOSYNC PYTORCH_ROCM_ARCH SKIP_COMPUTE_SANITIZER SM_TIMING
            TORCH_EXTENSIONS_DIR
        """,
    },
    UNTIL={
        "0.31": """
            NCCL_ALGO NCCL_COLLNET_ENABLE NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_NTHREADS
            NCCL_NVLS_ENABLE NCCL_P2P_NET_DISABLE NCCL_PROTO NCCL_SOCKET_NTHREADS
        """,
        "0.32": "RAY_CGRAPH_get_timeout",
    },
)

# Counted by vLLM for the code that it compiles.
LOOKED_AT = """
    CMAKE_BUILD_TYPE CUDA_HOME MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME
    NVCC_THREADS VERBOSE VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_BUILD_COMMIT
    VLLM_BUILD_PIPELINE VLLM_BUILD_URL
    VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS
    VLLM_CONFIGURE_LOGGING VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
    VLLM_CUDART_SO_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE
    VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    VLLM_DOCKER_BUILD_CONTEXT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_EC_SIDE_CHANNEL_PORT VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ENABLE_COHERE_API
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
    VLLM_GPU_SYNC_CHECK VLLM_IMAGE_TAG VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
    VLLM_LOOPBACK_IP VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
    VLLM_MAIN_CUDA_VERSION VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
    VLLM_MAX_STOP_STRINGS VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
    VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIXL_SIDE_CHANNEL_PORT
    VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
    VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
    VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS
    VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS
    VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RUST_FRONTEND_PATH VLLM_SKIP_P2P_CHECK
    VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SYSTEM_START_DATE VLLM_TARGET_DEVICE
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TRACE_FUNCTION
    VLLM_USAGE_SOURCE VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
    VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
    VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH
    VLLM_USE_RUST_FRONTEND VLLM_V1_USE_OUTLINES_CACHE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
    VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XGRAMMAR_CACHE_MB
"""
# Of these, what not every version counts that has the variable.
COUNTED_BY_VERSION = SimpleNamespace(SINCE={}, UNTIL={"0.32": "VLLM_RAY_BUNDLE_INDICES"})
