"""The connector's settings: what `kv_connector_extra_config` may hold.

One dictionary carries three kinds of keys: the connector's own, vLLM's (which its
OffloadingConnector reads from the same place), and the depot's (everything that is not
declared below). A `config_file` is a YAML file with the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kvdepot
from kvdepot import _native, _settings
from kvdepot._settings import SERVICE, Schema, Setting

# Stored blocks outlive what a reset is for: sleep, a pause, other weights. So they are kept, and
# nothing that was stored before is served again until the engine starts anew, with known weights.
DEFAULT_ON_RESET = "epoch"

SETTINGS = Schema(
    Setting(
        ("pipeline",),
        _settings.text("a text such as 'Cache|Dax'"),
        "the tiers, near to far; or `unix:` and a service's socket: see "
        "[one depot for all engines](#one-depot-for-all-engines-of-a-host)",
        default="Cache|Dax",
    ),
    Setting(
        ("config_file", "UCM_CONFIG_FILE"),
        _settings.optional(_settings.text("the path of a YAML file")),
        "the same keys, in a file; or [one of UCM's](../ucm.md)",
    ),
    Setting(
        ("salt",),
        _settings.optional(_settings.text()),
        "keeps tenants with the same model apart",
    ),
    Setting(
        ("lookup_wait",),
        _settings.DURATION,
        "how long a request waits for a block that another is storing",
        # Computing a block again takes longer than the store that is in flight, but a request must
        # not wait for a slow one: after this it computes.
        default="1s",
    ),
    Setting(
        ("on_reset",),
        _settings.one_of(("epoch", "keep", "clear")),
        "what a reset of vLLM's cache means for stored blocks, see [below](#resets)",
        default=DEFAULT_ON_RESET,
    ),
    Setting(
        ("offload_prompt_only",),
        _settings.TRUE_OR_FALSE,
        "vLLM's: whether generated tokens are left out",
        default=False,
    ),
    Setting(("block_size",), _settings.ANY, "vLLM's: tokens of one stored block"),
    Setting(("blocks_per_chunk",), _settings.ANY, "vLLM's: its blocks in one stored block"),
    # The connector itself names its spec there.
    Setting(("spec_module_path",), _settings.ANY),
    Setting(("spec_name",), _settings.ANY),
    # They would change what is stored in ways that kvdepot does not follow.
    Setting(("canonical_layout",), _settings.left_out("kvdepot stores each rank's own bytes")),
    Setting(("self_describing_kv_events",), _settings.left_out("kvdepot publishes no KV events")),
)


@dataclass(frozen=True)
class Settings:
    """The settings, checked as far as this can be done without opening a depot."""

    pipeline: str
    depot: dict[str, Any]
    """What `kvdepot.open` gets."""
    salt: str | None
    lookup_wait_seconds: float
    on_reset: str
    offload_prompt_only: bool
    """Whether generated tokens are left out; here they are stored by default."""
    merged: dict[str, Any]
    """All keys in one dictionary, those of the file too."""

    @property
    def shared(self) -> bool:
        """Whether a service has the depot, and other engines use it too."""
        return self.pipeline.startswith(SERVICE)


def read(extra_config: Mapping[str, Any]) -> Settings:
    """Check the dictionary; `kvdepot.ConfigError` names key, value and what is allowed."""
    merged = _with_file(extra_config)
    depot = dict(merged)
    own = SETTINGS.take(depot)
    settings = Settings(
        pipeline=own["pipeline"],
        depot=depot,
        salt=own["salt"],
        lookup_wait_seconds=own["lookup_wait"],
        on_reset=own["on_reset"],
        offload_prompt_only=own["offload_prompt_only"],
        merged=merged,
    )
    if not settings.shared:
        # A store that waits for a slow far tier would hold up the engine's step. (What a service
        # does is set there.)
        depot.setdefault("overload", "drop")
        # What vLLM serves from its own cache is offered again and again, and never asked for.
        depot.setdefault("admission", "learned")
    elif settings.on_reset == "clear":
        allowed = "'epoch' or 'keep' where other engines share the depot"
        raise _settings.wrong("on_reset", settings.on_reset, allowed)
    _settings.check(SETTINGS, settings.pipeline, depot, where="kv_connector_extra_config")
    return settings


def _with_file(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, and those of the file that `config_file` names."""
    merged = dict(extra_config)
    setting = SETTINGS.by_name["config_file"]
    for name in [name for name in setting.names if name in merged]:
        file = setting.kind.read(name, merged.pop(name))
        for key, value in _read_file(name, file).items() if file is not None else ():
            if key in merged:
                raise kvdepot.ConfigError(
                    f"{key}: given both in kv_connector_extra_config and in {file}; give it once"
                )
            merged[key] = value
    return merged


def _read_file(name: str, path: str) -> dict[str, Any]:
    try:
        content = json.loads(_native._options_of_file(path))
    except (kvdepot.Error, OSError) as error:
        raise kvdepot.ConfigError(f"{name}: cannot read {path!r}: {error}") from error
    if any(name in content for name in SETTINGS.by_name["config_file"].names):
        raise _settings.wrong(name, path, "a YAML file without another file's name in it")
    return dict(content)
