"""Memory of tensors: what is kept is what owns the bytes, and a capsule is used once."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Callable
from typing import Any

import forks
import kvdepot
import numpy as np
import pytest
from helpers import needs_torch

pytestmark = pytest.mark.unit

Child = Callable[..., subprocess.Popen[Any]]
Keys = Callable[[int], list[bytes]]

# The task is under way for long enough for its tensor to be given other memory, and for the memory
# that it had to be somebody else's.
SWAPPED = """
    import sys
    import kvdepot
    import torch

    LENGTH = 64 << 20
    swap, *ways = sys.argv[1:]

    def full(value):
        return torch.full((LENGTH,), value, dtype=torch.uint8)

    def buffers(way, tensor):
        at = [(tensor.data_ptr(), LENGTH, LENGTH)]
        return {
            "tensor": lambda: [tensor],
            "spans": lambda: kvdepot.Spans(at, [[0]], tensor),
            "spans of a list": lambda: kvdepot.Spans(at, [[0]], [tensor]),
            "spans of a dict": lambda: kvdepot.Spans(at, [[0]], {"layer": tensor}),
        }[way]()

    def replace(tensor):
        if swap == "data":
            tensor.data = torch.empty(1, dtype=torch.uint8)
        else:
            tensor.set_()

    settings = {"cache": {"capacity": "600MiB"}, "socket": "off", "lanes": 1}
    with kvdepot.open("Cache", settings) as depot:
        ns = depot.namespace("m", "f", 1)
        for turn, way in enumerate(ways * 3):
            key = [bytes([turn % 4] * 32)]
            ns.remove(key)
            tensor = full(7)
            task = ns.put(key, buffers(way, tensor))
            replace(tensor)
            other = full(9)
            assert task.wait(60) == [True]
            out = bytearray(LENGTH)
            assert ns.get(key, [out]).wait(60) == [True]
            assert out.count(7) == LENGTH, f"another tensor's bytes: {way}"
            tensor = full(0)
            task = ns.get(key, buffers(way, tensor))
            replace(tensor)
            others = full(9)
            assert task.wait(60) == [True]
            assert int(others.min()) == 9, f"another tensor was overwritten: {way}"
    print("sound")
"""


@needs_torch
@pytest.mark.parametrize("swap", ["data", "set_"])
def test_a_tensor_given_other_memory_meanwhile_keeps_what_it_had(child: Child, swap: str) -> None:
    ways = ("tensor", "spans", "spans of a list", "spans of a dict")
    process = child(SWAPPED, swap, *ways, python=forks.command())
    out, error = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "sound\n"), error


class Storage:
    """The storage of a tensor, as PyTorch shows it."""

    def __init__(self, held: np.ndarray) -> None:
        self.held = held

    def data_ptr(self) -> int:
        return int(self.held.__array_interface__["data"][0])

    def nbytes(self) -> int:
        return self.held.nbytes


class Tensor:
    """A tensor whose storage is replaced while it is asked for its bytes."""

    def __init__(self) -> None:
        self.held = np.zeros(5000, np.uint8)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.held.__dlpack__(**options)
        self.held = np.zeros(5000, np.uint8)
        return capsule

    def untyped_storage(self) -> Storage:
        return Storage(self.held)


def test_a_tensor_given_other_memory_while_it_is_read_is_refused(
    ns: kvdepot.Namespace, keys: Keys
) -> None:
    with pytest.raises(kvdepot.InputError, match="memory was replaced during the call"):
        ns.put(keys(1), [Tensor()])


class Cached:
    """An exporter that answers one capsule for ever."""

    def __init__(self, length: int, *, versioned: bool) -> None:
        memory = np.full(length, 7, np.uint8)
        self.capsule = memory.__dlpack__(max_version=(1, 0)) if versioned else memory.__dlpack__()

    def __dlpack__(self, **_options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def name_of(capsule: Any) -> str:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return str(name(capsule).decode())


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_is_consumed(ns: kvdepot.Namespace, keys: Keys, versioned: bool) -> None:
    exporter = Cached(5000, versioned=versioned)
    name = keys(1)
    assert ns.put(name, [exporter]).wait(30) == [True]
    assert name_of(exporter.capsule).startswith("used_dltensor")
    with pytest.raises(kvdepot.InputError, match="already used"):
        ns.put(keys(1), [exporter])
    with pytest.raises((BufferError, RuntimeError, ValueError, TypeError)):
        np.from_dlpack(exporter)
    out = bytearray(5000)
    assert ns.get(name, [out]).wait(30) == [True]
    assert out == bytes([7]) * 5000


def test_what_a_capsule_held_is_given_back_once(ns: kvdepot.Namespace, keys: Keys) -> None:
    """By whoever consumed it, and also where a call is refused."""
    deleted = []

    class Managed(ctypes.Structure):
        pass

    deleter_type = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
    Managed._fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", deleter_type),
    ]
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    memory = (ctypes.c_ubyte * 5000)(*([7] * 5000))
    shape = (ctypes.c_int64 * 1)(5000)
    deleter = deleter_type(lambda managed: deleted.append(ctypes.addressof(managed.contents)))

    class Exporter:
        def __init__(self, device: int) -> None:
            self.managed = Managed(
                ctypes.addressof(memory), device, 0, 1, 1, 8, 1, shape, None, 0, None, deleter
            )

        def __dlpack__(self) -> Any:
            return make(ctypes.addressof(self.managed), b"dltensor", None)

    used, unknown = Exporter(1), Exporter(99)
    assert ns.put(keys(1), [used]).wait(30) == [True]
    gc.collect()
    assert deleted == [ctypes.addressof(used.managed)]
    with pytest.raises(kvdepot.InputError, match="device 99"):
        ns.put(keys(1), [unknown])
    with pytest.raises(kvdepot.InputError):
        ns.put(keys(2), [used, "nothing with memory"])
    gc.collect()
    assert deleted[1:] == [ctypes.addressof(unknown.managed), ctypes.addressof(used.managed)]
