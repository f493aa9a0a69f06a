"""What LMCache's configuration says of one of its storage plug-ins.

LMCache makes the plug-ins that `storage_plugins` names one after the other, with the same
arguments: which of the names an instance has follows from its turn.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from lmcache.logging import init_logger

from kvdepot._settings import wrong

logger: logging.Logger = init_logger(__name__)

# How many instances were made with a configuration, by its address: LMCache's is not hashable.
_turns: dict[int, int] = {}
_lock = threading.Lock()


def parameters(extra_config: dict[str, Any], plugin: str) -> dict[str, Any]:
    """What of LMCache's `extra_config` is meant for the plug-in of that name: `dax.` and
    `kvdepot.`, and in their place what is given behind `storage_plugin.NAME.`."""
    given = _own(extra_config)
    mine = f"storage_plugin.{plugin}."
    behind = {
        name.removeprefix(mine): value
        for name, value in extra_config.items()
        if name.startswith(mine)
    }
    return given | _own(behind)


def _own(options: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in options.items() if name.startswith("dax.")}
    for name, value in options.items():
        if name.startswith("kvdepot."):
            own[name.removeprefix("kvdepot.")] = value
    nested = options.get("kvdepot", {})
    if not isinstance(nested, dict):
        raise wrong("kvdepot", nested, "a mapping of options")
    return own | nested


def plugin_name(config: Any) -> str:
    """The name under which LMCache registers the plug-in that is being made; `dax` where it does
    not say."""
    extra = config.extra_config or {}
    names = [
        str(name)
        # In LMCache's order, which is that of a set.
        for name in set(config.storage_plugins or ())
        if str(extra.get(f"storage_plugin.{name}.module_path", "")).startswith("kvdepot.")
        and extra.get(f"storage_plugin.{name}.class_name")
    ]
    if len(names) < 2:
        return names[0] if names else "dax"
    with _lock:
        if id(config) not in _turns:
            weakref.finalize(config, _turns.pop, id(config), None)
        turn = _turns[id(config)] = _turns.get(id(config), -1) + 1
    # A configuration may be used again, for all of them.
    return names[turn % len(names)]


def warn_of_exclusion(config: Any, name: str) -> None:
    """LMCache then stores, or finds, nothing, and says nothing."""
    given = {
        "store_location": (config.store_location, "stores nothing"),
        "retrieve_locations": (config.retrieve_locations, "finds nothing"),
    }
    for option, (value, effect) in given.items():
        named = [value] if isinstance(value, str) else value
        if named and name not in named:
            logger.warning(
                "%s: %r does not contain the storage plug-in %r, so LMCache %s in kvdepot",
                option,
                value,
                name,
                effect,
            )
