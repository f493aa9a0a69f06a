"""The connectors' settings: LMCache's names and kvdepot's, and what is refused."""

from __future__ import annotations

from typing import Any

import kvdepot
import pytest
from kvdepot.lmcache import settings as lmcache_settings

pytestmark = pytest.mark.unit

GIB = 1 << 30


def test_lmcaches_sample_configuration_needs_no_change():
    pipeline, depot = lmcache_settings.translate(
        {
            "dax.device_path": "/dev/dax1.0",
            "dax.max_dax_size": 100.5,
            "dax.async_put": "true",
            "dax.restore_workers": 8,
            "dax.restore_max_regions": "8",
            "dax.retrieve_staging_slab_bytes": 268435456,
        }
    )
    assert pipeline == "Dax"
    assert depot["dax"] == {"path": "/dev/dax1.0", "capacity": int(100.5 * GIB)}
    assert depot["lanes"] == 8
    assert (depot["staging_regions"], depot["staging_slab"]) == (8, 256 << 20)


def test_the_multi_process_adapters_configuration_too():
    pipeline, depot = lmcache_settings.translate(
        {
            "device_path": "/dev/dax1.0",
            "max_dax_size_gb": 2,
            "slot_bytes": 1 << 20,
            "hotplug_enabled": True,
            "num_store_workers": 1,
            "num_lookup_workers": 2,
            "num_load_workers": 3,
            "persist_enabled": False,
            "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8},
        }
    )
    assert (pipeline, depot["lanes"]) == ("Dax", 3)
    assert depot["dax"] == {"path": "/dev/dax1.0", "capacity": 2 * GIB}


def test_a_list_of_one_device_is_that_device():
    _, depot = lmcache_settings.translate(
        {"devices": [{"device_path": "/dev/dax1.0", "max_dax_size_gb": 0.5}]}
    )
    assert depot["dax"] == {"path": "/dev/dax1.0", "capacity": GIB // 2}


def test_several_devices_are_one_tier():
    _, depot = lmcache_settings.translate(
        {
            "devices": [
                {"device_path": "/dev/dax1.0", "max_dax_size_gb": 1},
                {"device_path": "/dev/dax2.0", "max_dax_size_gb": 0.5},
            ],
            "slot_bytes": 1 << 20,
        }
    )
    assert depot["dax"] == {
        "devices": [
            {"path": "/dev/dax1.0", "capacity": GIB},
            {"path": "/dev/dax2.0", "capacity": GIB // 2},
        ]
    }


def test_without_settings_the_defaults_hold():
    assert lmcache_settings.translate({}) == ("Dax", {"overload": "drop"})


@pytest.mark.parametrize(
    "given",
    [
        {"cache": {"capacity": "1GiB"}, "dax": {"path": "/x"}, "overload": "wait"},
        {"cache.capacity": "1GiB", "dax.path": "/x", "overload": "wait"},
        {"cache": {"capacity": "1GiB"}, "dax": {"device_path": "/x"}, "overload": "wait"},
    ],
    ids=["nested", "dots", "mixed"],
)
def test_kvdepots_own_schema_is_passed_on(given: dict[str, Any]):
    own = {"cache": {"capacity": "1GiB"}, "dax": {"path": "/x"}, "overload": "wait"}
    assert lmcache_settings.translate(given) == ("Cache|Dax", own)


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({"posix.path": "/x"}, "Posix"),
        ({"nvme": {"path": "/x"}, "cache": {"capacity": "1GiB"}}, "Cache|Nvme"),
        ({"posix.path": "/x", "nvme.path": "/y", "cache.capacity": "1GiB"}, "Cache|Nvme|Posix"),
        ({"device_path": "/x", "posix.path": "/y"}, "Dax|Posix"),
        ({"cache.capacity": "1GiB"}, "Cache|Dax"),
    ],
)
def test_the_sections_choose_the_tiers(given: dict[str, Any], tiers: str):
    assert lmcache_settings.translate(given)[0] == tiers
    assert lmcache_settings.read({**given, "persist_enabled": True}).pipeline == tiers


def test_small_slots_of_another_arena_get_a_table_too():
    _, depot = lmcache_settings.translate({"nvme.capacity": GIB, "slot_bytes": 4096})
    assert depot["nvme"]["records"] == GIB // 4096


def test_small_slots_get_a_record_table_for_all_of_them():
    _, depot = lmcache_settings.translate({"max_dax_size_gb": 1, "slot_bytes": 4096})
    assert depot["dax"]["records"] == GIB // 4096


def test_a_service_is_an_address_alone():
    settings = lmcache_settings.read({"path": "unix:/run/kvdepot.sock", "salt": "tenant"})
    assert (settings.pipeline, settings.depot) == ("unix:/run/kvdepot.sock", {})
    assert settings.salt == "tenant"


def test_a_salt_is_not_shown() -> None:
    with pytest.raises(kvdepot.ConfigError, match=r"salt: \(not shown\)") as refused:
        lmcache_settings.read({"device_path": "/x", "salt": ["hunter2"]})
    assert "hunter2" not in str(refused.value)


def test_sizes_are_read_with_units() -> None:
    _, depot = lmcache_settings.translate(
        {"slot_bytes": "4KiB", "dax.capacity": "1GiB", "retrieve_staging_slab_bytes": "64MiB"}
    )
    assert depot["dax"] == {"capacity": "1GiB", "records": GIB // 4096}
    assert depot["staging_slab"] == 64 << 20


@pytest.mark.parametrize("word", ["true", True, "1", "on"])
def test_flags_of_the_connector_are_read(word: object):
    settings = lmcache_settings.read({"async_put": word, "hotplug_enabled": word})
    assert settings.async_put
    assert settings.hotplug_enabled


REFUSED = {
    "typo of theirs": ({"restore_worker": 2}, "restore_worker: ", "'restore_workers'"),
    "typo with prefix": ({"dax.device_pth": "/x"}, "dax.device_pth: ", "device_path"),
    "typo of ours": ({"dax": {"capacty": 1}}, "dax.capacty: ", '"capacity"'),
    "typo of a device": (
        {"devices": [{"device_pth": "/x"}]},
        "devices[0].device_pth: ",
        "'device_path'",
    ),
    "no number": ({"dax.max_dax_size": "64GiB"}, "dax.max_dax_size: '64GiB'", "GiB above 0"),
    "not finite": ({"max_dax_size_gb": float("nan")}, "max_dax_size_gb: nan", "above 0"),
    "no size": ({"max_dax_size_gb": 0}, "max_dax_size_gb: 0", "above 0"),
    "a fraction": ({"restore_workers": 1.5}, "restore_workers: 1.5", "whole number from 1"),
    "a bool": ({"num_load_workers": True}, "num_load_workers: True", "whole number from 1"),
    "too many": ({"restore_workers": 100_000}, "restore_workers: ", "256"),
    "no path": ({"device_path": " "}, "device_path: ' '", "not empty"),
    "no flag": ({"async_put": "maybe"}, "async_put: 'maybe'", "true or false"),
    "no list": ({"devices": "/x"}, "devices: '/x'", "a list of at least one"),
    "device without path": ({"devices": [{}]}, "devices[0].device_path: ", "the path"),
    "no device": ({"devices": []}, "devices: []", "at least one"),
    "a size twice": (
        {"devices": [{"path": "/x", "capacity": 1, "size_bytes": 2}]},
        "devices[0].size_bytes: 2",
        "given once",
    ),
    "a slot above one device": (
        {
            "devices": [
                {"device_path": "/x", "max_dax_size_gb": 1},
                {"device_path": "/y", "max_dax_size_gb": 0.5},
            ],
            "slot_bytes": GIB,
        },
        f"slot_bytes: {GIB}",
        f"at most the capacity, {GIB // 2}",
    ),
    "no section": ({"dax": "/x"}, "dax: '/x'", "a mapping"),
    "two sizes": (
        {"max_dax_size": 1, "max_dax_size_gb": 2},
        "max_dax_size_gb: 2",
        "the same as max_dax_size",
    ),
    "two workers": (
        {"restore_workers": 2, "lanes": 3},
        "lanes: 3",
        "the same as restore_workers",
    ),
    "nested and dotted": ({"dax.path": "/x", "dax": {"path": "/x"}}, "dax.path: ", "given once"),
    "device and devices": (
        {"device_path": "/x", "devices": [{"device_path": "/y"}]},
        "devices: ",
        "omitted with dax.path",
    ),
    "slot above capacity": (
        {"max_dax_size_gb": 1, "slot_bytes": 2 * GIB},
        f"slot_bytes: {2 * GIB}",
        f"at most the capacity, {GIB}",
    ),
    "slab below regions": (
        {"slot_bytes": 1 << 20, "restore_max_regions": 4, "retrieve_staging_slab_bytes": 1 << 20},
        "retrieve_staging_slab_bytes: ",
        f"at least {4 << 20}",
    ),
    "slab of the depot below regions": (
        {"slot_bytes": "1MiB", "staging_slab": "512KiB"},
        "staging_slab: 524288",
        f"at least {1 << 20}",
    ),
    "slab below what regions need": (
        {"restore_max_regions": 4, "retrieve_staging_slab_bytes": 65536},
        "retrieve_staging_slab_bytes: 64 KiB",
        "64KiB",
    ),
    "kept by nothing": (
        {"pipeline": "Cache", "persist_enabled": True},
        "persist_enabled: ",
        "no persistent tier",
    ),
    "device of no tier": ({"pipeline": "Cache", "device_path": "/x"}, "dax: ", '"Cache"'),
    "other eviction": ({"eviction": {"eviction_policy": "ARC"}}, "eviction: ", "'LRU'"),
    "service with a tier": ({"path": "unix:/s", "device_path": "/x"}, "dax.path: ", "the server"),
    "path of an arena": ({"path": "/dev/dax0.0"}, "path: '/dev/dax0.0'", "dax.path"),
    "no tier": ({"pipeline": "Cash|Dax"}, "pipeline: ", "Cache, Dax"),
}


@pytest.mark.parametrize(("given", "start", "part"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(given: dict[str, Any], start: str, part: str):
    with pytest.raises(kvdepot.ConfigError) as refused:
        lmcache_settings.translate(given)
    assert str(refused.value).startswith(start)
    assert part in str(refused.value)


@pytest.mark.parametrize("weights", ["sampled", "full", ""])
def test_weights_are_named_and_not_looked_for(weights: str) -> None:
    with pytest.raises(kvdepot.ConfigError, match=r"weights: .*other than 'sampled' and 'full'"):
        lmcache_settings.read({"device_path": "/x", "max_dax_size": 1, "weights": weights})
