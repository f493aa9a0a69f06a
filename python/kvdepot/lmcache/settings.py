"""Settings of the LMCache connectors: kvdepot's schema, and LMCache's names for its DAX backend.

Both may be mixed in one dictionary, nested (`{"dax": {"path": …}}`) or with dots
(`"dax.path"`), as LMCache's `extra_config` writes them. What LMCache names
otherwise is translated here, so that a configuration of its DAX backend works as
it is; `kvdepot.check` knows the rest. docs/engines/lmcache.md has the table.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import kvdepot

# LMCache keeps hot chunks in memory itself; a second copy there would serve nobody.
DEFAULT_PIPELINE = "Dax"

SERVICE = "unix:"
SECTIONS = ("cache", "dax")
GIB = 1 << 30

# The block size that the record table of a new arena is made for; smaller ones need a larger table.
RECORD_BYTES = 32 << 10


@dataclass(frozen=True)
class Settings:
    """What a connector needs to open its depot."""

    pipeline: str
    """The tiers, or `unix:` and the socket of a running service."""
    depot: dict[str, Any] = field(default_factory=dict)
    """The settings of `kvdepot.open`."""
    async_put: bool = True
    """Whether a put of the storage plug-in returns before the blocks are acknowledged."""
    hotplug_enabled: bool = False
    """Whether devices may be added and removed over HTTP."""
    salt: str | None = None
    """A text that keeps tenants with the same model apart."""


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """The number, also from a text: environment variables have nothing else."""
    if isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            return None
    allowed = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, allowed):
        return None
    return value if 0 < value < math.inf else None


def _count(name: str, value: Any) -> int:
    number = _number(value, int)
    if number is None:
        raise wrong(name, value, "a whole number from 1")
    return int(number)


def _gib(name: str, value: Any) -> int:
    number = _number(value, float)
    if number is None or int(number * GIB) < 1:
        raise wrong(name, value, "a number of GiB above 0, such as 64 or 0.5")
    return int(number * GIB)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong(name, value, "a text that is not empty")
    return value.strip()


def _flag(name: str, value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise wrong(name, value, "true or false")
    return found


def _eviction(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or value.get("eviction_policy", "LRU") != "LRU":
        raise wrong(name, value, "a mapping whose eviction_policy is 'LRU'")
    return value


def _devices(name: str, value: Any) -> list[dict[str, Any]]:
    whole = isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
    if not whole or not value:
        raise wrong(name, value, "a list of at least one {device_path, max_dax_size_gb}")
    return [device(f"{name}[{index}]", entry) for index, entry in enumerate(value)]


def device(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """One device, by LMCache's names or by kvdepot's, as `dax.devices` has it."""
    names: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
        "device_path": ("path", _text),
        "path": ("path", _text),
        "max_dax_size_gb": ("capacity", _gib),
        "max_dax_size": ("capacity", _gib),
        "size_bytes": ("capacity", _count),
        "capacity": ("capacity", lambda _, size: size),
    }
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in names:
            raise unknown(f"{name}.{key}", key, names)
        own, check = names[key]
        if own in found:
            raise wrong(f"{name}.{key}", value, f"given once; the {own} is there already")
        found[own] = check(f"{name}.{key}", value)
    if "path" not in found:
        raise wrong(f"{name}.device_path", None, "the path of a device or file")
    return found


# LMCache's names: how each is checked, and the option of kvdepot that it sets,
# None for one that needs none or that the connector reads itself.
KNOBS: dict[str, tuple[Callable[[str, Any], Any], str | None]] = {
    "device_path": (_text, "dax.path"),
    "max_dax_size": (_gib, "dax.capacity"),
    "max_dax_size_gb": (_gib, "dax.capacity"),
    "devices": (_devices, "dax.devices"),
    "slot_bytes": (_count, None),
    "restore_workers": (_count, "lanes"),
    "restore_max_regions": (_count, "staging_regions"),
    "retrieve_staging_slab_bytes": (_count, "staging_slab"),
    "num_load_workers": (_count, "lanes"),
    "num_store_workers": (_count, None),
    "num_lookup_workers": (_count, None),
    "async_put": (_flag, None),
    "hotplug_enabled": (_flag, None),
    "persist_enabled": (_flag, None),
    "eviction": (_eviction, None),
    "salt": (_text, None),
}


def translate(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Pipeline and settings for `kvdepot.open`; see `read`."""
    settings = read(params)
    return settings.pipeline, settings.depot


def read(params: Mapping[str, Any]) -> Settings:
    """Check and translate a connector's parameters.

    Raises `kvdepot.ConfigError`, which names the parameter as it was given, its
    value and what is allowed.
    """
    given = _flatten(params)
    knobs: dict[str, Any] = {}
    origin: dict[str, str] = {}
    options: dict[str, Any] = {}
    for name, value in given.items():
        knob = name.removeprefix("dax.")
        if knob in KNOBS:
            check, option = KNOBS[knob]
            value = knobs[knob] = check(name, value)
        else:
            option = name
        if option is None:
            continue
        if option in options and options[option] != value:
            raise wrong(name, given[name], f"what {origin[option]} says, or one of them left out")
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
    _check(pipeline if service is None else DEFAULT_PIPELINE, depot, origin)
    return Settings(
        pipeline=pipeline,
        depot=depot,
        async_put=knobs.get("async_put", True),
        hotplug_enabled=knobs.get("hotplug_enabled", False),
        salt=knobs.get("salt"),
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
                raise wrong(key, inner, "given once; it is there already, nested or with a dot")
            flat[key] = inner
    return flat


def _service(options: dict[str, Any]) -> str | None:
    """The address of a running service; its media are its own, and set up where it runs."""
    names: list[str] = [name for name in ("path", "pipeline") if name in options]
    addresses = [options[name] for name in names]
    for name, address in zip(names, addresses, strict=True):
        if not isinstance(address, str):
            raise wrong(name, address, "a text")
    if "path" in names and not addresses[0].startswith(SERVICE):
        allowed = f"'{SERVICE}' and the socket of a running service; an arena's is dax.path"
        raise wrong("path", addresses[0], allowed)
    if not any(address.startswith(SERVICE) for address in addresses):
        return None
    for name in names:
        del options[name]
    if len(set(addresses)) > 1:
        raise wrong("pipeline", addresses[1], f"left out beside path: {addresses[0]!r}")
    for other in options:
        if other != "lanes":
            allowed = f"left out with {addresses[0]!r}: the service has its own"
            raise wrong(other, options[other], allowed)
    return str(addresses[0])


def _pipeline(options: dict[str, Any]) -> str:
    with_cache = any(name.startswith("cache.") for name in options)
    return str(options.pop("pipeline", f"Cache|{DEFAULT_PIPELINE}" if with_cache else "Dax"))


def _one_device(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a list of one device as `dax.path` and `dax.capacity`."""
    devices = options.get("dax.devices")
    if devices is None:
        return options
    for name in ("dax.path", "dax.capacity"):
        if name in options:
            raise wrong("devices", devices, f"left out beside {name}, or {name} beside it")
    if len(devices) != 1:
        return options
    rest = {name: value for name, value in options.items() if name != "dax.devices"}
    return rest | {f"dax.{name}": value for name, value in devices[0].items()}


def _check_pairs(
    pipeline: str, options: dict[str, Any], knobs: dict[str, Any], origin: dict[str, str]
) -> None:
    """Refuse what contradicts each other, as LMCache does, and size the record table."""
    if knobs.get("persist_enabled") and "Dax" not in pipeline:
        allowed = f"false with the pipeline {pipeline!r}, which has no tier that lasts"
        raise wrong("persist_enabled", True, allowed)
    slot = knobs.get("slot_bytes")
    if slot is None:
        return
    devices = options.get("dax.devices", [{"capacity": options.get("dax.capacity")}])
    sizes = [entry.get("capacity") for entry in devices]
    for size in sizes:
        if isinstance(size, int) and size < slot:
            raise wrong("slot_bytes", slot, f"at most the capacity, {size} bytes")
    if slot < RECORD_BYTES and all(isinstance(size, int) for size in sizes):
        options.setdefault("dax.records", sum(sizes) // slot)
    slab, regions = options.get("staging_slab"), options.get("staging_regions", 1)
    if slab is not None and slab < regions * slot:
        name = origin["staging_slab"]
        raise wrong(name, slab, f"at least {regions * slot}: regions times slot_bytes")


def _nest(options: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in options.items():
        section, dot, key = name.partition(".")
        if dot and section in SECTIONS:
            nested.setdefault(section, {})[key] = value
        else:
            nested[name] = value
    return nested


def _check(pipeline: str, depot: dict[str, Any], origin: Mapping[str, str]) -> None:
    """As the depot would when it opens, but by the names that were given. Each process of the
    engine reads them, on whatever machine; the one that opens the depot looks at what is there."""
    try:
        kvdepot.check(pipeline, depot, options_only=True)
    except kvdepot.ConfigError as error:
        named, colon, rest = str(error).partition(": ")
        given = origin.get(named, named)
        if given != named:
            raise kvdepot.ConfigError(f"{given}{colon}{rest} ({named} of kvdepot)") from error
        near = difflib.get_close_matches(named.removeprefix("dax."), KNOBS, n=1)
        if near and "unknown option" in rest and "did you mean" not in rest:
            raise kvdepot.ConfigError(f"{error}; or is {near[0]!r} meant?") from error
        raise


def wrong(name: str, value: object, allowed: str) -> kvdepot.ConfigError:
    """An error that names parameter, value and what is allowed."""
    return kvdepot.ConfigError(f"{name}: {value!r} is not allowed; it must be {allowed}")


def unknown(name: str, word: str, known: Mapping[str, Any]) -> kvdepot.ConfigError:
    """An error that names the parameter and the nearest one that exists."""
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return kvdepot.ConfigError(f"{name}: unknown; {hint}known are {', '.join(known)}")
