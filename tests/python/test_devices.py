"""Several devices as one tier, and devices that come and go while the depot serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvdepot
import pytest

Keys = Callable[[int], list[bytes]]
LEN = 16 << 10


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def depot(devices: list[Path]) -> Iterator[kvdepot.Depot]:
    listed = [{"path": str(path), "capacity": "4MiB"} for path in devices]
    with kvdepot.open("Dax", {"dax": {"devices": listed}, "socket": "off"}) as depot:
        yield depot


def blocks(ns: kvdepot.Namespace, keys: list[bytes]) -> list[bytes]:
    stored = [key[:1] * LEN for key in keys]
    assert ns.put(keys, stored).wait(30) == [True] * len(keys)
    return stored


def served(ns: kvdepot.Namespace, keys: list[bytes], stored: list[bytes]) -> bool:
    buffers = [bytearray(LEN) for _ in keys]
    return all(ns.get(keys, buffers).wait(30)) and buffers == stored


def test_a_device_is_drained_removed_and_comes_back(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys, devices: list[Path]
) -> None:
    names = keys(40)
    halves = names[:20], names[20:]
    stored = [block for half in halves for block in blocks(ns, half)]
    listed = depot.devices()
    assert [Path(device["path"]) for device in listed] == devices
    assert [device["state"] for device in listed] == ["serving"] * 2
    assert [device["capacity_bytes"] for device in listed] == [4 << 20] * 2
    assert [device["blocks"] for device in listed] == [20, 20]
    assert depot.drain_device(devices[0]) == {
        "moved_blocks": 20,
        "moved_bytes": 20 * LEN,
        "evicted_blocks": 0,
    }
    assert depot.devices()[0]["state"] == "draining"
    assert served(ns, names, stored)
    depot.remove_device(devices[0])
    with kvdepot.open("Dax", {"dax": {"path": str(devices[0])}, "socket": "off"}) as other:
        assert other.recovery["blocks"] == 0
    assert depot.add_device(devices[0], "4MiB")["created"] is False
    assert len(depot.devices()) == 2
    assert served(ns, names, stored)
    labels = f'{{tier="Dax",device="{devices[1]}"}}'
    assert f"kvdepot_device_blocks{labels} 40\n" in depot.metrics_text()


def test_devices_are_known_by_their_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"dax": {"path": "a", "capacity": "1MiB"}, "socket": "off"}
    with kvdepot.open("Dax", settings) as depot:
        depot.add_device("b", "1MiB")
        assert depot.add_device("b", "1MiB")["created"] is False, "it is already open"
        assert [device["path"] for device in depot.devices()] == [
            str(tmp_path / name) for name in "ab"
        ]
        depot.remove_device("a")
        assert [device["path"] for device in depot.devices()] == [str(tmp_path / "b")]


def test_pins_hold_a_drain_up_and_the_device_goes_on(
    depot: kvdepot.Depot, ns: kvdepot.Namespace, keys: Keys, devices: list[Path]
) -> None:
    names = keys(4)
    blocks(ns, names)
    pins = ns.pin(names)
    busy = next(Path(device["path"]) for device in depot.devices() if device["blocks"])
    with pytest.raises(kvdepot.TimeoutError, match=r"4 blocks are pinned"):
        depot.drain_device(busy, timeout=0.05)
    assert [device["state"] for device in depot.devices()] == ["serving"] * 2
    ns.unpin([pin for pin in pins if pin is not None])
    depot.remove_device(busy, force=True)
    assert len(depot.devices()) == 1


def test_a_device_grows(depot: kvdepot.Depot, devices: list[Path]) -> None:
    depot.grow_device(devices[1], "8MiB")
    depot.grow_device(devices[1], 8 << 20)
    assert [device["capacity_bytes"] >> 20 for device in depot.devices()] == [4, 8]
    assert devices[1].stat().st_size == 8 << 20
    with pytest.raises(kvdepot.InputError, match=r"^capacity: 4 MiB is not allowed; .* 8 MiB"):
        depot.grow_device(devices[1], "4MiB")


def test_growth_beyond_the_largest_file_names_the_capacity(child: Any, tmp_path: Path) -> None:
    # The limit is a process's own.
    program = """
        import resource, sys
        import kvdepot

        settings = {"dax": {"path": sys.argv[1], "capacity": "4MiB"}, "socket": "off"}
        with kvdepot.open("Dax", settings) as depot:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, most))
            try:
                depot.grow_device(sys.argv[1], "16MiB")
            except kvdepot.ConfigError as error:
                print(error)
    """
    said, failed = child(program, tmp_path / "arena").communicate(timeout=60)
    assert said.startswith("capacity: 16 MiB is not allowed"), failed
    assert "maximum file size" in said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.add_device("/a/b/c", "1MiB"), r"^path: /a/b/c is not allowed"),
        (lambda d: d.add_device("/dev/null"), r"^path: /dev/null is not allowed"),
        (lambda d: d.add_device("x", "1XB"), r"^capacity: '1XB' is not allowed; .*: a size"),
        (lambda d: d.add_device("x", -1), r"^capacity: -1 is not allowed; .*: a size"),
        (
            lambda d: d.add_device("x", 4096),
            r"^capacity: 4 KiB is not allowed; .*: at least 256 KiB",
        ),
        (
            lambda d: d.drain_device("x"),
            r"^path: x is not allowed; .*: one of the devices of this depot: /",
        ),
        (
            lambda d: d.drain_device("x", to="away"),
            r'^to: "away" is not allowed; .*: "other_devices" or',
        ),
        (lambda d: d.drain_device("x", timeout=-1), r"^timeout: -1"),
        (
            lambda d: d.remove_device("x"),
            r"^path: x is not allowed; .*: one of the devices of this depot: /",
        ),
        (
            lambda d: d.grow_device("x", "1MiB"),
            r"^path: x is not allowed; .*: one of the devices of this depot",
        ),
    ],
)
def test_mistakes_name_the_argument_the_value_and_what_is_allowed(
    depot: kvdepot.Depot, call: Callable[[kvdepot.Depot], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(depot)
    assert isinstance(caught.value, kvdepot.Error)
    assert len(depot.devices()) == 2


def test_a_list_of_devices_stands_instead_of_a_path(tmp_path: Path) -> None:
    listed = [{"path": str(tmp_path / "a"), "capacity": "1MiB"}]
    for other in ({"path": "/x"}, {"capacity": "1MiB"}):
        with pytest.raises(kvdepot.ConfigError, match=r"^dax\.devices: .* not both"):
            kvdepot.check("Dax", {"dax": {"devices": listed, **other}})
    with pytest.raises(kvdepot.ConfigError, match=r"^dax\.devices\[0\]\.size: 1 is not allowed"):
        kvdepot.check("Dax", {"dax": {"devices": [{"path": "/x", "size": 1}]}})
