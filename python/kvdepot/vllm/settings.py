"""The connector's settings: what `kv_connector_extra_config` may hold.

One dictionary carries three kinds of keys: the connector's own (below), vLLM's
(`block_size` and the like, which its OffloadingConnector reads from the same
place), and the depot's (everything else: `kvdepot.check` knows those). A
`config_file` is a YAML file with the same keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvdepot

OWN_KEYS = {
    "config_file": "a YAML file with the same keys as this dictionary",
    "lookup_wait": "how long a request may wait for a block that another is storing, such as '1s'",
    "on_reset": "what a reset of vLLM's cache means for stored blocks: 'epoch', 'keep' or 'clear'",
    "pipeline": "the tiers, near to far, such as 'Cache|Dax', or 'unix:' and a service's socket",
    "salt": "a text that keeps tenants with the same model apart",
}

VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "spec_module_path",
        "spec_name",
    }
)

# Keys of vLLM's OffloadingConnector that would change what is stored in ways
# that kvdepot does not follow.
REFUSED_KEYS = {
    "canonical_layout": "kvdepot stores each rank's own bytes",
    "self_describing_kv_events": "kvdepot publishes no KV events",
}

DEFAULT_PIPELINE = "Cache|Dax"

# What begins a pipeline that another process serves.
SERVICE = "unix:"

# Computing a block again takes longer than the store that is in flight, but a
# request must not wait for a slow one: after this it computes.
DEFAULT_LOOKUP_WAIT_SECONDS = 1.0

# Stored blocks outlive what a reset is for: sleep, a pause, other weights. So they are kept, and
# nothing that was stored before is served again until the engine starts anew, with known weights.
DEFAULT_ON_RESET = "epoch"
ON_RESET = ("epoch", "keep", "clear")

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m)?\s*$")


@dataclass(frozen=True)
class Settings:
    """The settings, checked as far as this can be done without opening a depot."""

    pipeline: str
    depot: dict[str, Any]
    """What `kvdepot.open` gets."""
    salt: str | None = None
    lookup_wait_seconds: float = DEFAULT_LOOKUP_WAIT_SECONDS
    on_reset: str = DEFAULT_ON_RESET
    offload_prompt_only: bool = False
    """Whether generated tokens are left out; here they are stored by default."""
    merged: dict[str, Any] = field(default_factory=dict)
    """All keys in one dictionary, those of the file too."""

    @property
    def shared(self) -> bool:
        """Whether a service has the depot, and other engines use it too."""
        return self.pipeline.startswith(SERVICE)


def read(extra_config: Mapping[str, Any]) -> Settings:
    """Check the dictionary; `kvdepot.ConfigError` names key, value and what is allowed."""
    given = dict(extra_config)
    file = given.pop("config_file", None)
    if file is not None:
        for key, value in _read_file(file).items():
            if key in given:
                raise kvdepot.ConfigError(
                    f"{key}: given both in kv_connector_extra_config and in {file}; give it once"
                )
            given[key] = value
    merged = dict(given)
    for key, reason in REFUSED_KEYS.items():
        if given.pop(key, False):
            raise kvdepot.ConfigError(f"{key}: {reason}; leave it out")
    pipeline = given.pop("pipeline", DEFAULT_PIPELINE)
    salt = given.pop("salt", None)
    wait = given.pop("lookup_wait", DEFAULT_LOOKUP_WAIT_SECONDS)
    on_reset = given.pop("on_reset", DEFAULT_ON_RESET)
    vllm = {key: given.pop(key) for key in sorted(VLLM_KEYS & given.keys())}
    prompt_only = vllm.get("offload_prompt_only", False)
    if not isinstance(pipeline, str):
        raise _wrong("pipeline", pipeline, "a text such as 'Cache|Dax'")
    if salt is not None and not isinstance(salt, str):
        raise _wrong("salt", salt, "a text")
    if not isinstance(prompt_only, bool):
        raise _wrong("offload_prompt_only", prompt_only, "true or false")
    if on_reset not in ON_RESET:
        raise _wrong("on_reset", on_reset, "one of " + ", ".join(map(repr, ON_RESET)))
    if not pipeline.startswith(SERVICE):
        # A store that waits for a slow far tier would hold up the engine's step. (What a service
        # does is set there.)
        given.setdefault("overload", "drop")
        # What vLLM serves from its own cache is offered again and again, and never asked for.
        given.setdefault("admission", "learned")
    elif on_reset == "clear":
        raise _wrong("on_reset", on_reset, "'epoch' or 'keep' where other engines share the depot")
    settings = Settings(
        pipeline=pipeline,
        depot=given,
        salt=salt,
        lookup_wait_seconds=_seconds("lookup_wait", wait),
        on_reset=on_reset,
        offload_prompt_only=prompt_only,
        merged=merged,
    )
    try:
        # Workers read them too; the process that opens the depot looks at what is there.
        kvdepot.check(settings.pipeline, settings.depot, options_only=True)
    except kvdepot.ConfigError as error:
        raise _explain(error, settings) from error
    return settings


def _explain(error: kvdepot.ConfigError, settings: Settings) -> kvdepot.ConfigError:
    """The depot's refusal, with the connector's own keys where one of them may be meant."""
    known = sorted({*OWN_KEYS, *VLLM_KEYS})
    for key in settings.depot:
        close = difflib.get_close_matches(key, known, n=1)
        if close and str(error).startswith(f"{key}:"):
            return kvdepot.ConfigError(f"{error}; or is {close[0]!r} meant?")
    return kvdepot.ConfigError(
        f"{error} (in kv_connector_extra_config, which also takes {', '.join(known)})"
    )


def _read_file(path: object) -> dict[str, Any]:
    import yaml  # a dependency of vLLM

    if not isinstance(path, str):
        raise _wrong("config_file", path, "the path of a YAML file")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise kvdepot.ConfigError(f"config_file: cannot read {path!r}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or "config_file" in content:
        raise _wrong("config_file", path, "a YAML file with a mapping, without config_file in it")
    return content


def _seconds(key: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(key, value, "a duration such as '500ms' or '2s'")
    return float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}[match[2]]


def _wrong(key: str, value: object, allowed: str) -> kvdepot.ConfigError:
    return kvdepot.ConfigError(f"{key}: {value!r} is not allowed; it must be {allowed}")
