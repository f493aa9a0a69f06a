"""Gets into memory of a CUDA device, with a double of the driver in its place."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

DOUBLE = Path(__file__).parents[2] / "crates/testkit/cuda/double.c"

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
    assert "buffers[0]" in refused(lambda: ns.put(keys[5:], [Array(70_001)]))
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

    assert "given other memory" in refused(lambda: ns.get(keys[:1], [Swapped(70_001)]))
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
        assert int(sys.argv[2]) and "no device is in use" in str(error), error
    else:
        assert not int(sys.argv[2])
    # The framework that made the array.
    double.double_use(1)
    assert ns.get(key, [array]).wait(30) == [True]
    assert bytes(array.host) == block
    assert (double.double_retained(0), double.double_retained(1)) == (0, 1)
"""


def build(folder: Path) -> str:
    library = folder / "libdouble.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(library), str(DOUBLE)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
    return str(library)


def run(library: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVDEPOT_CUDA_LIBRARY": library}
    command = [sys.executable, "-c", ARRAY + script, library, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_blocks_reach_a_device_and_its_failures_are_misses(tmp_path: Path) -> None:
    done = run(build(tmp_path), SCRIPT)
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
