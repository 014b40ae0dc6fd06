"""KV blocks in 8 bits on GPUs: the Triton twins of ``block_codes.encode_blocks`` and ``decode_blocks``.

::

    program (i, j)   vectors [j * ROWS, (j + 1) * ROWS) of the block of pair i; ids and pairs are on the device

Keys of a GPU's cache are rows, so a block is one array of vectors.  Blobs are read and written in device memory: the
mover copies them from and to the host.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.block_codes import BlockForm, Pairs
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE

_ITEMS = 4096  # of a program
# Adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@jit
def _round_up(scales):
    """float32 scales as the bits of bfloat16, in the upper half; see ``block_codes.round_up``."""
    bits = (scales.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    bits = tl.where(scales < _SMALLEST_SCALE, 0, bits)
    return tl.where(scales < float("inf"), bits, 0x7FC00000)  # false for NaN, too


@jit
def _pair(pairs):
    own = pairs + 2 * tl.program_id(0)
    return tl.load(own).to(tl.int64), tl.load(own + 1).to(tl.int64)


@jit
def _vectors(VECTORS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr):
    """The program's vectors, which of them exist, the places of their items, and which of these exist."""
    vector = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH_PAD)
    inside = (vector < VECTORS)[:, None] & (column < WIDTH)[None, :]
    return vector, vector < VECTORS, vector[:, None] * WIDTH + column[None, :], inside


@jit
def encode_kernel(
    pool, codes, scales, pairs,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr, BLOB_BYTES: tl.constexpr,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``pool`` in its own type, ``codes`` in theirs, ``scales`` int16: the last two are the same memory."""
    begin_program(PDL)
    block, place = _pair(pairs)
    vector, is_vector, item, inside = _vectors(VECTORS, WIDTH, WIDTH_PAD, ROWS)
    states = tl.load(pool + block * (VECTORS * WIDTH) + item, mask=inside, other=0.0).to(tl.float32)
    not_finite = tl.sum(states * 0.0, axis=1)
    bits = _round_up(tl.max(tl.abs(states), axis=1) / LARGEST + not_finite)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    values = tl.minimum(tl.maximum(states * inverse[:, None], -LARGEST), LARGEST)
    if IS_INTEGER:
        values = (values + _ROUNDER) - _ROUNDER
    tl.store(codes + place * BLOB_BYTES + item, values.to(codes.dtype.element_ty), mask=inside)
    own_scales = scales + (place * BLOB_BYTES + VECTORS * WIDTH) // 2
    tl.store(own_scales + vector, (bits >> 16).to(tl.int16), mask=is_vector)


@jit
def decode_kernel(
    pool, codes, scales, pairs,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr, BLOB_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The inverse of ``encode_kernel``; ``pairs`` are places and blocks."""
    begin_program(PDL)
    place, block = _pair(pairs)
    vector, is_vector, item, inside = _vectors(VECTORS, WIDTH, WIDTH_PAD, ROWS)
    own_scales = scales + (place * BLOB_BYTES + VECTORS * WIDTH) // 2
    bits = tl.load(own_scales + vector, mask=is_vector, other=0).to(tl.int32) << 16
    values = tl.load(codes + place * BLOB_BYTES + item, mask=inside, other=0.0).to(tl.float32)
    states = values * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(pool + block * (VECTORS * WIDTH) + item, states.to(pool.dtype.element_ty), mask=inside)


def encode_blocks_triton(
    pool: torch.Tensor, blobs: torch.Tensor, pairs: Pairs, form: BlockForm, codes: torch.dtype
) -> None:
    """``encode_blocks``; ``pairs`` may be on the device already, (n, 2) int32."""
    largest = {"LARGEST": LARGEST_VALUE[codes], "IS_INTEGER": codes == torch.int8}
    _launch(encode_kernel, pool, blobs, pairs, form, codes, largest)


def decode_blocks_triton(
    blobs: torch.Tensor, pool: torch.Tensor, pairs: Pairs, form: BlockForm, codes: torch.dtype
) -> None:
    """``decode_blocks``; ``pairs`` may be on the device already, (n, 2) int32."""
    _launch(decode_kernel, pool, blobs, pairs, form, codes, {})


def _launch(
    kernel: Any,
    pool: torch.Tensor,
    blobs: torch.Tensor,
    pairs: Pairs,
    form: BlockForm,
    codes: torch.dtype,
    constants: dict[str, Any],
) -> None:
    assert not form.simd_width and pool.is_contiguous() and blobs.is_contiguous()
    assert pool.shape[1] == form.block_bytes and blobs.shape[1] == form.blob_bytes, (pool.shape, blobs.shape, form)
    if isinstance(pairs, np.ndarray):
        pairs = torch.from_numpy(pairs).to(pool.device)
    width = int(triton.next_power_of_2(form.head_dim))
    rows = max(1, min(_ITEMS // width, int(triton.next_power_of_2(form.num_vectors))))
    kernel[(len(pairs), triton.cdiv(form.num_vectors, rows))](
        pool.view(form.dtype), blobs.view(codes), blobs.view(torch.int16), pairs, VECTORS=form.num_vectors,
        WIDTH=form.head_dim, WIDTH_PAD=width, ROWS=rows, BLOB_BYTES=form.blob_bytes, **constants,
        **dependent_launch(pool.device),
    )  # fmt: skip
