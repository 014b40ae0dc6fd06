"""RMS norm over all queries of a token, and over all its keys, in two launches: Triton twins of ``heads``.

::

    heads (N, H + 2 KV, head_dim) = [ H queries | KV keys | KV values ]     squares (N, 2): of the queries, of the keys
    squares:  program (i, part)   adds up the squares of one part of token i
    norm:     program (i, j)      BLOCK elements of token i: first programs for the queries, then for the keys
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit

_SUM_BLOCK, _NORM_BLOCK = 2048, 1024


@jit
def head_squares_kernel(
    heads, squares, token_stride,
    QUERY_SIZE: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the sum of squares of one part of one token."""
    begin_program(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.where(part == 0, QUERY_SIZE, KEY_SIZE)
    row = heads + token * token_stride + part * QUERY_SIZE
    column = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        values = tl.load(row + start + column, mask=start + column < size, other=0.0).to(tl.float32)
        sums += values * values
    tl.store(squares + token * 2 + part, tl.sum(sums, axis=0))


@jit
def norm_width_kernel(
    heads, squares, weights, token_stride, eps,
    QUERY_SIZE: tl.constexpr, KEY_SIZE: tl.constexpr, QUERY_WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK elements of one part of one token."""
    begin_program(PDL)
    QUERY_BLOCKS: tl.constexpr = (QUERY_SIZE + BLOCK - 1) // BLOCK
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = (block >= QUERY_BLOCKS).to(tl.int32)
    first = tl.where(part == 0, block * BLOCK, QUERY_SIZE + (block - QUERY_BLOCKS) * BLOCK)
    column = first + tl.arange(0, BLOCK)
    inside = column < tl.where(part == 0, QUERY_SIZE, QUERY_SIZE + KEY_SIZE)
    width = tl.where(part == 0, QUERY_WIDTH, KEY_WIDTH).to(tl.float32)
    scale = tl.rsqrt(tl.load(squares + token * 2 + part) / width + eps)
    place = heads + token * token_stride + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    values *= scale * tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, values.to(heads.dtype.element_ty), mask=inside)


def head_squares_triton(heads: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """``heads.head_squares``; the rows may be slices of wider ones."""
    num_tokens, head_dim = len(heads), heads.shape[2]
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim, (heads.shape, heads.stride())
    squares = torch.empty((num_tokens, 2), dtype=torch.float32, device=heads.device)
    if num_tokens:
        sizes = num_heads * head_dim, num_kv_heads * head_dim
        head_squares_kernel[(num_tokens, 2)](
            heads, squares, heads.stride(0),
            QUERY_SIZE=sizes[0], KEY_SIZE=sizes[1], BLOCK=min(int(triton.next_power_of_2(max(sizes))), _SUM_BLOCK),
            **dependent_launch(heads.device),
        )  # fmt: skip
    return squares


def norm_width_triton(
    heads: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    squares: torch.Tensor,
    weights: torch.Tensor,
    widths: tuple[int, int],
    eps: float,
) -> None:
    """``heads.norm_width``, in place; the rows may be slices of wider ones."""
    num_tokens, head_dim = len(heads), heads.shape[2]
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim, (heads.shape, heads.stride())
    assert weights.shape == (num_heads + num_kv_heads, head_dim) and weights.is_contiguous(), weights.shape
    assert squares.shape == (num_tokens, 2) and squares.is_contiguous(), squares.shape
    if num_tokens:
        sizes = num_heads * head_dim, num_kv_heads * head_dim
        block = min(int(triton.next_power_of_2(max(sizes))), _NORM_BLOCK)
        norm_width_kernel[(num_tokens, triton.cdiv(sizes[0], block) + triton.cdiv(sizes[1], block))](
            heads, squares, weights, heads.stride(0), eps,
            QUERY_SIZE=sizes[0], KEY_SIZE=sizes[1], QUERY_WIDTH=widths[0], KEY_WIDTH=widths[1], BLOCK=block,
            **dependent_launch(heads.device),
        )  # fmt: skip
