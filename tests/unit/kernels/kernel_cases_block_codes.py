"""Blocks in 8 bits by kernels: cases on a device against the PyTorch twin, and the engine's launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tests.unit.kernels.kernel_cases_layer_ops import both
from tp_engine.kernels.kv_cache.block_codes import BlockForm, decode_blocks, encode_blocks
from tp_engine.kernels.kv_cache.block_codes_triton import decode_blocks_triton, encode_blocks_triton

CODES = (torch.int8, torch.float8_e4m3fn)
# Parts, block size, KV heads, head_dim.
SHAPES = ((2, 1, 1, 6), (4, 4, 3, 80), (2, 16, 2, 128), (6, 8, 1, 256))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def form_of(shape: tuple[int, int, int, int], dtype: torch.dtype, simd_width: int = 0) -> BlockForm:
    """A form by the numbers of ``SHAPES``."""
    num_parts, block_size, num_kv_heads, head_dim = shape
    return BlockForm(
        num_parts=num_parts,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        simd_width=simd_width,
    )


def random_pool(form: BlockForm, num_blocks: int, device: str = "cpu") -> torch.Tensor:
    """Blocks (num_blocks, block_bytes): vectors of several magnitudes, zeros, and one with an infinite element."""
    generator = torch.Generator().manual_seed(form.head_dim)
    states = torch.randn(num_blocks, form.num_vectors, form.head_dim, generator=generator)
    states *= torch.logspace(-3, 3, form.num_vectors).view(-1, 1)
    states[1, 0] = 0
    states[2, -1, 0] = float("inf")
    return states.to(form.dtype).view(num_blocks, -1).view(torch.uint8).to(device)


def same_but_for_ties(found: torch.Tensor, expected: torch.Tensor, form: BlockForm, codes: torch.dtype) -> None:
    """Scales are equal, and codes too but for a few that lie between two numbers; bytes of ``blobs`` on a CPU."""
    values, wanted = (blobs[:, : form.code_bytes].contiguous().view(codes).float() for blobs in (found, expected))
    scales, others = (
        blobs[:, form.code_bytes :].contiguous().view(torch.bfloat16).float() for blobs in (found, expected)
    )
    torch.testing.assert_close(scales, others, rtol=0, atol=0, equal_nan=True)
    is_finite = others.isfinite().view(len(others), -1, 1).expand(-1, -1, form.head_dim).reshape(values.shape)
    values, wanted = values[is_finite], wanted[is_finite]
    torch.testing.assert_close(values, wanted, rtol=1 / 8, atol=1 if codes == torch.int8 else 2**-9)
    assert int((values != wanted).sum()) <= wanted.numel() / 100


def check(
    shape: tuple[int, int, int, int], dtype: torch.dtype, codes: torch.dtype, device: str, simd_width: int = 0
) -> None:
    """Oracle: the twin; places that no pair names keep their bytes."""
    form = form_of(shape, dtype, simd_width)
    encode, decode = both("encode_blocks")[0], both("decode_blocks")[0]
    pool, pairs = random_pool(form, 5, device), np.array([[4, 0], [1, 3], [2, 2]], dtype=np.int32)
    found, expected = (torch.full((4, form.blob_bytes), 7, dtype=torch.uint8, device=device) for _ in range(2))
    encode(pool, found, pairs, form, codes)
    encode_blocks(pool, expected, pairs, form, codes)
    same_but_for_ties(found[[0, 3, 2]].cpu(), expected[[0, 3, 2]].cpu(), form, codes)
    assert bool((found[1] == 7).all())
    back, pools = np.ascontiguousarray(pairs[:, ::-1]), [torch.zeros_like(pool) for _ in range(2)]
    decode(expected, pools[0], back, form, codes)
    decode_blocks(expected, pools[1], back, form, codes)
    own, twin = (one.cpu().view(form.dtype).float() for one in pools)
    torch.testing.assert_close(own, twin, rtol=0, atol=0, equal_nan=True)


CASES: dict[str, Callable[[str], None]] = {
    f"{shape} {dtype} {codes}": partial(check, shape, dtype, codes)
    for shape, dtype, codes in itertools.product(SHAPES, DTYPES, CODES)
}


def launch_all(capability: int) -> None:
    """Shapes of released models."""
    shapes = ((72, 16, 8, 128), (160, 16, 1, 64), (48, 32, 2, 256))
    for (shape, dtype), codes in itertools.product(zip(shapes, DTYPES, strict=True), CODES):
        if codes != torch.int8 and capability < 89:
            continue
        form = form_of(shape, dtype)
        pool, blobs = (
            torch.empty(9, size, dtype=torch.uint8, device="meta") for size in (form.block_bytes, form.blob_bytes)
        )
        pairs = torch.empty(3, 2, dtype=torch.int32, device="meta")
        encode_blocks_triton(pool, blobs, pairs, form, codes)
        decode_blocks_triton(blobs, pool, pairs, form, codes)
