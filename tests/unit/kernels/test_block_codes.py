"""KV blocks in 8 bits: errors, sizes, the order of the native attention, C and Triton against the twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.kernels.kernel_cases_block_codes import CODES, DTYPES, SHAPES, check, form_of, random_pool
from tests.unit.kernels.kernel_cases_layer_ops import with_kernels_of
from tp_engine.cpu import block_codes as native
from tp_engine.cpu.library import native_library
from tp_engine.cpu.paged_attention import in_kernel_order
from tp_engine.kernels.kv_cache.block_codes import BlockForm, decode_blocks, encode_blocks, round_up

PAIRS = np.array([[4, 0], [1, 3], [0, 2]], dtype=np.int32)
BACK = np.ascontiguousarray(PAIRS[:, ::-1])
# Half a step, of the largest element or of the element itself; scales are at most 2^-7 too large.
RELATIVE_ERROR = {torch.int8: 0.5 / 127 * (1 + 2**-7), torch.float8_e4m3fn: 2.0**-4 * (1 + 2**-7)}
needs_c = pytest.mark.skipif(native_library() is None, reason="there are no compiled kernels")


def returned(form: BlockForm, pool: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """``pool`` with the blocks of ``PAIRS`` as they come back."""
    blobs, back = torch.zeros(4, form.blob_bytes, dtype=torch.uint8), torch.zeros_like(pool)
    encode_blocks(pool, blobs, PAIRS, form, codes)
    decode_blocks(blobs, back, BACK, form, codes)
    return back


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_of_an_element(dtype: torch.dtype, codes: torch.dtype) -> None:
    """Oracle: half a step, and the rounding to the pool's type; zeros stay zeros."""
    form = form_of((4, 4, 3, 80), dtype)
    pool = random_pool(form, 5)
    found, given = (form.vectors_of(one)[[4, 1, 0]].float() for one in (returned(form, pool, codes), pool))
    peak = given.abs().amax(-1, keepdim=True)
    reference = peak if codes == torch.int8 else given.abs().clamp(min=2.0**-6 / 448 * peak)
    bound = RELATIVE_ERROR[codes] * reference + torch.finfo(dtype).eps * given.abs() + 1e-6 * peak
    assert bool(((found - given).abs() <= bound).all())
    assert not found[1, 0, 0].any()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_vectors_that_are_not_finite_come_back_as_nan(codes: torch.dtype) -> None:
    """Oracle: the rule; other vectors of the block are as exact as ever."""
    form = form_of((2, 4, 1, 16), torch.float32)
    pool = random_pool(form, 5)
    states = form.vectors_of(pool)
    states[4, 0, 1, 3], states[4, 1, 2, 0] = float("nan"), float("-inf")
    found = form.vectors_of(returned(form, pool, codes))[4]
    is_nan = found.isnan().all(-1)
    assert is_nan.nonzero().tolist() == [[0, 1], [1, 2]]
    assert bool(found[~is_nan].isfinite().all())


def test_scales_are_rounded_up() -> None:
    """Oracle: by hand: 1 is a bfloat16, the next one is 1 + 2^-7; subnormal numbers are 0."""
    given = torch.tensor([1.0, 1.0000001, 1.0078125, 0.0, 1e-40, 2.0**-126, float("inf"), float("nan")])
    found = round_up(given).tolist()
    assert found[:6] == [1.0, 1.0078125, 1.0078125, 0.0, 0.0, 2.0**-126]
    assert all(one != one for one in found[6:])


def test_bytes_of_a_blob() -> None:
    """Oracle: by hand, for B's shape (12 layers, 12 heads of 64) in bfloat16: at least 1.9 blobs in a block."""
    form = form_of((24, 16, 12, 64), torch.bfloat16)
    assert form.block_bytes == 24 * 16 * 12 * 64 * 2 and form.blob_bytes == 24 * 16 * 12 * (64 + 2)
    assert form.block_bytes / form.blob_bytes >= 1.9


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 2, 6), (4, 4, 3, 80), (2, 16, 2, 64), (6, 32, 1, 256)], ids=str)
def test_vectors_in_the_order_of_the_native_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Oracle: ``in_kernel_order`` of the same keys and values; vectors are head by head, and the way back is exact."""
    library = native_library()
    assert library is not None
    num_parts, block_size, heads, head_dim = shape
    form = form_of(shape, dtype, native.simd_width_of(library, block_size))
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(3, num_parts // 2, 2, block_size, heads, head_dim, generator=generator).to(dtype)
    layers = [in_kernel_order(library, states[:, layer].transpose(0, 1)) for layer in range(num_parts // 2)]
    pool = torch.stack(layers).permute(2, 0, 1, 3, 4, 5).reshape(3, -1).contiguous().view(torch.uint8)
    expected = states.transpose(3, 4).reshape(3, num_parts, heads * block_size, head_dim)
    assert torch.equal(form.vectors_of(pool), expected)
    assert torch.equal(form.blocks_of(expected), pool)


@needs_c
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (24, 16, 12, 64)], ids=str)
def test_keys_that_are_columns_in_c(shape: tuple[int, int, int, int], dtype: torch.dtype, codes: torch.dtype) -> None:
    """Oracle: the twin, as for keys that are rows, which ``test_kernel_cases_in_c`` has."""
    library = native_library()
    assert library is not None
    with with_kernels_of("native"):
        check(shape, dtype, codes, "cpu", native.simd_width_of(library, shape[1]))
