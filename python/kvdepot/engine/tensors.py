"""Sums over the bytes of tensors, computed on the device that holds them.

Two models whose tensors have equal sums have equal weights: a sum is two numbers of 64 bits, which
depend on the value and the position of every byte. It tells changes that happen apart, not those of
an attacker who chooses weights to collide.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Of each tensor in a sample.
SAMPLED_VALUES = 64

# In 64-bit words: the coefficients of one chunk stay in a processor's cache.
CHUNK = 1 << 16
# An accelerator gets more work at a time.
CHUNKS_ON_A_DEVICE = 32

SEEDS = (1, 1 << 40)
MULTIPLIER = 6364136223846793005
MASK = (1 << 64) - 1
LOW = (1 << 32) - 1


def named_tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module by name, in the order of their names.

    A tensor that keeps its bytes in tensors of its own (quantized formats) is replaced by those.
    """
    found = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(found, key=lambda pair: pair[0]):
        yield from _inner(name, tensor)


def sum_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The sum over tensors, their names, shapes and types, in hexadecimal digits.

    None if a tensor has no bytes at present: on the `meta` device.
    """
    described: list[tuple[tuple[Any, ...], ...]] = []
    parts: dict[tuple[Any, ...], _Part] = {}
    for name, tensor in tensors:
        if tensor.device.type == "meta":
            return None
        # Tied weights are one tensor under two names.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in parts:
            parts[place] = _part(tensor)
        described.append((place, (name, tuple(tensor.shape), str(tensor.dtype))))
    known = dict(zip(parts, _sums(list(parts.values())), strict=True))
    digest = hashlib.sha256()
    for place, about in described:
        digest.update(repr((*about, known[place])).encode())
    return digest.hexdigest()


def sample_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Some values of each tensor, always of the same places."""
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.permute(_order(tensor)).is_contiguous():
            # To put all its values in a row would copy them.
            tensor = tensor[:: max(1, len(tensor) // SAMPLED_VALUES)][:SAMPLED_VALUES]
        flat = _flat(tensor)
        step = max(1, flat.numel() // SAMPLED_VALUES)
        some = flat[::step][:SAMPLED_VALUES].contiguous().view(torch.uint8)
        samples.setdefault(tensor.device, []).append(some)
    return b"".join(torch.cat(each).cpu().numpy().tobytes() for each in samples.values())


def _inner(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parts: dict[Any, torch.Tensor] | None = getattr(tensor, "partitions", None)
    if is_traceable_wrapper_subclass(tensor):
        parts = {
            attribute: getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0]
        }
    if not isinstance(parts, dict):
        yield name, tensor
        return
    for part, inner in parts.items():
        yield from _inner(f"{name}.{part}", inner)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All values in the order in which they are in memory, so that a large transposed tensor is not
    copied."""
    return tensor.detach().permute(_order(tensor)).reshape(-1)


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions as they are in memory, from the outermost."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))


class _Part(NamedTuple):
    """One tensor's contribution to a sum."""

    fixed: tuple[int, ...]
    """The order of the dimensions in memory, and the size in bytes."""
    chunks: list[torch.Tensor]
    """For each seed, one number of 64 bits per chunk. They are still on the tensor's device: each
    copy to the processor would wait for all work before it."""


def _part(tensor: torch.Tensor) -> _Part:
    flat = _flat(tensor).contiguous().view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    size, whole = flat.numel(), flat.numel() // (8 * CHUNK) * 8 * CHUNK
    batch = 8 * CHUNK * (1 if flat.device.type == "cpu" else CHUNKS_ON_A_DEVICE)
    pieces = [flat[first : min(first + batch, whole)] for first in range(0, whole, batch)]
    if whole < size:
        pieces.append(torch.nn.functional.pad(flat[whole:], (0, -size % 8)))
    chunks: list[list[torch.Tensor]] = [[] for _ in SEEDS]
    for piece in pieces:
        words = piece.view(torch.int64)
        words = words.view(-1, min(CHUNK, words.numel()))
        # A change in a word's upper bytes alone is one in the lower bytes too.
        words = words ^ ((words >> 32) & LOW)
        for found, seed in zip(chunks, SEEDS, strict=True):
            coefficients = _coefficients(flat.device, seed)[: words.shape[1]]
            found.append((words * coefficients).sum(dim=1))
    nothing = torch.empty(0, dtype=torch.int64, device=flat.device)
    return _Part((*_order(tensor), size), [torch.cat([nothing, *found]) for found in chunks])


def _sums(parts: list[_Part]) -> Iterator[tuple[int, ...]]:
    """Of each part what is fixed, and one sum modulo 2**64 for each seed."""
    chunks: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        chunks.setdefault(part.chunks[0].device, []).extend(part.chunks)
    values = {device: iter(torch.cat(each).tolist()) for device, each in chunks.items()}
    for part in parts:
        sums = []
        for found in part.chunks:
            total = 0
            for chunk in itertools.islice(values[found.device], found.numel()):
                total = (total * MULTIPLIER + chunk) & MASK
            sums.append(total)
        yield (*part.fixed, *sums)


@functools.cache
def _coefficients(device: torch.device, seed: int) -> torch.Tensor:
    """Odd numbers that look random: what multiplies each word of a chunk."""
    mixed = torch.arange(seed, seed + CHUNK, dtype=torch.int64)
    mixed = mixed * 0x5851F42D4C957F2D + 0x14057B7EF767814F
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    return ((mixed ^ (mixed >> 32)) | 1).to(device)
