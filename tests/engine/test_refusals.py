"""What is refused at start, with words that name it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvdepot
import pytest
from engine_fleet import Fleet, Plan
from vllm_demo.server import ServerError


@pytest.mark.stress  # It takes a whole start; TestSettings and the hooks below refuse it too.
def test_a_misspelt_option_ends_the_start_and_is_named(fleet: Fleet) -> None:
    misspelt = Plan("refused", lambda arena: {"dax": {"path": str(arena), "capacty": "64MiB"}})
    with pytest.raises(ServerError):
        fleet.take(misspelt)
    log = fleet.log(misspelt)
    assert "capacty" in log
    assert "ConfigError" in log
    assert not fleet.arena(misspelt).exists()


@pytest.mark.unit
class TestSettings:
    def read(self, **extra: Any) -> Any:
        from kvdepot.vllm import settings as vllm_settings

        return vllm_settings.read(extra)

    def test_nothing_given_is_the_default_pipeline(self) -> None:
        settings = self.read()
        assert settings.pipeline == "Cache|Dax"
        assert settings.depot == {"overload": "drop", "admission": "learned"}
        assert not settings.offload_prompt_only

    def test_keys_go_where_they_belong(self) -> None:
        settings = self.read(
            pipeline="Dax",
            dax={"path": "/x"},
            lookup_wait="250ms",
            salt="s",
            offload_prompt_only=True,
            block_size=256,
        )
        kept = {"overload": "drop", "admission": "learned"}
        assert settings.depot == {"dax": {"path": "/x"}, **kept}
        assert settings.lookup_wait_seconds == 0.25
        assert settings.offload_prompt_only
        assert settings.merged["block_size"] == 256

    def test_a_service_is_named_by_its_socket(self) -> None:
        settings = self.read(pipeline="unix:/run/kvdepot.sock", lanes=2, salt="s")
        assert settings.shared
        # What happens under overload is the service's to say.
        assert settings.depot == {"lanes": 2}
        assert not self.read(pipeline="Cache").shared

    def test_a_file_holds_the_same_keys(self, tmp_path: Path) -> None:
        file = tmp_path / "depot.yaml"
        file.write_text("pipeline: Dax\noverload: wait\ndax:\n  path: /x\n")
        settings = self.read(config_file=str(file), salt="s")
        assert settings.pipeline == "Dax"
        assert settings.depot["overload"] == "wait"
        assert "config_file" not in settings.merged
        with pytest.raises(kvdepot.ConfigError, match="pipeline: set in"):
            self.read(config_file=str(file), pipeline="Dax")
        with pytest.raises(kvdepot.ConfigError, match=r"dax.path: set in"):
            self.read(config_file=str(file), dax={"path": "/y"})
        settings = self.read(config_file=str(file), dax={"capacity": "2GiB"})
        assert settings.depot["dax"] == {"path": "/x", "capacity": "2GiB"}

    @pytest.mark.parametrize("name", ["UCM_CONFIG_FILE", "config_file"])
    def test_a_file_of_ucms_is_read_by_either_name(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / "ucm_config.yaml"
        file.write_text(
            'ucm_connectors:\n  - ucm_connector_name: "UcmPipelineStore"\n'
            "    ucm_connector_config:\n"
            '      store_pipeline: "Cache|Posix"\n      storage_backends: "/mnt/test"\n'
            "      io_direct: false\n      cache_buffer_capacity_gb: 1\n"
            "load_only_first_rank: false\n"
        )
        settings = self.read(**{name: str(file)}, lanes=2)
        assert settings.pipeline == "Cache|Posix"
        assert settings.depot["posix"] == {"path": "/mnt/test", "direct": "false"}
        assert settings.depot["cache"] == {"capacity": 1 << 30}
        assert settings.depot["lanes"] == 2
        # What stands beside it holds.
        beside = {"cache": {"capacity": "2GiB"}, "posix": {"fan_out": 16}, "tier_timeout": "5s"}
        settings = self.read(**{name: str(file)}, **beside)
        assert settings.depot["posix"] == {"path": "/mnt/test", "direct": "false", "fan_out": 16}
        assert settings.depot["cache"] == {"capacity": "2GiB"}
        assert settings.depot["tier_timeout"] == "5s"
        assert beside["posix"] == {"fan_out": 16}
        # Of another pipeline only the options of its tiers.
        settings = self.read(**{name: str(file)}, pipeline="Posix")
        assert settings.depot["posix"] == {"path": "/mnt/test", "direct": "false"}
        assert "cache" not in settings.depot
        settings = self.read(**{name: str(file)}, pipeline="unix:/run/kvdepot.sock", lanes=2)
        assert settings.depot == {"lanes": 2}
        file.write_text(file.read_text() + "use_lite: true\n")
        with pytest.raises(kvdepot.ConfigError, match=rf"{name}: .*use_lite"):
            self.read(**{name: str(file)})
        file.write_text("pipeline: Dax\n")
        with pytest.raises(kvdepot.ConfigError, match="pipeline: set in"):
            self.read(**{name: str(file)}, pipeline="Dax")

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            ({"pipeline": 3}, "pipeline: 3"),
            ({"salt": 1}, r"salt: \(not shown\) .*a text"),
            ({"lookup_wait": "soon"}, "lookup_wait: 'soon'.*'500ms'"),
            ({"lookup_wait": -1}, "lookup_wait: -1"),
            ({"offload_prompt_only": "yes"}, "offload_prompt_only: 'yes'.*true or false"),
            ({"config_file": "/nowhere.yaml"}, "config_file: .*/nowhere.yaml"),
            ({"config_file": 7}, "config_file: 7"),
            (
                {"pipeline": "unix:/s", "on_reset": "clear"},
                "on_reset: 'clear'.*'epoch' where other engines",
            ),
            ({"on_reset": "forget"}, "on_reset: 'forget'.*'verify' .*, 'epoch' or 'clear'"),
            ({"on_reset": "keep"}, r"on_reset: 'keep'.*'verify' \(keeps blocks"),
            ({"block_size": 0}, "block_size: 0 .*whole number from 1"),
            ({"block_size": "abc"}, "block_size: 'abc' .*whole number from 1"),
            ({"blocks_per_chunk": 0}, "blocks_per_chunk: 0 .*whole number from 1"),
            ({"weights": ""}, "weights: ''"),
            ({"canonical_layout": True}, "canonical_layout"),
            ({"dax": {"capacty": "1GiB"}}, "capacty.*capacity"),
            ({"pipeline": "Cache|Dex"}, "Dex.*Dax"),
            ({"pipeline": "unix:"}, "unix:/run/kvdepot.sock"),
            ({"pipeline": "unix:/s", "overload": "drop"}, "overload.*set other options"),
            ({"pipeline": "unix:/s", "dax": {"path": "/x"}}, "dax.*set other options"),
            ({"sync_load_budget_bytes": 1 << 20}, "sync_load_budget_bytes.*between steps"),
            ({"allow_untested_vllm": "yes"}, "allow_untested_vllm: 'yes'.*true or false"),
        ],
    )
    def test_a_wrong_value_is_named_with_what_is_allowed(
        self, extra: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(kvdepot.ConfigError, match=words):
            self.read(**extra)

    def test_a_misspelt_key_of_the_connector_is_recognised(self) -> None:
        with pytest.raises(kvdepot.ConfigError, match=r"lookup_wiat.*did you mean 'lookup_wait'"):
            self.read(lookup_wiat="1s")

    def test_one_setting_lets_versions_in_and_another_lets_them_share(self) -> None:
        for untested in (False, True):
            for shared in (False, True):
                settings = self.read(allow_untested_vllm=untested, share_vllm_versions=shared)
                assert (settings.untested_vllm, settings.share_versions) == (untested, shared)


@pytest.mark.unit
class TestEngineConfiguration:
    """On vLLM's configuration as far as the checks read it."""

    @pytest.fixture(autouse=True)
    def vllm(self) -> None:
        pytest.importorskip("vllm")

    def config(self, **changes: Any) -> Any:
        parallel = {
            "nnodes": 1,
            "distributed_executor_backend": "mp",
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        }
        algorithm = changes.pop("algorithm", "sha256")
        extra = changes.pop("extra", {})
        multimodal = changes.pop("multimodal", None)
        if multimodal is not None:
            multimodal = SimpleNamespace(
                **{"mm_processor_cache_gb": 4, "language_model_only": False, **multimodal}
            )
        return SimpleNamespace(
            # Of vLLM 0.33.
            num_hash_lookahead_tokens=0,
            cache_config=SimpleNamespace(
                prefix_caching_hash_algo=algorithm,
                enable_prefix_caching=changes.pop("prefix_caching", True),
            ),
            model_config=SimpleNamespace(
                multimodal_config=multimodal, pooler_config=changes.pop("pooler", None)
            ),
            parallel_config=SimpleNamespace(**{**parallel, **changes}),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        )

    def groups(self, count: int) -> Any:
        return SimpleNamespace(
            hisparse_host_num_blocks=None,
            prefix_cacheable_group_ids=tuple(range(count)),
            kv_cache_groups=[None] * count,
        )

    @pytest.mark.parametrize(
        ("changes", "groups", "words"),
        [
            ({"algorithm": "xxhash"}, 1, "prefix-caching-hash-algo: 'xxhash'.*sha256_cbor"),
            ({"nnodes": 2}, 1, "nnodes: 2 nodes"),
            ({"distributed_executor_backend": "ray"}, 1, "'ray'.*one host"),
            (
                {"distributed_executor_backend": "external_launcher", "world_size": 2},
                1,
                "distributed-executor-backend: 'external_launcher' with 2 ranks.*'mp'",
            ),
            ({"decode_context_parallel_size": 2}, 1, "decode-context-parallel-size: 2"),
            ({"extra": {"blocks_per_chunk": 4}}, 2, "blocks_per_chunk: 4.*2 KV groups"),
            ({"extra": {"block_size": 256}}, 2, "block_size: 256"),
            (
                {"multimodal": {"mm_processor_cache_gb": 0}, "prefix_caching": False},
                1,
                "mm-processor-cache-gb: 0 with --no-enable-prefix-caching",
            ),
        ],
    )
    def test_what_cannot_work_is_refused(
        self, changes: dict[str, Any], groups: int, words: str
    ) -> None:
        from kvdepot.vllm import connector as vllm

        with pytest.raises(kvdepot.ConfigError, match=words):
            vllm._refuse(self.config(**changes), self.groups(groups))

    def test_what_works_is_not(self) -> None:
        from kvdepot.vllm import connector as vllm

        vllm._refuse(self.config(), self.groups(1))
        vllm._refuse(self.config(algorithm="sha256_cbor"), self.groups(2))
        vllm._refuse(self.config(extra={"blocks_per_chunk": 4}), self.groups(1))
        without = {"prefix_caching": False}
        for multimodal in (
            {},
            {"mm_processor_cache_gb": 0, "language_model_only": True},
        ):
            vllm._refuse(self.config(multimodal=multimodal, **without), self.groups(1))
        vllm._refuse(self.config(multimodal={"mm_processor_cache_gb": 0}), self.groups(1))

    @pytest.mark.parametrize("prefix_caching", [True, False])
    @pytest.mark.parametrize("cache_gb", [0, 4])
    def test_images_are_refused_just_where_vllm_counts_them(
        self, prefix_caching: bool, cache_gb: int
    ) -> None:
        from kvdepot.vllm import connector as vllm
        from vllm.renderers.base import BaseRenderer

        multimodal = {"mm_processor_cache_gb": cache_gb}
        config = self.config(multimodal=multimodal, prefix_caching=prefix_caching)
        renderer: Any = SimpleNamespace(
            config=config, model_config=config.model_config, _validate_mm_uuids=lambda *_: None
        )
        items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
        given: Any = {}
        named = BaseRenderer._process_mm_uuids(renderer, {}, items, given, "renderer0-mm-1")
        counted = named == {"image": ["renderer0-mm-1-image-0"]}
        if counted:
            with pytest.raises(kvdepot.ConfigError, match="language-model-only"):
                vllm._refuse(config, self.groups(1))
        else:
            vllm._refuse(config, self.groups(1))
        assert counted == (cache_gb == 0 and not prefix_caching)

    def test_pooling_is_refused_just_where_vllm_fails_after_a_load(self) -> None:
        import torch
        from kvdepot.vllm import connector as vllm
        from vllm.config.pooler import SEQ_POOLING_TYPES
        from vllm.model_executor.layers.pooler.seqwise.methods import get_seq_pooling_method
        from vllm.v1.pool.metadata import PoolingCursor

        # The last 8 tokens of 40 are computed, the others were loaded.
        cursor = PoolingCursor(
            first_token_indices_gpu=torch.tensor([0]),
            last_token_indices_gpu=torch.tensor([7]),
            prompt_lens_cpu=torch.tensor([40]),
            seq_lens_cpu=torch.tensor([40]),
            num_scheduled_tokens_cpu=torch.tensor([8]),
            partial_prefill=True,
            finished_mask=[True],
        )
        metadata: Any = SimpleNamespace(get_pooling_cursor=lambda: cursor)
        hidden = torch.arange(16.0).reshape(8, 2)
        failed = []
        for kind in SEQ_POOLING_TYPES:
            config = self.config(pooler=SimpleNamespace(seq_pooling_type=kind))
            try:
                pooled = get_seq_pooling_method(kind)(hidden, metadata)
            except RuntimeError:
                failed.append(kind)
                with pytest.raises(kvdepot.ConfigError, match=f"--pooler-config: .*'{kind}'"):
                    vllm._refuse(config, self.groups(1))
            else:
                assert pooled.tolist() == [[14.0, 15.0]]
                vllm._refuse(config, self.groups(1))
        assert failed == ["CLS", "MEAN"]

    def test_a_stage_without_layers_of_a_kv_group_is_refused(self) -> None:
        from kvdepot.vllm import connector as vllm
        from kvdepot.vllm.messages import RankGeometry

        # Named before anything else of the connector is touched.
        connector = object.__new__(vllm.KvdepotConnector)
        connector._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
        ranks = {
            (stage, 0): RankGeometry(rank=stage, payload_bytes=size, layouts=["", ""])
            for stage, size in enumerate([[4096, 4096], [4096, 0]])
        }
        with pytest.raises(
            kvdepot.ConfigError,
            match=r"pipeline-parallel-size: .* rank 1 has no layer of KV group 1",
        ):
            connector.set_xfer_handshake_metadata_pp_aware(ranks)

    def test_a_misspelt_option_is_found_before_the_model_is_loaded(self) -> None:
        from kvdepot.vllm import connector as vllm

        extra = {"dax": {"capacty": "1GiB"}}
        with pytest.raises(kvdepot.ConfigError, match="capacty"):
            vllm.KvdepotConnector.requires_piecewise_for_cudagraph(extra)
        with pytest.raises(kvdepot.ConfigError, match="capacty"):
            vllm._prepare(self.config(extra=extra))
        assert not vllm.KvdepotConnector.requires_piecewise_for_cudagraph({})

    def test_an_untested_version_is_found_before_the_model_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvdepot.vllm import connector as vllm
        from kvdepot.vllm.compat import versions

        monkeypatch.setattr(versions, "here", lambda: (0, 40))
        with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
            vllm.KvdepotConnector.requires_piecewise_for_cudagraph({})
        # In the workers, too, and in the API server's process.
        with pytest.raises(kvdepot.ConfigError, match="is not supported by kvdepot"):
            vllm._prepare(self.config())
        allowed = {"allow_untested_vllm": True}
        assert not vllm.KvdepotConnector.requires_piecewise_for_cudagraph(allowed)
        assert vllm._prepare(self.config(extra=allowed)).untested_vllm

    def test_a_random_seed_of_the_hashes_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvdepot.vllm import namespace as vllm_namespace

        fixed = vllm_namespace.keys(self.config())
        assert fixed == vllm_namespace.keys(self.config())
        assert not fixed[1]
        seeds = iter("abcd")
        monkeypatch.setattr(vllm_namespace, "resolve_none_hash_seed", lambda _: next(seeds))
        first, second = (vllm_namespace.keys(self.config()) for _ in range(2))
        assert first[1]
        assert first[0] != second[0], "blocks under other seeds are other blocks"

    def test_expert_parallelism_changes_nothing_of_the_kv(self) -> None:
        from kvdepot.vllm import namespace as vllm_namespace

        def fields(tensor: int, data: int, *, experts: bool) -> dict[str, Any]:
            config = self.config(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=1,
                data_parallel_size=data,
                enable_expert_parallel=experts,
            )
            config.cache_config.cache_dtype = "auto"
            hf_config = SimpleNamespace(architectures=["M"])
            config.model_config = SimpleNamespace(dtype="torch.bfloat16", hf_config=hf_config)
            return vllm_namespace.fields(config, None, "the same files")

        # Experts on one rank, on two and on eight: attention is split by tensor parallelism alone.
        alone = fields(2, 1, experts=False)
        assert alone == fields(2, 1, experts=True) == fields(2, 4, experts=True)
        assert alone != fields(4, 1, experts=True)

    def test_data_parallel_engines_have_arenas_of_their_own(self) -> None:
        from kvdepot.vllm.spec import with_own_arena

        assert with_own_arena({"dax": {"path": "/a"}}, 1)["dax"]["path"] == "/a.dp1"
        assert with_own_arena({"nvme": {"path": "/a"}}, 1)["nvme"]["path"] == "/a.dp1"
        shared = {"posix": {"path": "/a"}}
        assert with_own_arena(shared, 1)["posix"] == shared["posix"], "a directory is for all"
        assert with_own_arena({}, 1) != with_own_arena({}, 2)
        assert with_own_arena({"instance": "mine"}, 1)["instance"] == "mine-dp1"
        with pytest.raises(kvdepot.ConfigError, match=r"/dev/dax0\.0.*one device"):
            with_own_arena({"dax": {"path": "/dev/dax0.0"}}, 1)

    def test_data_parallel_engines_of_a_host_divide_its_defaults(self) -> None:
        from kvdepot.vllm import settings as vllm_settings

        dense = SimpleNamespace(
            data_parallel_size=1, data_parallel_size_local=1, elastic_ep_max_dp_size=8
        )
        experts = SimpleNamespace(
            data_parallel_size=16, data_parallel_size_local=4, elastic_ep_max_dp_size=16
        )
        alone = SimpleNamespace(data_parallel_size=1)
        for parallel, shares in ((dense, 8), (experts, 4), (alone, None)):
            settings = vllm_settings.read({})
            vllm_settings.share(settings, settings.merged, parallel)
            assert settings.depot.get("shares") == shares
            assert vllm_settings.read(settings.merged).depot.get("shares") == shares
        given = vllm_settings.read({"shares": 2})
        vllm_settings.share(given, given.merged, dense)
        assert given.depot["shares"] == 2
        service = vllm_settings.read({"pipeline": "unix:/run/kvdepot.sock"})
        vllm_settings.share(service, service.merged, dense)
        assert "shares" not in service.depot


@pytest.mark.integration
class TestOpening:
    """The depot of an engine, without the engine."""

    @pytest.fixture(autouse=True)
    def vllm(self) -> None:
        pytest.importorskip("vllm")

    def open(self, index: int = 0, **extra: Any) -> Any:
        from kvdepot.vllm import settings as vllm_settings
        from kvdepot.vllm import spec as vllm_spec

        # What vLLM leaves of data parallelism in each engine of a dense model.
        parallel = SimpleNamespace(data_parallel_index=index, data_parallel_size=1)
        return vllm_spec.open_depot(vllm_settings.read(extra), SimpleNamespace(parallel=parallel))

    def test_with_no_settings_at_all_it_works(self, tmp_path: Path) -> None:
        # A new arena would take a fifth of the disk; one that is there keeps its size.
        with self.open(dax={"capacity": "16MiB"}):
            pass
        with self.open() as depot:
            assert depot.tiers == ["Cache", "Dax"]
            assert Path(depot.path).is_relative_to(tmp_path), "under the user's cache directory"
            assert depot.path in depot.description

    def test_while_another_has_the_default_arena_it_serves_from_memory(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        sizes = {"cache": {"capacity": "8MiB"}, "dax": {"capacity": "16MiB"}}
        with self.open(**sizes), self.open(**sizes, lock_wait="100ms") as second:
            assert second.tiers == ["Cache"]
        warning = capfd.readouterr().err
        assert "cannot open the default arena" in warning
        assert f"this process ({os.getpid()} on host" in warning, "the owner is named"

    def test_an_arena_that_was_asked_for_is_not_replaced(self, tmp_path: Path) -> None:
        dax = {"path": str(tmp_path / "arena.kvd"), "capacity": "8MiB"}
        settings = {"cache": {"capacity": "8MiB"}, "dax": dax, "lock_wait": "100ms"}
        with self.open(**settings), pytest.raises(kvdepot.LockedError, match=str(os.getpid())):
            self.open(**settings)

    @pytest.mark.parametrize("given", [{}, {"instance": "mine"}, {"dax": {"path": "arena.kvd"}}])
    def test_data_parallel_engines_share_no_arena(
        self, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        settings = {"cache": {"capacity": "8MiB"}, **given}
        settings["dax"] = {"capacity": "8MiB", **given.get("dax", {})}
        with self.open(0, **settings) as first, self.open(1, **settings) as second:
            assert first.tiers == second.tiers == ["Cache", "Dax"]
            assert first.path != second.path
        with self.open(**settings) as alone:
            assert alone.path == first.path, "found again without data parallelism"

    def test_data_parallel_engines_share_the_depot_of_a_service(self, tmp_path: Path) -> None:
        dax = {"path": str(tmp_path / "arena.kvd"), "capacity": "8MiB"}
        address = f"unix:{tmp_path / 's'}"
        with kvdepot.open("Dax", {"dax": dax, "socket": str(tmp_path / "s")}) as service:
            engines = [self.open(index, pipeline=address, lanes=2) for index in range(2)]
            for engine in engines:
                assert (engine.path, engine.socket) == (service.path, service.socket)
                engine.close()

    def test_a_service_that_is_not_there_is_waited_for_and_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvdepot.vllm import spec as vllm_spec

        monkeypatch.setattr(vllm_spec, "SERVICE_SECONDS", 1.0)
        address = f"unix:{tmp_path / 's'}"
        with pytest.raises(kvdepot.ConfigError, match=rf"{address}.*kvdepot serve"):
            self.open(pipeline=address)
        dax = {"path": str(tmp_path / "arena.kvd"), "capacity": "8MiB"}
        late = threading.Timer(
            0.4, lambda: opened.append(kvdepot.open("Dax", {"dax": dax, "socket": address[5:]}))
        )
        opened: list[kvdepot.Depot] = []
        late.start()
        with self.open(pipeline=address) as engine:
            assert engine.tiers == ["Dax"]
        late.join()
        opened[0].close()

    def test_without_a_socket_the_workers_could_not_attach(self) -> None:
        with pytest.raises(kvdepot.ConfigError, match="socket: 'off'"):
            self.open(pipeline="Cache", cache={"capacity": "8MiB"}, socket="off")


def test_the_time_limit_of_a_services_calls_is_the_one_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvdepot.vllm import settings as vllm_settings
    from kvdepot.vllm import spec as vllm_spec

    opened: list[Any] = []
    depot = SimpleNamespace(description="a service's")

    def remember(*arguments: Any) -> Any:
        opened.append(arguments)
        return depot

    monkeypatch.setattr(kvdepot, "open", remember)
    settings = vllm_settings.read({"pipeline": "unix:/no/such.sock", "timeout": "2s", "lanes": 3})
    parallel = SimpleNamespace(data_parallel_index=0)
    assert vllm_spec.open_depot(settings, SimpleNamespace(parallel=parallel)) is depot
    assert opened == [("unix:/no/such.sock", {"timeout": "2s", "lanes": 1})]
