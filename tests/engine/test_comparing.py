"""How blocks that vLLM has computed are compared with stored ones."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from kvdepot.vllm.comparing import TOLERANCES, Bytes, Layer, Piece, layers_of, relative
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

pytestmark = pytest.mark.unit

ROWS, WIDTH = 6, 32
OF_BFLOAT16 = TOLERANCES[torch.bfloat16]


def pages(values: torch.Tensor, dtype: torch.dtype) -> Bytes:
    """One page of these values."""
    found: Bytes = values.to(dtype).contiguous().view(torch.uint8).reshape(1, -1).numpy()
    return found


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_difference_is_relative_to_its_row(dtype: torch.dtype) -> None:
    piece = Piece(0, ROWS, WIDTH, dtype, 0.1)
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    stored = values.to(dtype).float()
    changed = stored.clone()
    changed[:3] *= 2
    assert relative(piece, pages(stored, dtype), pages(stored, dtype)) == 0
    found = relative(piece, pages(changed, dtype), pages(stored, dtype))
    assert found == pytest.approx(1, rel=0.05)
    # Of equal engines a few rows may differ by much.
    changed = stored.clone()
    changed[5] = -changed[5]
    assert relative(piece, pages(changed, dtype), pages(stored, dtype)) == 0
    # A row that is nearly nothing is compared with a part of what the others are.
    stored[:3] /= 4096
    changed = stored.clone()
    changed[:3] = 0
    assert relative(piece, pages(changed, dtype), pages(stored, dtype)) < 0.01


def test_what_is_no_number_on_both_sides_hides_nothing_else() -> None:
    piece = Piece(0, ROWS, WIDTH, torch.float32, 0.1)
    values = torch.ones(ROWS, WIDTH)
    for same in (math.nan, math.inf):
        values[0, 0] = same
        near, far = values.clone(), values.clone()
        near[1:, 1] += 1e-5
        far = torch.where(torch.isfinite(far), -far, far)
        stored = pages(values, torch.float32)
        assert relative(piece, pages(near, torch.float32), stored) < 1e-5
        assert relative(piece, pages(far, torch.float32), stored) == pytest.approx(2)


def test_what_is_no_number_differs_unless_it_is_the_same() -> None:
    piece = Piece(0, ROWS, WIDTH, torch.float32, 0.1)
    values = torch.ones(ROWS, WIDTH)
    broken = values.clone()
    broken[:, 0] = math.nan
    assert relative(piece, pages(broken, torch.float32), pages(values, torch.float32)) == math.inf
    nothing = torch.zeros(ROWS, WIDTH)
    assert relative(piece, pages(values, torch.float32), pages(nothing, torch.float32)) == math.inf
    assert relative(piece, pages(nothing, torch.float32), pages(nothing, torch.float32)) == 0
    assert relative(piece, pages(broken, torch.float32), pages(broken, torch.float32)) == 0


def attention(dtype: torch.dtype, mode: KVQuantMode = KVQuantMode.NONE) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=WIDTH, dtype=dtype, kv_quant_mode=mode
    )


def layers(spec: object, cache_dtype: str = "auto", *names: str) -> list[Layer] | None:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(names or ("layer",)))
    return layers_of([group], torch.bfloat16, cache_dtype)[0]


def test_pages_of_attention_and_of_states_are_known() -> None:
    found = layers(attention(torch.bfloat16))
    assert found == [Layer("layer", [Piece(0, 2 * 16 * 2, WIDTH, torch.bfloat16, OF_BFLOAT16)])]
    fp8 = attention(torch.uint8, KVQuantMode.FP8_PER_TENSOR)
    for cache_dtype, dtype in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        found = layers(fp8, cache_dtype)
        assert found is not None
        assert found[0].pieces[0].dtype is dtype
    states = MambaSpec(
        block_size=16, shapes=((3, 8), (4, 2, 16)), dtypes=(torch.bfloat16, torch.float32)
    )
    found = layers(states)
    assert found is not None
    assert found[0].pieces == [
        Piece(0, 3, 8, torch.bfloat16, OF_BFLOAT16),
        # Computed by layers of bfloat16.
        Piece(3 * 8 * 2, 8, 16, torch.float32, OF_BFLOAT16),
    ]
    assert found[0].pieces[-1].end == states.page_size_bytes
    mixed = UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={"a": attention(torch.float32), "b": attention(torch.float16)},
    )
    found = layers(mixed, "auto", "a", "b")
    assert found is not None
    assert [layer.pieces[0].dtype for layer in found] == [torch.float32, torch.float16]


@pytest.mark.parametrize(
    "mode", [KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.NVFP4, KVQuantMode.TURBOQUANT_4BIT_NC]
)
def test_packed_pages_are_not_compared(mode: KVQuantMode) -> None:
    assert layers(attention(torch.int8, mode), mode.name.lower()) is None
