"""Grouped products of rows in blocks with experts in blocks, by units that multiply codes and scales.

The twin of ``products_triton`` for codes on both sides; sums are those of a dense product (``block_linear_triton``).
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.experts.sort_triton import PairOrder
from tp_engine.kernels.experts.tiles import Tiles
from tp_engine.kernels.quantization.block_linear_triton import block_sums
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS
from tp_engine.kernels.quantization.row_codes import PRODUCT_DTYPE
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows as ``encode_rows`` returns them."""

    codes: torch.Tensor
    scales: torch.Tensor


@triton.jit(do_not_specialize=["num_pairs"])
@no_type_check
def grouped_block_kernel(
    x, x_scales, codes, scales, factors, given, bias, out, sorted_pairs, block_experts, num_pairs,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, PER_BYTE: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    HAS_FACTORS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of the pairs of one block, as in ``grouped_kernel``."""
    begin_program(PDL)
    block = tl.program_id(0)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pair < num_pairs
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    parts: tl.constexpr = 2 if GATED else 1
    groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    first = expert * parts * OUT
    own, own_scales = codes + first * (IN // PER_BYTE), scales + first * groups
    row = pair // PAIRS_PER_ROW
    sums = block_sums(
        x, x_scales, own, own_scales, row, is_pair, column, inside, IN, GROUP, PER_BYTE, BLOCK_N, BLOCK_M, BLOCK_BYTES
    )
    whole = 1.0
    if HAS_SCALE:
        whole = tl.load(given + expert)
        sums *= whole
    if HAS_FACTORS:
        sums *= tl.load(factors + first + column, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + first + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up_sums = block_sums(
            x, x_scales, own, own_scales, row, is_pair, column + OUT, inside, IN, GROUP, PER_BYTE, BLOCK_N, BLOCK_M,
            BLOCK_BYTES,
        )  # fmt: skip
        up_sums *= whole
        if HAS_FACTORS:
            up_sums *= tl.load(factors + first + OUT + column, mask=inside, other=0.0)[:, None]
        if HAS_BIAS:
            up_sums += tl.load(bias + first + OUT + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        sums = squared_relu(sums)
    place = out + pair[None, :] * OUT + column[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside[:, None] & is_pair[None, :])


def multiply_block_pairs(
    x: BlockRows,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    order: PairOrder,
    tiles: Tiles,
    *,
    pairs_per_row: int = 1,
    activation: Activation | None = None,
) -> torch.Tensor:
    """``multiply_pairs`` of rows in blocks; ``tiles.block_k`` are bytes of codes, results are bfloat16."""
    assert weight.rows is not None and weight.scales is not None
    size, form = weight.shape[1] // (1 if activation is None else activation.num_parts), BLOCK_FORMATS[weight.rows.kind]
    out = torch.empty((order.num_pairs, size), dtype=PRODUCT_DTYPE, device=x.codes.device)
    grouped_block_kernel[(len(order.block_experts), ceil_div(size, tiles.block_n))](
        x.codes, x.scales, weight.codes, weight.scales.view(torch.uint8), weight.factors, weight.rows.scale, bias, out,
        *order, IN=weight.shape[2], OUT=size, GROUP=form.group, PER_BYTE=form.per_byte, PAIRS_PER_ROW=pairs_per_row,
        HAS_FACTORS=weight.factors is not None, HAS_SCALE=weight.rows.scale is not None, HAS_BIAS=bias is not None,
        BLOCK_N=tiles.block_n, BLOCK_M=tiles.block_m, BLOCK_BYTES=tiles.block_k, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, **activation_constants(activation), **dependent_launch(out.device),
    )  # fmt: skip
    return out
