"""The settings: what `kv_connector_extra_config` may hold, and an entry of its `secondary_tiers`.

One dictionary carries three kinds of keys: the connector's or the tier's own, vLLM's (which reads
them from the same place), and the depot's (everything that is not declared below). A `config_file`
is a YAML file with the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import kvdepot
from kvdepot import _native, _settings
from kvdepot._settings import SERVICE, Schema, Setting
from kvdepot.engine import weights as engine_weights

# A reset is for sleep, a pause, or other weights; which it was is looked at.
VERIFY = "verify"

# At the first hit of a kind: serve it, or have it computed.
DETECT, GATE = "detect", "gate"

# What UCM calls it.
UCM_CONFIG_FILE = "UCM_CONFIG_FILE"

CONFIG_FILE = Setting(
    ("config_file", UCM_CONFIG_FILE),
    _settings.optional(_settings.text("the path of a YAML file")),
    "YAML file with the settings of this table and options of the depot, or [a configuration file "
    "of UCM](../ucm.md)",
)
SALT = Setting(
    ("salt",),
    replace(_settings.optional(_settings.text()), secret=True),
    "text that separates tenants: engines with different salts share no blocks",
)
UNTESTED = Setting(
    ("allow_untested_vllm",),
    _settings.TRUE_OR_FALSE,
    "if `true`, kvdepot also runs with versions of vLLM that were not tested with kvdepot",
    default=False,
)
SHARED_BETWEEN_VERSIONS = Setting(
    ("share_vllm_versions",),
    _settings.TRUE_OR_FALSE,
    "if `true`, the namespace omits the minor versions of vLLM and transformers. Engines with "
    "different versions then share the blocks that were stored with this setting "
    "([versions](#versions-of-vllm))",
    default=False,
)
ON_RESET = Setting(
    ("on_reset",),
    replace(
        _settings.one_of((VERIFY, "epoch", "clear")),
        allowed="'verify' (keeps blocks while the weights are the same), 'epoch' or 'clear'",
    ),
    "effect of a reset of vLLM's prefix cache on stored blocks "
    "([values](#cache-resets-and-sleep-mode))",
    default=VERIFY,
)

WEIGHTS = Setting(
    ("weights",),
    _settings.WORD,
    "identification of the model's weights: `sampled`, `full`, or a text of your choice "
    "([values](#cache-key-and-namespace))",
    default=engine_weights.SAMPLED,
)

SETTINGS = Schema(
    Setting(
        ("pipeline",),
        _settings.text("a text such as 'Cache|Dax'"),
        "storage tiers, first (nearest to the engine) to last; or `unix:` and the socket path of a "
        "[server](#sharing-a-depot-between-engines)",
        default="Cache|Dax",
    ),
    CONFIG_FILE,
    SALT,
    WEIGHTS,
    Setting(
        ("lookup_wait",),
        _settings.DURATION,
        "maximum total time that a request waits for slow lookups, for "
        "[promotions](../glossary.md#promotion), and for blocks that another request is storing. "
        "After this time, vLLM computes the missing blocks. With `0s`, requests do not wait",
        # Computing a block again takes longer than the store that is in flight, but a request must
        # not wait for a slow one: after this it computes.
        default="1s",
    ),
    ON_RESET,
    Setting(
        ("probe_every",),
        _settings.COUNT_OR_NONE,
        "average number of requests with a hit per [probe](#probes) (check of stored blocks). `0` "
        "disables probes",
        default=1000,
    ),
    Setting(
        ("probe_first",),
        replace(
            _settings.one_of((DETECT, GATE)),
            allowed="'detect' (a part of the hit) or 'gate' (the whole hit)",
        ),
        "part of a hit that vLLM computes again for a comparison with the stored blocks "
        "([probe](#probes)), for the first hit of each kind after a start",
        default=DETECT,
    ),
    Setting(
        ("offload_prompt_only",),
        _settings.TRUE_OR_FALSE,
        "vLLM's option: if `true`, kvdepot stores only the blocks of prompts, without generated "
        "tokens",
        default=False,
    ),
    Setting(
        ("block_size",),
        _settings.optional(_settings.COUNT),
        "vLLM's option: number of tokens per stored block, a multiple of vLLM's block size. Set "
        "either `block_size` or `blocks_per_chunk`",
    ),
    Setting(
        ("blocks_per_chunk",),
        _settings.optional(_settings.COUNT),
        "vLLM's option: number of vLLM blocks per stored block; 1 if neither `block_size` nor "
        "`blocks_per_chunk` is set",
    ),
    UNTESTED,
    SHARED_BETWEEN_VERSIONS,
    # The connector itself names its spec there.
    Setting(("spec_module_path",), _settings.ANY),
    Setting(("spec_name",), _settings.ANY),
    # They would change what is stored in ways that kvdepot does not follow.
    Setting(("canonical_layout",), _settings.left_out("kvdepot stores each rank's own bytes")),
    # Events of blocks that others have stored, or an earlier run, could not have them.
    Setting(
        ("self_describing_kv_events",),
        _settings.left_out("kvdepot does not store the tokens of blocks"),
    ),
    # From 0.33 on: such a load cannot be reported as failed in a model with several KV groups.
    Setting(("sync_load_budget_bytes",), _settings.left_out("kvdepot loads between steps")),
)

TIER_SETTINGS = Schema(
    Setting(
        ("pipeline",),
        _settings.text("a text such as 'Cache|Posix'"),
        "storage tiers below vLLM's own CPU tier, first to last; or `unix:` and the socket path of "
        "a server. Required",
    ),
    CONFIG_FILE,
    SALT,
    Setting(
        ("weights",),
        _settings.optional(_settings.WORD),
        "identification of the model's weights. With `KvdepotTieringConnector`: a value of "
        "`weights` in [settings](#settings), by default `sampled`. With vLLM's "
        "`OffloadingConnector`, `weights` is required: a text that identifies the weights and all "
        "other settings that change keys and values",
    ),
    Setting(
        ("lookup_wait",),
        _settings.DURATION,
        "maximum time that a request waits for the lookup of a block. After this time, the block "
        "is a miss. With `0s`, requests do not wait",
        default="1s",
    ),
    ON_RESET,
    Setting(
        ("locality",),
        _settings.optional(_settings.one_of(("LOCAL", "REMOTE"))),
        "vLLM's option: class of the tier. A request can exclude all tiers of a class",
    ),
    UNTESTED,
    SHARED_BETWEEN_VERSIONS,
    # The connector of `kvdepot.vllm.tiering` writes it.
    Setting(("engine",), _settings.optional(_settings.text())),
    Setting(("engines",), _settings.optional(_settings.COUNT)),
    Setting(("enable_kv_events",), _settings.left_out("KvdepotTier publishes no KV events")),
)


@dataclass(frozen=True)
class ProbeSettings:
    """When requests are probed (`kvdepot.vllm.probes`)."""

    every: int = 0
    """One request with a hit of so many is probed by chance; 0 for none at all."""
    first: str = DETECT
    """What happens at the first hit of each kind: `detect` or `gate`."""


@dataclass(frozen=True)
class DepotSettings:
    """What every use of a depot by vLLM is told."""

    pipeline: str
    depot: dict[str, Any]
    """What `kvdepot.open` gets."""
    salt: str | None
    lookup_wait_seconds: float
    on_reset: str
    untested_vllm: bool
    """Whether versions of vLLM outside of the tested range are used too."""
    share_versions: bool
    """Whether blocks of other minor versions of vLLM and transformers are used too."""

    @property
    def shared(self) -> bool:
        """Whether a service has the depot, and other engines use it too."""
        return self.pipeline.startswith(SERVICE)


@dataclass(frozen=True)
class Settings(DepotSettings):
    """The connector's settings, checked as far as this can be done without opening a depot."""

    weights: str
    """`sampled`, `full`, or a text that names them."""
    probes: ProbeSettings
    offload_prompt_only: bool
    """Whether generated tokens are left out; here they are stored by default."""
    merged: dict[str, Any]
    """All keys in one dictionary, those of the file too."""


@dataclass(frozen=True)
class TierSettings(DepotSettings):
    """The same of a tier under vLLM's own."""

    weights: str | None
    engine: str | None
    """The fingerprint of weights and engine that kvdepot's connector has made."""
    locality: str | None


def read(extra_config: Mapping[str, Any]) -> Settings:
    """Check the dictionary; `kvdepot.ConfigError` names key, value and what is allowed."""
    where = "kv_connector_extra_config"
    merged = _with_file(extra_config, where)
    # What vLLM serves from its own cache is offered again and again, and never asked for.
    own, common = _read(SETTINGS, merged, where, admission="learned")
    if own["probe_first"] == GATE and not own["probe_every"]:
        raise _settings.wrong("probe_first", GATE, "'detect' with probe_every: 0")
    return Settings(
        **common,
        weights=own["weights"],
        probes=ProbeSettings(own["probe_every"], own["probe_first"]),
        offload_prompt_only=own["offload_prompt_only"],
        merged=merged,
    )


def read_tier(config: Mapping[str, Any]) -> TierSettings:
    """As `read`, of an entry of `secondary_tiers`, without what vLLM takes out of it."""
    where = "secondary_tiers"
    own, common = _read(TIER_SETTINGS, _with_file(config, where), where)
    if own["weights"] is None and own["engine"] is None:
        raise kvdepot.ConfigError(
            "weights: required in secondary_tiers, because 'OffloadingConnector' does not report "
            "the engine's weights; set weights to a text that identifies the engine's weights, "
            'or use "kv_connector": "KvdepotTieringConnector", "kv_connector_module_path": '
            '"kvdepot.vllm"'
        )
    if own["engines"] and not own["pipeline"].startswith(SERVICE):
        common["depot"].setdefault("shares", own["engines"])
    return TierSettings(
        **common, weights=own["weights"], engine=own["engine"], locality=own["locality"]
    )


def allows_untested(config: Mapping[str, Any]) -> bool:
    """Whether an entry of `secondary_tiers` lets in versions of vLLM that were not tested; nothing
    else of it is checked."""
    merged = _with_file(config, "secondary_tiers")
    (allowed,) = Schema(UNTESTED).take(merged).values()
    return bool(allowed)


def _read(
    schema: Schema, merged: Mapping[str, Any], where: str, **defaults: object
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema's own values, and the fields of `DepotSettings`; `defaults` are the depot's."""
    depot = dict(merged)
    own = schema.take(depot)
    if own["pipeline"] is None:
        allowed = schema.by_name["pipeline"].kind.allowed
        raise kvdepot.ConfigError(f"pipeline: required in {where}: {allowed}")
    common = {
        "pipeline": own["pipeline"],
        "depot": depot,
        "salt": own["salt"],
        "lookup_wait_seconds": own["lookup_wait"],
        "on_reset": own["on_reset"],
        "untested_vllm": own["allow_untested_vllm"],
        "share_versions": own["share_vllm_versions"],
    }
    if not own["pipeline"].startswith(SERVICE):
        # A store that waits for a slow far tier would hold up the engine's step. (What a service
        # does is set there.)
        depot.setdefault("overload", "drop")
        for name, value in defaults.items():
            depot.setdefault(name, value)
    elif own["on_reset"] == "clear":
        allowed = "'verify' or 'epoch' where other engines share the depot"
        raise _settings.wrong("on_reset", own["on_reset"], allowed)
    _settings.check(schema, own["pipeline"], depot, where=where)
    return own, common


def share(settings: DepotSettings, merged: dict[str, Any], parallel: Any) -> None:
    """Have data-parallel engines of a host divide what defaults take of its memory and disk."""
    engines = local_engines(parallel)
    if engines > 1 and not settings.shared:
        settings.depot.setdefault("shares", engines)
        merged.setdefault("shares", engines)


def local_engines(parallel: Any) -> int:
    """The data-parallel engines of this host, as far as vLLM leaves their number."""
    here = getattr(parallel, "data_parallel_size_local", 1) or 1
    if here == 1 and getattr(parallel, "data_parallel_size", 1) == 1:
        # An engine of a dense model is told that it is alone. This is the size of all.
        here = getattr(parallel, "elastic_ep_max_dp_size", 1) or 1
    return int(here)


def _with_file(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys, and those of the file that `config_file` names."""
    merged = dict(given)
    for name in [name for name in CONFIG_FILE.names if name in merged]:
        file = CONFIG_FILE.kind.read(name, merged.pop(name))
        if file is not None:
            options, is_ucms = _read_file(name, file, merged)
            # What UCM's file says is another program's: what stands beside it is meant.
            _merge(merged, options, (where, file), override=is_ucms)
    return merged


def _merge(
    into: dict[str, Any],
    options: Mapping[str, Any],
    places: tuple[str, str],
    *,
    override: bool,
    section: str = "",
) -> None:
    """Add a file's options to those that are given, section by section."""
    for key, value in options.items():
        known = into.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            into[key] = dict(known)
            _merge(into[key], value, places, override=override, section=f"{key}.")
        elif key not in into:
            into[key] = value
        elif not override:
            where, file = places
            raise kvdepot.ConfigError(
                f"{section}{key}: set in {where} and in {file}; remove one of the two"
            )


def _read_file(name: str, path: str, beside: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The keys of a file that do not have to give way, and whether it is UCM's."""
    # By these it is told what UCM's file is read for.
    known = {key: beside[key] for key in ("pipeline", "cache") if key in beside}
    try:
        options, is_ucms = _native._options_of_file(path, known)
        content = json.loads(options)
    except (kvdepot.Error, OSError) as error:
        raise kvdepot.ConfigError(f"{name}: cannot read {path!r}: {error}") from error
    if any(name in content for name in CONFIG_FILE.names):
        raise _settings.wrong(name, path, "a YAML file that does not refer to another file")
    return dict(content), is_ucms
