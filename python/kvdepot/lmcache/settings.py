"""Settings of the LMCache connectors: kvdepot's schema, and LMCache's names for its DAX backend.

Both may be mixed in one dictionary, nested (`{"dax": {"path": …}}`) or with dots
(`"dax.path"`), as LMCache's `extra_config` writes them. What LMCache names
otherwise is translated here, so that a configuration of its DAX backend works as
it is; `kvdepot.check` knows the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvdepot import _settings
from kvdepot._settings import COUNT, FLAG, GIBS, SERVICE, SIZE, WORD, Kind, Schema, Setting, wrong
from kvdepot.engine.weights import FULL, SAMPLED

# LMCache keeps hot chunks in memory itself; a second copy there would serve nobody.
DEFAULT_PIPELINE = "Dax"

SECTIONS = ("cache", "dax", "nvme", "posix")

# Tiers whose blocks outlive the process, near to far, and those of them that are arenas.
LASTING = ("Dax", "Nvme", "Posix")
ARENAS = ("Dax", "Nvme")

# The block size that the record table of a new arena is made for; smaller ones need a larger table.
RECORD_BYTES = 32 << 10


@dataclass(frozen=True)
class Settings:
    """What a connector needs to open its depot."""

    pipeline: str
    """The tiers, or `unix:` and the socket of a running service."""
    depot: dict[str, Any]
    """The settings of `kvdepot.open`."""
    async_put: bool
    """Whether a put of the storage plug-in returns before the blocks are acknowledged."""
    hotplug_enabled: bool
    """Whether devices may be added and removed over HTTP."""
    salt: str | None
    """A text that keeps tenants with the same model apart."""
    weights: str | None
    """A text that names what LMCache's keys leave out."""


def _entries(value: Any) -> list[Mapping[str, Any]]:
    if not value or not all(isinstance(entry, Mapping) for entry in value):
        raise TypeError
    return list(value)


def _eviction(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or value.get("eviction_policy", "LRU") != "LRU":
        raise ValueError
    return value


def _names_weights(value: Any) -> str:
    # Under vLLM these words have kvdepot look at files, which LMCache does not name.
    if not isinstance(value, str) or not value or value in (SAMPLED, FULL):
        raise ValueError
    return value


def _address(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith(SERVICE):
        raise ValueError
    return value


DEVICES = Setting(
    ("devices",),
    Kind("a list of at least one {device_path, max_dax_size_gb}", _entries),
    "list of the devices of the tier `Dax`, instead of `device_path` and `max_dax_size`",
    option="dax.devices",
)

# LMCache's names, with `dax.` before them or without.
KNOBS = Schema(
    Setting(
        ("device_path",),
        WORD,
        "path of a DAX device or file for the tier `Dax`; sets kvdepot's `dax.path`",
        option="dax.path",
    ),
    Setting(
        ("max_dax_size", "max_dax_size_gb"),
        GIBS,
        "size of the tier `Dax` in GiB; sets kvdepot's `dax.capacity`",
        option="dax.capacity",
    ),
    DEVICES,
    Setting(
        ("slot_bytes",),
        SIZE,
        "expected size of a block, at most the capacity of a device. If `slot_bytes` is below "
        "32KiB and the capacity is set, kvdepot sets `records` to the total capacity divided by "
        "`slot_bytes`. Blocks of other sizes are stored at their actual size",
    ),
    Setting(
        ("restore_workers", "num_load_workers"),
        COUNT,
        "number of copy threads, 1 to 256; sets kvdepot's `lanes`",
        option="lanes",
    ),
    Setting(
        ("num_store_workers",),
        COUNT,
        "ignored, because the copy threads also store blocks; an invalid value is an error",
    ),
    Setting(
        ("num_lookup_workers",),
        COUNT,
        "ignored, because lookups use no separate threads; an invalid value is an error",
    ),
    Setting(
        ("restore_max_regions",),
        COUNT,
        "number of regions of the [staging buffer](../glossary.md#staging-buffer), 1 to 4096; sets "
        "kvdepot's `staging_regions`",
        option="staging_regions",
    ),
    Setting(
        ("retrieve_staging_slab_bytes",),
        SIZE,
        "size of the [staging buffer](../glossary.md#staging-buffer); sets kvdepot's "
        "`staging_slab`. kvdepot uses the staging buffer only if a direct copy is impossible; "
        "copies into LMCache's CPU memory are direct",
        option="staging_slab",
    ),
    Setting(
        ("async_put",),
        FLAG,
        "asynchronous puts in the in-process mode: if `true`, a put returns before its blocks are "
        "stored. The multi-process mode ignores `async_put`",
        default=True,
    ),
    Setting(
        ("hotplug_enabled",),
        FLAG,
        "hot-plugging in the multi-process mode: if `true`, you can add and remove devices over "
        "HTTP. The in-process mode ignores `hotplug_enabled`",
        default=False,
    ),
    Setting(
        ("persist_enabled",),
        FLAG,
        "check of the pipeline: if `true`, a pipeline without a persistent tier (`Dax`, `Nvme`, "
        "`Posix`) is an error. Blocks in persistent tiers persist with either value",
    ),
    Setting(
        ("eviction",),
        Kind("a mapping whose eviction_policy is 'LRU'", _eviction),
        "LMCache's eviction policy. Only LRU is allowed, because kvdepot always evicts the least "
        "recently used blocks",
    ),
    Setting(
        ("salt",),
        replace(WORD, secret=True),
        "kvdepot's option: text that separates tenants. Engines with different salts share no "
        "blocks",
    ),
    Setting(
        ("weights",),
        Kind("a text that is not empty, other than 'sampled' and 'full'", _names_weights),
        "kvdepot's option: text that identifies the weights and all other settings that change KV "
        "data but that [LMCache's keys omit](#limits-of-lmcaches-keys)",
    ),
)

# Where the blocks are. With `dax.` before it, `path` is the depot's own option.
PLACES = Schema(
    Setting(
        ("pipeline",),
        _settings.text("a text such as 'Cache|Dax'"),
        "storage tiers, first (nearest to the engine) to last. Default: the tiers with a section "
        "in the configuration; if none of these tiers is persistent, also `Dax`",
        option="pipeline",
    ),
    Setting(
        ("path",),
        Kind(
            "'unix:' and the socket of a running server; for an arena use dax.path",
            _address,
        ),
        "socket of a running server whose depot the connector uses instead of its own tiers. With "
        "`path`, the only other allowed option of the depot is `lanes`",
        option="path",
    ),
)

# What an entry of `devices` may hold: LMCache's names or kvdepot's.
ENTRY = Schema(
    Setting(("device_path", "path"), WORD, option="path"),
    Setting(("max_dax_size_gb", "max_dax_size"), GIBS, option="capacity"),
    Setting(("size_bytes",), SIZE, option="capacity"),
    Setting(("capacity",), _settings.ANY, option="capacity"),
)


def device(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """One device, by LMCache's names or by kvdepot's, as `dax.devices` has it."""
    found: dict[str, Any] = {}
    for key, value in entry.items():
        setting = ENTRY.by_name.get(key)
        if setting is None or setting.option is None:
            raise ENTRY.unknown(f"{name}.{key}")
        if setting.option in found:
            raise wrong(f"{name}.{key}", value, f"given once; {setting.option} is already set")
        found[setting.option] = setting.kind.read(f"{name}.{key}", value)
    if "path" not in found:
        raise wrong(f"{name}.device_path", None, "the path of a device or file")
    return found


def translate(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Pipeline and settings for `kvdepot.open`; see `read`."""
    settings = read(params)
    return settings.pipeline, settings.depot


def read(params: Mapping[str, Any]) -> Settings:
    """Check and translate a connector's parameters.

    Raises `kvdepot.ConfigError`, which names the parameter as it was given, its
    value and what is allowed.
    """
    knobs = KNOBS.take({})
    origin: dict[str, str] = {}
    options: dict[str, Any] = {}
    for name, given in _flatten(params).items():
        setting = PLACES.by_name.get(name) or KNOBS.by_name.get(name.removeprefix("dax."))
        option, value = name, given
        if setting is not None:
            value = setting.kind.read(name, given)
            if setting is DEVICES:
                value = [device(f"{name}[{n}]", entry) for n, entry in enumerate(value)]
            knobs[setting.names[0]] = value
            if setting.option is None:
                continue
            option = setting.option
        if option in options and options[option] != value:
            raise wrong(name, given, f"the same as {origin[option]} (or omit one of them)")
        options[option], origin[option] = value, name
    service = _service(options)
    if service is None:
        pipeline = _pipeline(options)
        options = _one_device(options)
        _check_pairs(pipeline, options, knobs, origin)
        depot = _nest(options)
        # A put that waits for a slow far tier would hold up the engine.
        depot.setdefault("overload", "drop")
    else:
        pipeline, depot = service, _nest(options)
    # What a service's media are made of is not said here; the rest is checked as for a tier.
    checked = pipeline if service is None else DEFAULT_PIPELINE
    _settings.check(KNOBS, checked, depot, origin=origin)
    return Settings(
        pipeline=pipeline,
        depot=depot,
        async_put=knobs["async_put"],
        hotplug_enabled=knobs["hotplug_enabled"],
        salt=knobs["salt"],
        weights=knobs["weights"],
    )


def _flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in params.items():
        nested = name in SECTIONS
        if nested and not isinstance(value, Mapping):
            raise wrong(name, value, "a mapping of options")
        for key, inner in (
            {f"{name}.{k}": v for k, v in value.items()}.items() if nested else [(name, value)]
        ):
            if key in flat:
                raise wrong(key, inner, "given once; it is already set, nested or with a dot")
            flat[key] = inner
    return flat


def _service(options: dict[str, Any]) -> str | None:
    """The address of a running service; its media are its own, and set up where it runs."""
    pipeline = options.get("pipeline", "")
    address = options.pop("path", None) or (pipeline if pipeline.startswith(SERVICE) else None)
    if address is None:
        return None
    if options.pop("pipeline", address) != address:
        raise wrong("pipeline", pipeline, f"omitted with path: {address!r}")
    for other in options:
        if other != "lanes":
            allowed = f"omitted with {address!r}; set it in the server"
            raise wrong(other, options[other], allowed)
    return str(address)


def _pipeline(options: dict[str, Any]) -> str:
    given = {name.partition(".")[0] for name in options if "." in name}
    lasting = [tier for tier in LASTING if tier.lower() in given] or [DEFAULT_PIPELINE]
    near = ["Cache"] if "cache" in given else []
    return str(options.pop("pipeline", "|".join([*near, *lasting])))


def tiers_of(pipeline: str, tiers: tuple[str, ...]) -> list[str]:
    """Those of a pipeline's tiers that are among `tiers`."""
    return [tier for tier in pipeline.split("|") if tier in tiers]


def _one_device(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a list of one device as `dax.path` and `dax.capacity`."""
    devices = options.get("dax.devices")
    if devices is None:
        return options
    for name in ("dax.path", "dax.capacity"):
        if name in options:
            raise wrong("devices", devices, f"omitted with {name} (or omit {name})")
    if len(devices) != 1:
        return options
    rest = {name: value for name, value in options.items() if name != "dax.devices"}
    return rest | {f"dax.{name}": value for name, value in devices[0].items()}


def _check_pairs(
    pipeline: str, options: dict[str, Any], knobs: dict[str, Any], origin: dict[str, str]
) -> None:
    """Refuse what contradicts each other, as LMCache does, and size the record table."""
    if knobs.get("persist_enabled") and not tiers_of(pipeline, LASTING):
        allowed = f"false with the pipeline {pipeline!r}, which has no persistent tier"
        raise wrong("persist_enabled", True, allowed)
    slot = knobs.get("slot_bytes")
    if slot is None:
        return
    for section in map(str.lower, tiers_of(pipeline, ARENAS)):
        whole = [{"capacity": options.get(f"{section}.capacity")}]
        devices = options.get(f"{section}.devices", whole)
        sizes = [_bytes(entry.get("capacity")) for entry in devices]
        for size in sizes:
            if size is not None and size < slot:
                raise wrong("slot_bytes", slot, f"at most the capacity, {size} bytes")
        if slot < RECORD_BYTES and None not in sizes:
            options.setdefault(f"{section}.records", sum(size or 0 for size in sizes) // slot)
    slab, regions = _bytes(options.get("staging_slab")), options.get("staging_regions", 1)
    if slab is not None and isinstance(regions, int) and slab < regions * slot:
        name = origin["staging_slab"]
        raise wrong(name, slab, f"at least {regions * slot} (regions * slot_bytes)")


def _bytes(size: object) -> int | None:
    """One of the depot's sizes; None for nothing, and for what the depot will refuse."""
    try:
        return int(SIZE.parse(size))
    except (TypeError, ValueError):
        return None


def _nest(options: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, dot, key = name.partition(".")
        if dot and section in SECTIONS:
            nested.setdefault(section, {})[key] = value
        else:
            nested[name] = value
    return nested
