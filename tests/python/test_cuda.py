"""Memory of a CUDA device, there and back, with a double of the driver in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_double import build

pytestmark = pytest.mark.unit

ARRAY = '''
import ctypes, sys
import kvdepot

DEVICE_BIT = 1 << 56
SECOND_BIT = 1 << 57


class Array:
    """Device memory, as PyTorch and CuPy describe theirs."""

    def __init__(self, length, second=False, **changes):
        self.host = (ctypes.c_ubyte * length)()
        addr = ctypes.addressof(self.host) | DEVICE_BIT | (SECOND_BIT if second else 0)
        self.__cuda_array_interface__ = {
            "data": (addr, False), "shape": (length,), "typestr": "|u1", "version": 3, **changes,
        }


'''

SCRIPT = '''
def refused(call):
    try:
        call()
    except kvdepot.InputError as error:
        return str(error)
    raise AssertionError("accepted")


settings = {"cache": {"capacity": "32MiB"}, "socket": "off", "lanes": 2}
with kvdepot.open("Cache", settings) as depot:
    ns = depot.namespace(model="m", dtype="float32", block_tokens=16)
    keys = [bytes([number]) * 32 for number in range(6)]
    blocks = [bytes((number * 5 + at) % 251 for at in range(70_001)) for number in range(6)]
    assert all(ns.put(keys[:5], blocks[:5]).wait(30))
    arrays = [Array(70_001) for _ in keys]
    assert ns.get(keys, arrays).wait(30) == [True] * 5 + [False]
    assert [bytes(array.host) for array in arrays[:5]] == blocks[:5]

    fail = ctypes.CDLL(sys.argv[1]).double_fail_copy
    fail.argtypes = [ctypes.c_long]
    fail(1)
    task = ns.get(keys[:1], [Array(70_001)])
    assert task.wait(30) == [False] and task.errors == ["miss"], task.errors
    fail(0)
    assert ns.contains(keys[:1]) == [True], "the block is not to blame"
    assert ns.get(keys[:1], [Array(70_001)]).wait(30) == [True]

    mixed = refused(lambda: ns.get(keys[:2], [Array(70_001), bytearray(70_001)]))
    assert "buffers[1]" in mixed, mixed
    assert "buffers[1]" in refused(lambda: ns.put(keys[4:], [Array(70_001), bytes(70_001)]))
    gaps = refused(lambda: ns.get(keys[:1], [Array(70_001, strides=(2,))]))
    assert "gaps" in gaps, gaps

    class Swapped(Array):
        """A tensor whose storage is another one by now."""

        def untyped_storage(self):
            return self

        def data_ptr(self):
            return 4096

        def nbytes(self):
            return 4096

    assert "memory was replaced" in refused(lambda: ns.get(keys[:1], [Swapped(70_001)]))
    fixed = Array(70_001)
    fixed.__cuda_array_interface__["data"] = (ctypes.addressof(fixed.host) | DEVICE_BIT, True)
    assert "read-only" in refused(lambda: ns.get(keys[:1], [fixed]))
'''


SECOND = """
double = ctypes.CDLL(sys.argv[1])
for function in ("double_need_context", "double_use", "double_retained"):
    getattr(double, function).argtypes = [ctypes.c_long]
settings = {"cache": {"capacity": "32MiB"}, "socket": "off", "lanes": 2}
with kvdepot.open("Cache", settings) as depot:
    ns = depot.namespace(model="m", dtype="float32", block_tokens=16)
    key, block = [bytes(32)], bytes(range(250)) * 40
    assert ns.put(key, [block]).wait(30) == [True]
    double.double_need_context(int(sys.argv[2]))
    array = Array(len(block), second=True)
    try:
        ns.get(key, [array])
    except kvdepot.InputError as error:
        assert int(sys.argv[2]) and "no CUDA device is in use" in str(error), error
    else:
        assert not int(sys.argv[2])
    # The framework that made the array.
    double.double_use(1)
    assert ns.get(key, [array]).wait(30) == [True]
    assert bytes(array.host) == block
    assert (double.double_retained(0), double.double_retained(1)) == (0, 1)
"""


# Blocks of pages anywhere on the device, in tiers of all kinds: there and back.
PAGED = """
pipelines = {
    "Cache": {"cache": {"capacity": "64MiB"}},
    "Dax": {"dax": {"path": sys.argv[2] + "/dax", "capacity": "64MiB"}},
    "Nvme": {"nvme": {"path": sys.argv[2] + "/nvme", "capacity": "64MiB"}},
    "Posix": {"posix": {"path": sys.argv[2] + "/posix", "capacity": "64MiB"}},
    "Cache|Posix": {
        "cache": {"capacity": "8MiB"},
        "posix": {"path": sys.argv[2] + "/behind", "capacity": "64MiB"},
    },
}
LAYERS, PAGES, PAGE = 3, 64, 5000
rng = __import__("random").Random(7)
double = ctypes.CDLL(sys.argv[1])
double.double_busy_stream.restype = ctypes.c_int64
double.double_release.argtypes = [ctypes.c_int64]


def caches():
    return [(ctypes.c_ubyte * (PAGES * PAGE)).from_buffer(bytearray(rng.randbytes(PAGES * PAGE)))
            for _ in range(LAYERS)]


def spans(hosts, rows, **more):
    ranges = [(ctypes.addressof(host) | DEVICE_BIT, PAGE, PAGE) for host in hosts]
    owner = type("Owner", (), {"hosts": hosts})()
    return kvdepot.Spans(ranges, rows, owner=owner, device=0, **more)


def page(host, number):
    return bytes(host)[number * PAGE : (number + 1) * PAGE]


for pipeline, settings in pipelines.items():
    with kvdepot.open(pipeline, settings | {"socket": "off", "lanes": 2}) as depot:
        ns = depot.namespace(model="m", dtype="uint8", block_tokens=16)
        order = rng.sample(range(PAGES), 32)
        rows = [order[at : at + 4] for at in range(0, 32, 4)]
        keys = [bytes([number]) * 32 for number in range(8)]
        source, target = caches(), caches()
        before = [bytes(host) for host in target]
        assert all(ns.put(keys, spans(source, rows, stream=0)).wait(60)), pipeline
        # Into other pages, and of the first block not all of them.
        other = rng.sample(range(PAGES), 32)
        into = [other[at : at + 4] for at in range(0, 32, 4)]
        into[0][1] = into[0][3] = -1
        assert all(ns.get(keys, spans(target, into, stream=0)).wait(60)), pipeline
        written = {page for row in into for page in row}
        for layer in range(LAYERS):
            for there, here in zip(rows, into):
                for one, two in zip(there, here):
                    if two >= 0:
                        assert page(target[layer], two) == page(source[layer], one), pipeline
            for number in set(range(PAGES)) - written:
                at = number * PAGE
                assert bytes(target[layer])[at : at + PAGE] == before[layer][at : at + PAGE]
        # Host memory has the same block.
        plain = bytearray(LAYERS * 4 * PAGE)
        assert ns.get(keys[1:2], [plain]).wait(60) == [True]
        pages = [page(source[layer], one) for layer in range(LAYERS) for one in rows[1]]
        assert bytes(plain) == b"".join(pages), pipeline

        busy = double.double_busy_stream()
        ns.remove(keys)
        put = ns.put(keys, spans(source, rows, stream=busy))
        try:
            put.wait(0.2)
            raise AssertionError("the stream computes still")
        except kvdepot.TimeoutError:
            pass
        ctypes.memset(source[0], 9, PAGES * PAGE)
        double.double_release(busy)
        assert all(put.wait(60)), pipeline
        assert all(ns.get(keys[1:], spans(target, rows[1:])).wait(60)), pipeline
        assert page(target[0], rows[1][0]) == bytes([9]) * PAGE, pipeline

        host = [(ctypes.addressof(source[0]), PAGE, PAGE)]
        assert "stream" in refused(lambda: kvdepot.Spans(host, [[0]], stream=3))
        array = memoryview(bytearray(2 * PAGE)).cast("B", (2, PAGE))
        nobody = kvdepot.Spans([(1 << 20, PAGE, PAGE)], [[0]], device=7)
        none = refused(lambda: ns.get(keys[:1], nobody))
        assert none.startswith("device: 7 is not allowed; allowed: 0 to 1"), none
        large = refused(lambda: kvdepot.Spans([array], [[0]], device=1 << 40))
        assert large.startswith("device: 1099511627776 is not allowed"), large
        below = refused(lambda: kvdepot.Spans([array], [[0]], stream=-1))
        assert below.startswith("stream: -1 is not allowed"), below
        assert "ranges[0]" in refused(lambda: kvdepot.Spans([array], [[0]], device=0))
        assert "ids of 0 or more" in refused(lambda: ns.put(keys[:1], spans(source, [[-1, 2]])))
"""

# Two hosts, each of which has some of the blocks: by calls, and by a worker's mover.
PEERS = """
import socket

LAYERS, PAGES, PAGE, BLOCKS = 3, 64, 5000, 16
listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
ports = [listener.getsockname()[1] for listener in listeners]
hosts = ", ".join(f"{name} 127.0.0.1:{port} 32MiB" for name, port in zip("ab", ports))
for listener in listeners:
    listener.close()


def opened(name):
    peer = {"name": name, "token": "shared", "hosts": hosts, "capacity": "32MiB"}
    return kvdepot.open("Peer", {"peer": peer, "lanes": 2, "socket": f"{sys.argv[2]}/{name}"})


def spans(host, rows):
    ranges = [(ctypes.addressof(host) + layer * PAGES * PAGE | DEVICE_BIT, PAGE, PAGE)
              for layer in range(LAYERS)]
    owner = type("Owner", (), {"host": host})()
    return kvdepot.Spans(ranges, rows, owner=owner, device=0, stream=0)


def caches(fill=None):
    size = LAYERS * PAGES * PAGE
    content = __import__("random").Random(3).randbytes(size) if fill is None else fill * size
    return (ctypes.c_ubyte * size).from_buffer(bytearray(content))


rows = [[4 * block + page for page in range(4)] for block in range(BLOCKS)]
keys = [bytes([7 * block, block]) * 16 for block in range(BLOCKS)]
with opened("a") as one, opened("b") as two:
    spaces = [depot.namespace(model="m", dtype="uint8", block_tokens=16) for depot in (one, two)]
    source = caches()
    assert all(spaces[0].put(keys, spans(source, rows)).wait(60))
    for depot, space in zip((one, two), spaces):
        target = caches(b"e")
        assert all(space.get(keys, spans(target, rows)).wait(60))
        assert bytes(target) == bytes(source)
        target = caches(b"e")
        with kvdepot.attach(depot.socket) as mover:
            pins = space.pin(keys)
            places = [pin.placement for pin in pins]
            job = mover.load(places, spans(target, rows), background=True)
            assert job.wait(60) and job.whole and not any(job.corrupt), job.error
            space.unpin(pins)
        assert bytes(target) == bytes(source)
    held = [depot.stats()["tiers"]["Peer"]["blocks"] for depot in (one, two)]
    assert min(held) > 0, f"{held} blocks: each host has some"
"""


def run(library: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVDEPOT_CUDA_LIBRARY": library}
    command = [sys.executable, "-c", ARRAY + script, library, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_blocks_reach_a_device_and_its_failures_are_misses(tmp_path: Path) -> None:
    done = run(build(tmp_path), SCRIPT)
    assert done.returncode == 0, done.stderr


def test_pages_of_a_device_go_into_every_tier_and_come_back(tmp_path: Path) -> None:
    (tmp_path / "posix").mkdir()
    refused = SCRIPT[: SCRIPT.index("settings =")]
    done = run(build(tmp_path), refused + PAGED, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_pages_of_a_device_go_to_another_host_and_come_from_it(tmp_path: Path) -> None:
    done = run(build(tmp_path), PEERS, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("need_context", ["0", "1"])
def test_no_other_device_is_touched_than_the_arrays(tmp_path: Path, need_context: str) -> None:
    done = run(build(tmp_path), SECOND, need_context)
    assert done.returncode == 0, done.stderr


def test_without_a_driver_a_device_array_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.so")
    done = run(missing, SCRIPT)
    assert done.returncode == 1
    assert "buffers[0]" in done.stderr, done.stderr
    assert missing in done.stderr, done.stderr


def test_the_benchmark_measures_the_double_and_refuses_what_leaves_nothing_to_measure(
    tmp_path: Path,
) -> None:
    library = build(tmp_path)

    def bench(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvdepot", "bench", "cuda", "--json", *options]
        double = {"KVDEPOT_CUDA_LIBRARY": library, "KVDEPOT_CUDA_DOUBLE": "instant"}
        return subprocess.run(
            command, env={**os.environ, **double}, capture_output=True, text=True, timeout=120
        )

    small = ["--block", "64KiB", "--size", "16MiB", "--rounds", "1"]
    # A socket is in it, whose path is bounded.
    small += ["--dir", os.environ["XDG_RUNTIME_DIR"]]
    done = bench("--metric", "get", "--metric", "put", *small)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["metric"] for row in rows} == {"get", "put"}
    assert {row["case"]["pages"] for row in rows} == {1, 16}
    assert all(row["case"]["where"] == "double" and row["value"] > 0 for row in rows)

    nothing = bench("--block", "16KiB", "--pages", "1000000")
    assert nothing.returncode != 0
    assert "--pages: 1000000 is not allowed" in nothing.stderr, nothing.stderr
    nobody = bench("--device", "7")
    assert nobody.returncode != 0
    assert "device: 7 is not allowed; allowed: 0 to 1" in nobody.stderr, nobody.stderr
