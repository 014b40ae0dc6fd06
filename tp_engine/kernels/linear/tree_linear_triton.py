"""A linear layer whose rows do not depend on each other in any bit, and whose sums over shards are a tree.

::

    program (rows, outputs)      BLOCK_M rows times BLOCK_N outputs; the tile is the same for any number of rows
    shard of the columns         a float32 sum of its own, BLOCK_K columns at a time
    tree over shards             ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), as ``tree_sum.tree_linear``, its twin

Libraries choose tiles and splits of the columns by the number of rows, so a row's last bits depend on the batch.  The
tree is that of TBIK (https://arxiv.org/abs/2511.17826).  The sizes of the tile have not been measured yet.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.model_config.tp_invariant import NUM_SHARDS

_BLOCK_M, _BLOCK_N, _BLOCK_K = 64, 64, 64


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
@no_type_check
def tree_linear_kernel(
    x, weight, bias, out, num_rows, x_stride,
    OUT: tl.constexpr, IN: tl.constexpr, NUM_SHARDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``out`` (num_rows, OUT); a bias is added to the sum of the first shard."""
    begin_program(PDL)
    size: tl.constexpr = IN // NUM_SHARDS
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < OUT
    item = tl.arange(0, BLOCK_K)
    row_place = x + row[:, None] * x_stride
    output_place = weight + output.to(tl.int64)[None, :] * IN
    # The sums of the last even shard, and of the pair and the half before, which wait for their partners.
    single = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    pair, half, total = single, single, single
    for shard in range(NUM_SHARDS):
        own = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, size, BLOCK_K):
            is_item = start + item < size
            column = shard * size + start + item
            rows = tl.load(row_place + column[None, :], mask=is_row[:, None] & is_item[None, :], other=0.0)
            parts = tl.load(output_place + column[:, None], mask=is_item[:, None] & is_output[None, :], other=0.0)
            own = tl.dot(rows, parts, own, input_precision="ieee")
        if HAS_BIAS:
            first = shard == 0
            own += tl.load(bias + output, mask=is_output & first, other=0.0).to(tl.float32)[None, :]
        of_pair = single + own
        of_half = pair + of_pair
        total = tl.where(shard % 2 == 0, own, tl.where(shard % 4 == 1, of_pair, of_half))
        total = tl.where(shard == 7, half + of_half, total)
        single = tl.where(shard % 2 == 0, own, single)
        pair = tl.where(shard % 4 == 1, of_pair, pair)
        half = tl.where(shard == 3, of_half, half)
    mask = is_row[:, None] & is_output[None, :]
    tl.store(out + row[:, None] * OUT + output[None, :], total.to(out.dtype.element_ty), mask=mask)


def tree_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_shards: int, *, keeps_sums: bool
) -> torch.Tensor:
    """``tree_sum.tree_linear``; ``num_shards`` is a power of two up to ``NUM_SHARDS`` that divides the columns."""
    (num_rows, size), num_out = x.shape, len(weight)
    assert weight.is_contiguous() and weight.shape[1] == size and x.stride(1) == 1, (x.shape, weight.shape)
    assert num_shards in (1, 2, 4, NUM_SHARDS) and size % num_shards == 0, (size, num_shards)
    out = torch.empty((num_rows, num_out), dtype=torch.float32 if keeps_sums else x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tree_linear_kernel[(triton.cdiv(num_rows, _BLOCK_M), triton.cdiv(num_out, _BLOCK_N))](
        x, weight, bias, out, num_rows, x.stride(0),
        OUT=num_out, IN=size, NUM_SHARDS=num_shards, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
        HAS_BIAS=bias is not None, **dependent_launch(x.device),
    )  # fmt: skip
    return out
