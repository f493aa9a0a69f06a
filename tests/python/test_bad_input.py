"""Wrong arguments and options are refused before a byte moves, naming field, value, allowed."""

from __future__ import annotations

import os
import socket
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvdepot
import numpy as np
import pytest

Keys = Callable[[int], list[bytes]]


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(kvdepot.Error) as caught:
        call(*arguments, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("pipeline", "settings", "words"),
    [
        ("Tape", {}, ["pipeline", "Tape", "Cache, Dax"]),
        ("Dax|Cache", {}, ["pipeline", "Dax|Cache", "Cache as the first tier"]),
        ("", {}, ["pipeline", '""']),
        (7, {}, ["pipeline", "7", "Cache|Dax"]),
        ("Cache", {"cach": {}}, ["cach", "unknown option", 'did you mean "cache"']),
        ("Cache", {"cache": {"capactiy": 1}}, ["cache.capactiy", 'did you mean "capacity"']),
        ("Cache", {"cache": {"capacity": 0}}, ["cache.capacity", "0", "above zero"]),
        ("Cache", {"cache": {"capacity": -5}}, ["cache.capacity", "-5"]),
        ("Cache", {"cache": {"capacity": 2**70}}, ["cache.capacity", str(2**70)]),
        ("Cache", {"cache": {"capacity": "much"}}, ["cache.capacity", "much"]),
        ("Cache", {"cache": {"capacity": object}}, ["cache.capacity", "object"]),
        ("Cache", {"cache": {"capacity": "4096TiB"}}, ["cache.capacity", "4 PiB", "memory"]),
        ("Cache", {"cache": 5}, ["cache", "5", "mapping"]),
        ("Cache", {"dax": {"path": "/x"}}, ["dax", "Cache"]),
        ("Cache", {"lock_wait": "soon"}, ["lock_wait", "soon"]),
        ("Cache", {"lanes": 0}, ["lanes", "0"]),
        ("Cache", {"overload": "explode"}, ["overload", "explode", "wait, drop"]),
        ("Cache", {"promote": "maybe"}, ["promote", "maybe"]),
        ("Cache", {"instance": "a/b"}, ["instance", "a/b"]),
        ("Cache", {3: 4}, ["settings", "3", "strings"]),
        ("Cache", [1], ["settings", "mapping"]),
        ("Cache", {"socket_mode": 660}, ["socket_mode: 660", "in octal and in quotes"]),
        ("Cache", {"socket": "/none/such/s"}, ["socket", "/none/such/s", "directory"]),
        ("Cache", {"socket": "/tmp/" + "s" * 200}, ["socket", "107 bytes"]),
        ("\ud800", {}, ["pipeline: '\\ud800'", "UTF-8"]),
        ("/\ud800.yaml", {}, ["pipeline", "UTF-8"]),
        ("Cache", {"instance": "\ud800"}, ["instance: '\\ud800'", "UTF-8"]),
        ("nothere.yaml", None, ["nothere.yaml", "configuration file", "No such file"]),
    ],
)
def test_options(pipeline: Any, settings: Any, words: list[str], tmp_path: Path) -> None:
    text = refusal(kvdepot.open, pipeline, settings)
    assert text.startswith("ConfigError: ")
    for word in words:
        assert word in text


def test_options_are_checked_without_opening(tmp_path: Path) -> None:
    settings = {"dax": {"path": str(tmp_path / "arena"), "capacity": "1GiB"}}
    assert kvdepot.check("Dax", settings) is None
    assert not (tmp_path / "arena").exists()
    assert "dax.capcity" in refusal(kvdepot.check, "Dax", {"dax": {"capcity": 1}})
    for wrong in (
        {"dax": {"path": "/dev/no-such-device", "capacity": "1MiB"}},
        {"dax": {"path": str(tmp_path / "none" / "arena"), "capacity": "1MiB"}},
        {"dax": {"path": str(tmp_path / "arena"), "capacity": 1.5}},
        {"dax": {"path": str(tmp_path / "arena"), "capacity": "8KiB"}},
    ):
        assert refusal(kvdepot.check, "Dax", wrong) == refusal(kvdepot.open, "Dax", wrong)
    there = {"dax": {"path": "/dev/dax9.9", "capacity": "1GiB"}}
    assert kvdepot.check("Dax", there, options_only=True) is None
    much = {"cache": {"capacity": "1024TiB"}}
    assert "memory" in refusal(kvdepot.check, "Cache", much)


def test_what_can_never_open_is_refused_by_the_options_alone(tmp_path: Path) -> None:
    twice = [{"path": str(tmp_path / "a")}, {"path": str(tmp_path / "." / "a")}]
    bucket = {"url": "s3://bucket/kv", "capacity": "1GiB", "requests": 1}
    for pipeline, settings, named in (
        ("Posix", {}, "posix.path"),
        ("Posix", {"posix": {"path": str(tmp_path), "fan_out": 4097}}, "posix.fan_out"),
        ("S3", {"s3": bucket}, "s3.requests"),
        ("Dax", {"dax": {"devices": twice}}, "dax.devices[1].path"),
        ("Peer", {}, "peer.name"),
    ):
        text = refusal(lambda *given: kvdepot.check(*given, options_only=True), pipeline, settings)
        assert named in text
    # Files that options name may be another machine's.
    host = {"name": "a", "capacity": "1GiB", "hosts": "a 10.0.0.1:7000 1GiB"}
    host["token_file"] = str(tmp_path / "none")
    assert kvdepot.check("Peer", {"peer": host}, options_only=True) is None
    assert "none" in refusal(kvdepot.check, "Peer", {"peer": host})


@pytest.mark.parametrize("given", [float("inf"), float("nan"), 2**80])
def test_a_number_that_is_none_for_an_option_is_refused_as_a_number(given: float) -> None:
    text = refusal(kvdepot.check, "Cache", {"close_timeout": given})
    assert "close_timeout" in text
    assert "number" in text
    assert "mapping" not in text


class Restless(os.PathLike[str]):
    """A path that changes what it stands in when it is read."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def __fspath__(self) -> str:
        self.change()
        return "/tmp/none-such"


def test_settings_may_change_while_they_are_read() -> None:
    section: dict[str, Any] = {"capacity": 1 << 20}
    section["path"] = Restless(lambda: section.update({str(len(section)): 1}))
    kvdepot.check("Dax", {"dax": section})
    settings: dict[str, Any] = {}
    settings["socket"] = Restless(settings.clear)
    kvdepot.check("Cache", settings)
    devices: list[Any] = []
    devices.append(Restless(lambda: devices.append(devices[0])))
    with pytest.raises(kvdepot.ConfigError):
        kvdepot.check("Dax", {"dax": {"path": devices}})


def test_settings_may_be_any_mapping() -> None:
    inner = types.MappingProxyType({"capacity": "1MiB"})
    kvdepot.check("Cache", types.MappingProxyType({"cache": inner}))
    wrong = types.MappingProxyType({"capactiy": 1})
    assert "cache.capactiy" in refusal(kvdepot.check, "Cache", {"cache": wrong})


def test_a_get_that_cannot_be_planned_says_nothing_about_its_block(depots: Any, keys: Keys) -> None:
    depot = depots.open("Dax")
    ns = depot.namespace("m", "f", 1)
    name = keys(1)
    assert ns.put(name, [b"x" * 5000]).wait(30) == [True]
    (pin,) = ns.pin(name)
    with kvdepot.attach(depot.socket) as mover:
        ((_, offset, length),) = mover.locate([pin.placement])
    # Its own mapping goes with it.
    del mover
    ns.unpin([pin])
    arena = str(depots.folder / "arena")
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if arena in line]
    # Over itself.
    address = int(line.partition("-")[0], 16) + offset
    task = ns.get(name, [(address, length)])
    assert task.wait(30) == [False]
    assert task.errors == ["miss"]
    assert ns.contains(name) == [True]
    out = bytearray(5000)
    assert ns.get(name, [out]).wait(30) == [True]
    assert out == b"x" * 5000
    assert depot.stats()["tiers"]["Dax"]["corrupt_blocks"] == 0


def deep() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    inner["cache"] = inner
    return inner


def test_settings_without_an_end() -> None:
    assert refusal(kvdepot.open, "Cache", deep()).startswith("ConfigError: ")


def dax(path: Path | str, **options: Any) -> str:
    settings = {"lock_wait": 0, "dax": {"path": str(path), "capacity": "8MiB", **options}}
    return refusal(kvdepot.open, "Dax", settings)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "arena"
    text = dax(missing)
    assert text.startswith("ConfigError: dax.path: ")
    assert str(missing) in text
    assert "existing directory" in text
    text = dax(tmp_path)
    assert text.startswith("ConfigError: dax.path: ")
    assert "a directory" in text
    text = dax("/dev/null")
    assert text.startswith("ConfigError: dax.path: ")
    assert "the subsystem mem" in text
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        text = refusal(kvdepot.open, str(tmp_path / "s"))
    assert f"unix:{tmp_path / 's'} to connect to the server" in text
    text = dax("/proc/version")
    assert text.startswith("ConfigError: dax.path: ")
    assert "virtual file of the kernel" in text
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"")
    assert "symbolic link" in dax(link)


def test_a_directory_that_cannot_be_written() -> None:
    text = dax("/proc/arena")
    assert text.startswith("ConfigError: dax.path: ")
    assert "/proc/arena" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in dax(tmp_path / "arena")


def test_a_file_that_others_may_write(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(8 << 20))
    path.chmod(0o666)
    kvdepot.check("Dax", {"dax": {"path": str(path)}})
    assert path.stat().st_mode & 0o777 == 0o666, "nothing was opened"
    # As at each start of a pod with an fsGroup.
    for mode in (0o666, 0o660):
        path.chmod(mode)
        with kvdepot.open("Dax", {"lock_wait": 0, "dax": {"path": str(path)}}):
            assert path.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    other.write_bytes(b"precious" * (1 << 20))
    other.chmod(0o664)
    assert "the content is not a kvdepot arena" in dax(other)
    assert other.stat().st_mode & 0o777 == 0o664, "what is no arena stays as it is"


def test_a_file_that_is_no_arena(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    content = b"precious" * (1 << 20)
    path.write_bytes(content)
    path.chmod(0o600)
    text = dax(path)
    assert text.startswith("CorruptError: ")
    assert str(path) in text
    assert "format: true" in text
    assert path.read_bytes() == content
    small = tmp_path / "small"
    small.write_bytes(b"x")
    small.chmod(0o600)
    assert dax(small).startswith("CorruptError: ")
    settings = {"dax": {"path": str(path), "format": True}, "socket": "off"}
    with kvdepot.open("Dax", settings) as depot:
        assert depot.recovery["created"]
    # Left in the configuration it does not empty the arena that it has made.
    assert dax(path, format=True).startswith("ConfigError: dax.format: true")
    assert "format: force" in dax(path, format=True)
    settings = {"dax": {"path": str(path), "format": "force"}, "socket": "off"}
    with kvdepot.open("Dax", settings) as depot:
        assert depot.recovery["created"]
    assert dax(path, format="maybe").startswith("ConfigError: dax.format: ")


def test_a_device_smaller_than_its_capacity(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(8 << 20))
    path.chmod(0o600)
    text = dax(path, capacity="16MiB", format=True)
    assert text.startswith("ConfigError: dax.capacity: 16 MiB")
    assert "8 MiB" in text


def test_another_capacity_than_the_arena_has(depots: Any) -> None:
    depots.open("Dax", dax="32MiB").close()
    text = refusal(depots.open, "Dax", dax="16MiB")
    assert text.startswith("ConfigError: dax.capacity: 16 MiB")
    assert "32 MiB" in text


def test_a_full_file_system(depots: Any) -> None:
    text = refusal(depots.open, "Dax", dax="512TiB")
    assert text.startswith("ConfigError: dax.")
    assert "512 TiB" in text or "File too large" in text
    assert not (depots.folder / "arena").exists()


WRONG_KEYS: list[tuple[Any, list[str]]] = [
    ([b"short"], ["keys[0]", "5 bytes", "32 bytes"]),
    ([bytes(32), bytes(33)], ["keys[1]", "33 bytes"]),
    (bytes(33), ["keys", "33 bytes"]),
    (np.zeros((2, 64), np.uint8)[:, ::2], ["keys", "gaps"]),
    # In memory there are bytes of two keys in turn.
    (np.asfortranarray(np.zeros((2, 32), np.uint8)), ["keys", "concatenated keys"]),
    (["x" * 32], ["keys[0]", "xxx", "32 bytes"]),
    ([None], ["keys[0]", "None"]),
    ([7], ["keys[0]", "7"]),
    ("x" * 32, ["keys[0]"]),
    (7, ["keys", "7"]),
    (None, ["keys", "None"]),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_KEYS)
@pytest.mark.parametrize("verb", ["prefix", "contains", "where", "pin", "remove"])
def test_keys(ns: kvdepot.Namespace, verb: str, wrong: Any, words: list[str]) -> None:
    text = refusal(getattr(ns, verb), wrong)
    assert text.startswith("InputError: ")
    for word in words:
        assert word in text


class WrongCapsule:
    """What answers __dlpack__ with something else."""

    def __dlpack__(self, **_options: object) -> object:
        return "capsule"


class NoCapsule:
    """What cannot be exported."""

    def __dlpack__(self, **_options: object) -> object:
        raise RuntimeError("it lives on a GPU")


class Gaps:
    """A tensor that is not contiguous."""

    def __dlpack__(self, **options: Any) -> Any:
        return np.zeros((4, 4), np.uint8)[:, ::2].__dlpack__(**options)


class ReadOnly:
    """A tensor that must not be written."""

    def __init__(self) -> None:
        self.held = np.zeros(10, np.uint8)
        self.held.flags.writeable = False

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ([bytes(10)], ["buffers", "1 buffers for 2 keys", "one buffer per key"]),
        ([bytes(10)] * 3, ["buffers", "3 buffers for 2 keys"]),
        ([bytes(10), b""], ["buffers[1]", "0 bytes"]),
        ([bytes(10), "text"], ["buffers[1]", "str object", "buffer protocol"]),
        ([bytes(10), 7], ["buffers[1]", "int object"]),
        ([bytes(10), None], ["buffers[1]"]),
        ([bytes(10), np.zeros(20, np.uint8)[::2]], ["buffers[1]", "gaps", "contiguous"]),
        ([bytes(10), (0, 10)], ["buffers[1]", "(0, 10)", "pair whose memory starts above 0"]),
        ([bytes(10), (4096, 2**64 - 1)], ["buffers[1]", "ends below 2^64"]),
        ([bytes(10), (4096, 2**34 + 1)], ["buffers[1]", str(2**34 + 1), str(2**34)]),
        ([bytes(10), (4096, -1)], ["buffers[1]", "(4096, -1)"]),
        ([bytes(10), (1, 2, 3)], ["buffers[1]", "(1, 2, 3)"]),
        ([bytes(10), WrongCapsule()], ["buffers[1]", "return a capsule"]),
        ([bytes(10), NoCapsule()], ["buffers[1]", "it lives on a GPU"]),
        ([bytes(10), Gaps()], ["buffers[1]", "gaps"]),
        (b"0123456789", ["buffers[0]", "int object"]),
        (7, ["buffers", "7"]),
        (None, ["buffers", "None"]),
    ],
)
def test_buffers(ns: kvdepot.Namespace, keys: Keys, buffers: Any, words: list[str]) -> None:
    for verb in (ns.put, ns.get):
        text = refusal(verb, keys(2), buffers)
        assert text.startswith("InputError: ")
        for word in words:
            assert word in text


def test_destinations_that_must_not_be_written(ns: kvdepot.Namespace, keys: Keys) -> None:
    fixed = np.zeros(10, np.uint8)
    fixed.flags.writeable = False
    for wrong in (bytes(10), memoryview(bytes(10)), fixed, ReadOnly()):
        text = refusal(ns.get, keys(2), [bytearray(10), wrong])
        assert text.startswith("InputError: buffers[1]: ")
        assert "read-only" in text


def test_destinations_that_overlap(ns: kvdepot.Namespace, keys: Keys) -> None:
    whole = bytearray(100)
    view = memoryview(whole)
    for pair in ([whole, whole], [view[:51], view[50:]], [view[10:20], whole]):
        text = refusal(ns.get, keys(2), pair)
        assert text.startswith("InputError: buffers: ")
        assert "overlap" in text
    assert ns.get(keys(2), [view[:50], view[50:]]).wait(30) == [False, False]
    # Sources may.
    assert all(ns.put(keys(2), [whole, whole]).wait(30))


def test_no_byte_has_moved(ns: kvdepot.Namespace, keys: Keys) -> None:
    names = keys(2)
    refusal(ns.put, names, [b"x"])
    assert ns.contains(names) == [False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ""}, ["model", '""']),
        ({"dtype": ""}, ["dtype", '""']),
        ({"block_tokens": 0}, ["block_tokens", "0"]),
        ({"block_tokens": -1}, ["block_tokens", "-1"]),
        ({"block_tokens": "16"}, ["block_tokens", "'16'"]),
        ({"model": None}, ["model", "None"]),
        ({"layout": 1.5}, ["layout", "1.5"]),
        ({"world": True}, ["world", "True"]),
        ({"world": (1, 2)}, ["world", "(1, 2)"]),
        ({"salt": "\ud800"}, ["salt: (not shown) ", "UTF-8"]),
        ({"salt": ["hunter2"]}, ["salt: (not shown) ", "bytes"]),
    ],
)
def test_fields_of_a_namespace(depot: kvdepot.Depot, change: Any, words: list[str]) -> None:
    given: dict[str, Any] = {"model": "m", "dtype": "f", "block_tokens": 1}
    text = refusal(depot.namespace, **given | change)
    assert text.startswith("InputError: ")
    for word in words:
        assert word in text


def test_required_fields(depot: kvdepot.Depot) -> None:
    with pytest.raises(TypeError, match="block_tokens"):
        depot.namespace("m", "f")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="modell"):
        depot.namespace("m", "f", 1, modell="x")  # type: ignore[call-arg]


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.001])
def test_timeouts(ns: kvdepot.Namespace, depot: kvdepot.Depot, keys: Keys, timeout: float) -> None:
    task = ns.put(keys(1), [b"x"])
    for wait in (task.wait, task.wait_released, depot.drain):
        text = refusal(wait, timeout)
        assert text.startswith("InputError: timeout: ")
    assert task.wait(float("inf")) == [True]
    assert task.wait(1e300) == [True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": 0}, ["InputError: lengths: 0"]),
        ({"lengths": -1}, ["lengths", "-1"]),
        ({"lengths": "x"}, ["lengths[0]", "'x'"]),
        ({"lengths": None}, ["lengths", "None"]),
        ({"lengths": [1]}, ["lengths", "1 numbers for 2 keys"]),
        ({"lengths": [1, -1]}, ["lengths[1]", "-1"]),
        ({"lengths": 2**64 - 1}, ["lengths", str(2**64 - 1), str(2**34)]),
        ({"lengths": 2**34 + 1}, ["lengths", str(2**34)]),
        ({"lengths": 2**64}, ["lengths"]),
        ({"lengths": 10, "parts": 0}, ["parts", "0"]),
        ({"lengths": 10, "parts": -1}, ["parts: -1", "1 to 4096"]),
        ({"lengths": 10, "parts": 10**9}, ["parts"]),
        ({"lengths": 10, "parts": 3}, ["lengths[0]", "10", "multiple of parts = 3"]),
        ({"lengths": 10, "parts": 2, "part_lengths": [10]}, ["part_lengths", "1 numbers"]),
        ({"lengths": 10, "parts": 2, "part_lengths": [5, 4]}, ["lengths[0]", "sum"]),
        ({"lengths": 10, "parts": 2, "part_lengths": [10, 0]}, ["part_lengths: 0"]),
        ({"lengths": 10, "parts": 2, "part_lengths": [2**63, 2**63]}, ["sum"]),
    ],
)
def test_reservations(
    ns: kvdepot.Namespace, keys: Keys, arguments: dict[str, Any], words: list[str]
) -> None:
    text = refusal(ns.reserve, keys(2), **arguments)
    assert text.startswith("InputError: ")
    for word in words:
        assert word in text


def test_numbers_out_of_range(depot: kvdepot.Depot, ns: kvdepot.Namespace) -> None:
    for wrong in (-1, 2**70):
        for text, field in (
            (refusal(depot.removed_blocks, wrong), "limit"),
            (refusal(ns.blocks_page, None, wrong), "limit"),
            (refusal(kvdepot.attach, depot.socket, lanes=wrong), "lanes"),
        ):
            assert text.startswith(f"InputError: {field}: {wrong} is not allowed")
    with kvdepot.attach(depot.socket or "") as mover:
        for verb in (mover.digest, mover.verify, mover.locate):
            assert refusal(verb, [], part=-1).startswith("InputError: part: -1 ")
        for move in (mover.store, mover.load):
            assert refusal(move, [], [], part=-1).startswith("InputError: part: -1 ")


def test_a_capacity_is_rounded_down_to_whole_pages(tmp_path: Path) -> None:
    settings = {"dax": {"path": str(tmp_path / "arena"), "capacity": (16 << 20) + 1234}}
    for _ in range(2):
        with kvdepot.open("Dax", settings) as depot:
            # What the superblocks and the record table leave.
            assert 15 << 20 < depot.stats()["tiers"]["Dax"]["capacity_bytes"] < 16 << 20
