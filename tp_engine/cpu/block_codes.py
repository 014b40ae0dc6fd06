"""KV blocks in 8 bits by ``block_codes.c``: ``kernels/kv_cache/block_codes.py`` says what the arguments are."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from tp_engine.cpu.layout import DTYPE_CODES, SCALED_CODES, BlockCodes
from tp_engine.kernels.kv_cache.block_codes import BlockForm
from tp_engine.plan import IntArray

_MAX_COLUMN_BYTES = 1024  # of a vector among keys that are columns


def encode_blocks(
    library: ctypes.CDLL, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray, form: BlockForm, codes: torch.dtype
) -> None:
    _check(pool, blobs, pairs, form)
    _run(library.encode_blocks, pool, blobs, pairs, form, codes)


def decode_blocks(
    library: ctypes.CDLL, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray, form: BlockForm, codes: torch.dtype
) -> None:
    _check(pool, blobs, pairs[:, ::-1], form)
    _run(library.decode_blocks, blobs, pool, pairs, form, codes)


def simd_width_of(library: ctypes.CDLL, block_size: int) -> int:
    """``BlockForm.simd_width`` of a cache that ``attention.c`` keeps."""
    return min(int(library.attention_lanes()), block_size)


def _check(pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray, form: BlockForm) -> None:
    """``pairs``: blocks and places in ``blobs``."""
    assert pool.is_contiguous() and pool.shape[1] == form.block_bytes, (pool.shape, form)
    assert blobs.is_contiguous() and blobs.shape[1] == form.blob_bytes, (blobs.shape, form)
    assert pairs.min() >= 0 and pairs[:, 0].max() < len(pool) and pairs[:, 1].max() < len(blobs), pairs
    assert not form.simd_width or form.head_dim * form.dtype.itemsize <= _MAX_COLUMN_BYTES, form


def _run(
    function: Callable[..., object],
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: IntArray,
    form: BlockForm,
    codes: torch.dtype,
) -> None:
    given = BlockCodes(
        num_parts=form.num_parts, part_vectors=form.part_vectors, head_dim=form.head_dim, simd_width=form.simd_width,
        dtype=DTYPE_CODES[form.dtype], codes=SCALED_CODES[codes], num_threads=torch.get_num_threads(),
    )  # fmt: skip
    pairs = np.ascontiguousarray(pairs, dtype=np.int32)
    function(ctypes.byref(given), source, target, pairs.ctypes.data, len(pairs))
