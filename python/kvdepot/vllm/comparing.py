"""Compares blocks that vLLM has computed with the blocks that are stored under their names.

vLLM's pages are copied when a comparison begins, so that vLLM may use them again. The stored blocks
are read into memory of this module, and compared by a thread of its own, off the model's path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

import kvdepot
from kvdepot.vllm.compat import (
    AttentionSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from kvdepot.vllm.jobs import Difference

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

# Bytes of copies that are held at once. What needs more is not compared.
HELD_BYTES = 512 << 20
# How long the stored blocks are waited for.
READ_SECONDS = 30.0

# Largest difference of a layer between engines that compute the same: they may add in another
# order. `python -m identity.tolerances` measures it.
TOLERANCES = {
    torch.float32: 0.01,
    torch.float16: 0.1,
    torch.bfloat16: 0.2,
    torch.float8_e4m3fn: 0.2,
    torch.float8_e5m2: 0.2,
}
# A layer of a block differs by what so many of its rows do not exceed: in bfloat16, single rows of
# equal engines differ by half of their norm.
QUANTILE = 0.75
# A row that is smaller than this part of its page's typical row is compared relative to that part:
# its own last digits are noise.
SMALL = 0.25

_NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


class Piece(NamedTuple):
    """Elements of one type in a layer's page of a vLLM block."""

    offset: int
    """In bytes, from the beginning of the page."""
    rows: int
    width: int
    """Elements of a row. In most layouts a row is the key or value of one token and head."""
    dtype: torch.dtype
    tolerance: float

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.rows * self.width * int(self.dtype.itemsize)


class Layer(NamedTuple):
    """A layer's page."""

    name: str
    pieces: Sequence[Piece]


def layers_of(
    groups: Sequence[Any], model_dtype: torch.dtype, cache_dtype: str
) -> list[list[Layer] | None]:
    """For each KV group the layers of its pages; None for a group that has a page of another kind,
    which is not compared. `groups` are vLLM's, and `cache_dtype` is its `--kv-cache-dtype`."""
    found: list[list[Layer] | None] = []
    for group in groups:
        spec = group.kv_cache_spec
        by_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        layers = []
        for name in group.layer_names:
            pieces = _pieces(by_layer.get(name, spec), model_dtype, cache_dtype)
            if pieces is not None:
                layers.append(Layer(name, pieces))
        found.append(layers if len(layers) == len(group.layer_names) else None)
    return found


def _pieces(spec: Any, model_dtype: torch.dtype, cache_dtype: str) -> list[Piece] | None:
    def piece(offset: int, rows: int, width: int, dtype: torch.dtype) -> Piece:
        # What is kept in more digits than it was computed with is no more precise.
        tolerance = max(TOLERANCES[dtype], TOLERANCES.get(model_dtype, 0.0))
        return Piece(offset, rows, width, dtype, tolerance)

    if isinstance(spec, MambaSpec):
        if not TOLERANCES.keys() >= set(spec.dtypes):
            return None
        pieces, offset = [], 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            pieces.append(piece(offset, math.prod(shape[:-1]), shape[-1], dtype))
            offset = pieces[-1].end
        return pieces
    if not isinstance(spec, AttentionSpec):
        return None
    element = _element(spec, cache_dtype)
    width, length = spec.head_size, spec.unpadded_page_size_bytes
    if element is None or element not in TOLERANCES or length % (width * element.itemsize):
        return None
    return [piece(0, length // (width * element.itemsize), width, element)]


def _element(spec: AttentionSpec, cache_dtype: str) -> torch.dtype | None:
    """The type of the page's elements, if it has nothing else in it."""
    if spec.kv_quant_mode == KVQuantMode.NONE:
        return spec.dtype
    named = getattr(spec, "cache_dtype_str", None) or cache_dtype
    if spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR and "mla" not in named:
        return torch.float8_e5m2 if "e5m2" in named else torch.float8_e4m3fn
    return None


Outcome = Difference | bool | None
"""Of a block: how it differs, False if what is stored is corrupt, None if it could not be read."""


class Comparer:
    """Compares the blocks of one rank."""

    def __init__(
        self, caches: CanonicalKVCaches, layers: Sequence[list[Layer] | None], part: int
    ) -> None:
        """`layers` are those of each KV group, and `part` is which part of a block the rank has."""
        self._tensors = [canonical.tensor for canonical in caches.tensors]
        self._refs = caches.group_data_refs
        self._layers = [
            found if found is not None and _fits(found, refs) else None
            for found, refs in zip(layers, self._refs, strict=True)
        ]
        self._part = part
        self._pool: ThreadPoolExecutor | None = None
        self._held: list[tuple[Future[list[Outcome]], int]] = []
        self._copied: list[Any] = []

    def begin(
        self,
        mover: kvdepot.Mover,
        group: int,
        placements: Sequence[bytes],
        blocks: npt.NDArray[np.int64],
    ) -> Future[list[Outcome]]:
        """Compare vLLM's blocks, a row of IDs for each stored block, with the stored ones; outcomes
        of the first of them, as far as there is memory for copies. What vLLM's memory has of them
        is copied before this returns, or on a device before whatever vLLM has it compute next.
        Raises `kvdepot.Error` if the stored blocks cannot be read."""
        layers = self._layers[group]
        lengths = [ref.page_size_bytes for ref in self._refs[group]]
        each = 2 * blocks.shape[1] * sum(lengths)
        # The others are not compared.
        chosen = self._room(each) if layers is not None else 0
        placements, blocks = placements[:chosen], blocks[:chosen]
        if layers is None or not placements:
            done: Future[list[Outcome]] = Future()
            done.set_result([])
            return done
        ids = blocks.reshape(-1)
        size = each * len(placements)
        computed, copied = self._copy(group, ids)
        memory = np.empty((len(ids), sum(lengths)), np.uint8)
        starts = np.cumsum([0, *lengths]).tolist()
        address, stride = memory.ctypes.data, memory.strides[0]
        spans = kvdepot.Spans(
            ranges=[
                (address + start, stride, length)
                for start, length in zip(starts, lengths, strict=False)
            ],
            rows=np.arange(len(ids), dtype=np.int64).reshape(blocks.shape),
            owner=memory,
        )
        read = mover.load(list(placements), spans, part=self._part, background=True)
        stored = [
            memory[:, start : start + length]
            for start, length in zip(starts, lengths, strict=False)
        ]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "kvdepot-compare")
        future = self._pool.submit(_compare, layers, computed, copied, read, stored, blocks.shape)
        self._held.append((future, size))
        return future

    def rest(self) -> None:
        """Wait until nothing of vLLM's memory is read."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()

    def close(self) -> None:
        """Wait for all comparisons to end."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _room(self, size: int) -> int:
        """How many blocks of a size may be copied now."""
        self._held = [(future, held) for future, held in self._held if not future.done()]
        return max(0, HELD_BYTES - sum(held for _, held in self._held)) // size

    def _copy(
        self, group: int, ids: npt.NDArray[np.int64]
    ) -> tuple[list[Any], Callable[[list[Any]], list[Bytes]]]:
        """Copies of vLLM's blocks by layer, and what brings them into this host's memory."""
        refs = self._refs[group]
        if self._tensors[0].device.type == "cpu":
            arrays = [self._tensors[ref.tensor_idx].numpy().view(np.uint8) for ref in refs]
            pairs = zip(arrays, refs, strict=True)
            return [array[ids, : ref.page_size_bytes] for array, ref in pairs], list
        device = self._tensors[0].device
        there = torch.from_numpy(ids).to(device, non_blocking=True)
        copies = [self._tensors[ref.tensor_idx][there, : ref.page_size_bytes] for ref in refs]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._copied = [one for one in self._copied if not one.query()] + [event]

        def bring(copies: list[torch.Tensor]) -> list[Bytes]:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                event.wait()
                return [copy.cpu().numpy().view(np.uint8) for copy in copies]

        return copies, bring


def _fits(layers: Sequence[Layer], refs: Sequence[CanonicalKVCacheRef]) -> bool:
    """Whether each page is one of a layer: vLLM interleaves those of some models."""
    ends = [layer.pieces[-1].end for layer in layers]
    return ends == [ref.page_size_bytes for ref in refs]


def _compare(
    layers: Sequence[Layer],
    computed: list[Any],
    bring: Callable[[list[Any]], list[Bytes]],
    read: kvdepot.MoveJob,
    stored: list[Bytes],
    shape: tuple[int, int],
) -> list[Outcome]:
    """What became of each block."""
    count, pages = shape
    if not read.wait(READ_SECONDS):
        return [None] * count
    ours = bring(computed)
    outcomes: list[Outcome] = []
    pairs = zip(read.results, read.corrupt, strict=True)
    for block, (arrived, corrupt) in enumerate(pairs):
        if not arrived:
            outcomes.append(False if corrupt else None)
            continue
        rows = slice(block * pages, (block + 1) * pages)
        outcomes.append(_difference(layers, [one[rows] for one in ours], [o[rows] for o in stored]))
    return outcomes


def _difference(
    layers: Sequence[Layer], ours: Sequence[Bytes], stored: Sequence[Bytes]
) -> Difference:
    largest, differing = 0.0, {}
    for layer, one, other in zip(layers, ours, stored, strict=True):
        if np.array_equal(one, other):
            continue
        exceeded = False
        found = 0.0
        for piece in layer.pieces:
            of_piece = relative(piece, one, other)
            exceeded |= of_piece > piece.tolerance
            found = max(found, of_piece)
        if exceeded:
            differing[layer.name] = found
        largest = max(largest, found)
    return Difference(largest, differing)


def relative(piece: Piece, ours: Bytes, stored: Bytes) -> float:
    """The relative difference that most rows of a page, or of several, do not exceed."""
    one, other = (_floats(piece, pages) for pages in (ours, stored))
    with np.errstate(all="ignore"):
        # The same on both sides, and no number.
        neither = ((one == other) | (np.isnan(one) & np.isnan(other))) & ~np.isfinite(other)
        one, other = np.where(neither, 0, one), np.where(neither, 0, other)
        norms = np.linalg.norm(other, axis=1)
        differences = np.linalg.norm(one - other, axis=1)
        typical = np.mean(norms[np.isfinite(norms)]) if np.isfinite(norms).any() else 0
        against = np.maximum(norms, SMALL * typical)
        found = np.where((one == other).all(axis=1), 0.0, differences / against)
    # Numbers where the other row has none.
    found = np.where(np.isnan(found), np.inf, found)
    return float(np.quantile(found, QUANTILE, method="higher"))


def _floats(piece: Piece, pages: Bytes) -> Floats:
    cut = np.ascontiguousarray(pages[:, piece.offset : piece.end])
    if piece.dtype in _NUMPY:
        found = cut.view(_NUMPY[piece.dtype])
    elif piece.dtype == torch.bfloat16:
        found = (cut.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        found = _of_bytes(piece.dtype)[cut]
    return found.reshape(-1, piece.width).astype(np.float32, copy=False)


def _of_bytes(dtype: torch.dtype) -> Floats:
    """The number that each byte is."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    return every.to(torch.float32).numpy()
