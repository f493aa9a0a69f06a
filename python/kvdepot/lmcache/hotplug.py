"""Devices that come and go while LMCache serves: `POST /reconfigure/plugin/l2/{operation}`.

The operations are those of LMCache's own DAX adapter: `status`, `add`, `remove` (`migrate`,
`evict`, or `drain`) and `resize`. What is answered names no path of this machine but the one that
was asked for; the log has the rest. `force` never ends a lock: a lane may be reading.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

from lmcache.v1.distributed.l2_adapters.reconfiguration import L2ReconfigureError

import kvdepot
from kvdepot._settings import SIZE

log = logging.getLogger("kvdepot.lmcache")

OPERATIONS = ("status", "add", "remove", "resize")
MODES = {"remove": ("migrate", "evict", "drain"), "resize": ("migrate", "evict")}

# A lock is held from a lookup to the end of its load: far shorter, or for very long.
LOCK_WAIT_S = 2.0


def status(depot: kvdepot.Depot, enabled: bool) -> dict[str, Any]:
    """The devices, as LMCache's HTTP interface shows them."""
    devices = [
        {"index": index, "device_path": device["path"], **device}
        for index, device in enumerate(depot.devices())
    ]
    return {
        "backend": "kvdepot",
        "supported_operations": list(OPERATIONS),
        "status": {
            "hotplug_enabled": enabled,
            "total_capacity_bytes": sum(device["data_bytes"] for device in devices),
            "total_used_bytes": sum(device["used_bytes"] for device in devices),
            "devices": devices,
        },
    }


def owns(depot: kvdepot.Depot, path: str) -> bool:
    """Whether one of the devices is this one, whatever it is called."""
    wanted = identity(path)
    paths = [device["path"] for device in depot.devices()]
    return path in paths or (wanted is not None and wanted in map(identity, paths))


def identity(path: str) -> tuple[object, ...] | None:
    """What a path leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        return (stat.S_IFMT(found.st_mode), found.st_rdev)
    return (found.st_dev, found.st_ino)


def apply(
    depot: kvdepot.Depot,
    operation: str,
    payload: Mapping[str, Any],
    owners: Callable[[str], list[str]],
    gone: Callable[[], object],
) -> dict[str, Any]:
    """Do it, or raise LMCache's error. `gone` is called while evicted blocks are still noted."""
    verbs = {"add": add, "remove": remove, "resize": resize}
    if operation not in verbs:
        raise L2ReconfigureError(400, f"operation must be one of {', '.join(OPERATIONS)}")
    path = payload.get("device_path")
    if not isinstance(path, str) or not path.strip():
        raise L2ReconfigureError(400, "device_path must be the path of a device")
    try:
        done = verbs[operation](depot, path.strip(), payload, owners, gone)
    except kvdepot.TimeoutError as error:
        log.warning("%s %s: %s", operation, path, error)
        found = find(depot, path.strip())
        locked = found["pinned_blocks"] if found else 0
        message = "blocks of the device are pinned or being written; repeat the call later"
        blocked = {"status": "blocked", "reason": message, "locked_key_count": locked}
        raise L2ReconfigureError(409, message, payload=blocked) from error
    except kvdepot.LockedError as error:
        log.warning("%s %s: %s", operation, path, error)
        raise L2ReconfigureError(409, "another process uses the device") from error
    except kvdepot.CorruptError as error:
        log.warning("%s %s: %s", operation, path, error)
        raise L2ReconfigureError(
            409,
            "the device contains data that is not an arena; erase the device, or use another one",
        ) from error
    except kvdepot.Error as error:
        log.warning("%s %s: %s", operation, path, error)
        raise L2ReconfigureError(400, f"the operation {operation} failed; see the log") from error
    return {"status": "ok", "operation": operation, "device_path": path.strip(), **done}


def add(
    depot: kvdepot.Depot,
    path: str,
    payload: Mapping[str, Any],
    owners: Callable[[str], list[str]],
    _gone: Callable[[], object],
) -> dict[str, Any]:
    """Map one more device, or let a drained one take writes again."""
    others = owners(path)
    if others:
        raise L2ReconfigureError(409, f"the device is already in use by {', '.join(others)}")
    size = size_of(payload)
    there = find(depot, path)
    if there is not None and size not in (None, there["capacity_bytes"]):
        raise L2ReconfigureError(409, "the device is already in use with another size")
    found = depot.add_device(path, size)
    return {"blocks": found["blocks"], "device": find(depot, path)}


def remove(
    depot: kvdepot.Depot,
    path: str,
    payload: Mapping[str, Any],
    _owners: Callable[[str], list[str]],
    gone: Callable[[], object],
) -> dict[str, Any]:
    """Empty a device and let it go, or with `drain` only empty it."""
    mode = mode_of("remove", payload)
    found = known(depot, path)
    others = [one for one in depot.devices() if one["path"] != path and one["state"] == "serving"]
    if mode == "migrate" and found["blocks"] and not others:
        raise L2ReconfigureError(
            507, "no other device accepts writes; add a device, or use the mode evict"
        )
    drained = depot.drain_device(path, "evict" if mode == "evict" else "other_devices", LOCK_WAIT_S)
    gone()
    if mode != "drain":
        depot.remove_device(path)
    return {
        "operation": "drain" if mode == "drain" else "remove",
        "moved_keys": drained["moved_blocks"],
        "moved_bytes": drained["moved_bytes"],
        "deleted_keys": drained["evicted_blocks"],
        "state": "draining" if mode == "drain" else "removed",
    }


def resize(
    depot: kvdepot.Depot,
    path: str,
    payload: Mapping[str, Any],
    _owners: Callable[[str], list[str]],
    _gone: Callable[[], object],
) -> dict[str, Any]:
    """Give a device more room."""
    mode_of("resize", payload)
    found = known(depot, path)
    size = size_of(payload)
    if size is None:
        raise L2ReconfigureError(400, "size_bytes must be a number of bytes above 0")
    if size < found["capacity_bytes"]:
        raise L2ReconfigureError(
            409, "a device cannot shrink; remove the device and add a smaller device"
        )
    depot.grow_device(path, size)
    now = known(depot, path)
    return {
        "old_size_bytes": found["capacity_bytes"],
        "new_size_bytes": now["capacity_bytes"],
        "state": now["state"],
    }


def find(depot: kvdepot.Depot, path: str) -> Any:
    """A device's statistics, None when it is not there."""
    return next((device for device in depot.devices() if device["path"] == path), None)


def known(depot: kvdepot.Depot, path: str) -> Any:
    """As `find`, for a device that must be there."""
    found = find(depot, path)
    if found is None:
        raise L2ReconfigureError(404, "the device is not one of this adapter's devices")
    return found


def mode_of(operation: str, payload: Mapping[str, Any]) -> str:
    """The mode asked for, `migrate` unless given; `force` is checked with it."""
    mode = payload.get("mode", "migrate")
    if mode not in MODES[operation]:
        raise L2ReconfigureError(400, f"mode must be one of {', '.join(MODES[operation])}")
    if not isinstance(payload.get("force", False), bool):
        raise L2ReconfigureError(400, "force must be true or false")
    return str(mode)


def size_of(payload: Mapping[str, Any]) -> int | None:
    """The bytes asked for; `size` is LMCache's other name for them."""
    size = payload.get("size_bytes", payload.get("size"))
    try:
        return None if size is None else int(SIZE.read("size", size))
    except kvdepot.ConfigError as error:
        raise L2ReconfigureError(400, f"size must be {SIZE.allowed}") from error
