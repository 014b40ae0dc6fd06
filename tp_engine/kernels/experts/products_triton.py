"""Grouped products: each expert's weight times the rows of the pairs that were sorted to it.

::

    program (block, columns): rows of the block's pairs -> out[pair], activated if the weight is gate and up

Weights have the type of ``x``, or are quantised and widened in registers (``quantization/sums_triton.py``).
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.experts.experts import Weights
from tp_engine.kernels.experts.sort_triton import PairOrder
from tp_engine.kernels.experts.tiles import Tiles
from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.kernels.quantization.sums_triton import (
    block_columns,
    in_values,
    quantised_sums,
    row_arguments,
)
from tp_engine.kernels.quantization.values_triton import DENSE, weight_constants, weight_tensors
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div


@jit
def dense_sums(
    row_place, is_row, column, inside, weight,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) float32: products with the weight's rows ``column``; with GATED, also with those OUT below."""
    item = tl.arange(0, BLOCK_K)
    weight_place = weight + column.to(tl.int64)[None, :] * IN
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, IN, BLOCK_K):
        is_item = start + item < IN
        mask = is_row[:, None] & is_item[None, :]
        rows = tl.load(row_place[:, None] + (start + item)[None, :], mask=mask, other=0.0)
        mask = is_item[:, None] & inside[None, :]
        gates = tl.load(weight_place + (start + item)[:, None], mask=mask, other=0.0)
        sums = tl.dot(rows, gates, sums, input_precision="ieee")
        if GATED:
            ups = tl.load(weight_place + OUT * IN + (start + item)[:, None], mask=mask, other=0.0)
            up_sums = tl.dot(rows, ups, up_sums, input_precision="ieee")
    return sums, up_sums


@triton.jit(do_not_specialize=["num_pairs", "row_scale_stride", "group_scale_stride"])
@no_type_check
def grouped_kernel(
    x, row_scales, weight, scales, zeros, factors, bias, out, sorted_pairs, block_experts, num_pairs, row_scale_stride,
    group_scale_stride,
    CODES: tl.constexpr, SCALES: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr, FP8_UNITS: tl.constexpr,
    IN_VALUES: tl.constexpr, OUT: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of the pairs of one block.

    The row of a pair in ``x`` (rows, IN) is pair // PAIRS_PER_ROW; ``out`` is (num_pairs, OUT).  If GATED, ``weight``
    (experts, 2 * OUT, IN) has gate rows, then up rows.  CODES is 0 for weights of the type of ``x``.
    """
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
    row = pair // PAIRS_PER_ROW
    row_place = x + row * IN
    scale_place = row_scales
    if x.dtype.element_ty == tl.float8e4nv:
        scale_place = row_scales + row * row_scale_stride
    if CODES == 0:
        own = weight + expert * parts * OUT * IN
        sums, up_sums = dense_sums(row_place, is_pair, column, inside, own, IN, OUT, BLOCK_M, BLOCK_N, BLOCK_K, GATED)
    else:
        own = weight + expert * parts * OUT * (IN // (2 if CODES == 1 or CODES == 4 else 1))
        own_scales = scales
        own_zeros = zeros
        own_factors = factors
        if GROUPS > 0:
            own_scales = scales + expert * ((parts * OUT + ROW_BLOCK - 1) // ROW_BLOCK * GROUPS)
        if HAS_ZEROS:
            own_zeros = zeros + expert * parts * OUT * GROUPS
        if HAS_FACTORS:
            own_factors = factors + expert * parts * OUT
        up_sums = 0.0
        sums = tl.trans(
            quantised_sums(
                row_place, is_pair, scale_place, group_scale_stride, column, inside, own, own_scales, own_zeros,
                own_factors, CODES, SCALES, IN, GROUP, GROUPS, ROW_BLOCK, HAS_ZEROS, HAS_FACTORS, FP8_UNITS, IN_VALUES,
                BLOCK_N, BLOCK_M, BLOCK_K,
            )
        )  # fmt: skip
        if GATED:
            up_sums = tl.trans(
                quantised_sums(
                    row_place, is_pair, scale_place, group_scale_stride, column + OUT, inside, own, own_scales,
                    own_zeros, own_factors, CODES, SCALES, IN, GROUP, GROUPS, ROW_BLOCK, HAS_ZEROS, HAS_FACTORS,
                    FP8_UNITS, IN_VALUES, BLOCK_N, BLOCK_M, BLOCK_K,
                )
            )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + expert * parts * OUT + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias + (expert * 2 + 1) * OUT + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        sums = squared_relu(sums)
    place = out + pair[:, None] * OUT + column[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & inside[None, :])


def multiply_pairs(
    x: Rows,
    weight: Weights,
    bias: torch.Tensor | None,
    order: PairOrder,
    tiles: Tiles,
    *,
    pairs_per_row: int = 1,
    activation: Activation | None = None,
) -> torch.Tensor:
    """(pairs, out): row ``pair // pairs_per_row`` of ``x`` times its expert's ``weight`` (experts, out, in).

    With an ``activation`` that has a gate, the weight is gate rows, then up rows, and the result has half as many
    columns.  Rows of pairs whose expert is elsewhere are undefined.
    """
    size = weight.shape[1] // (1 if activation is None else activation.num_parts)
    rows = row_arguments(x)
    out = torch.empty((order.num_pairs, size), dtype=rows.dtype, device=rows.values.device)
    if isinstance(weight, QuantisedWeight):
        tensors, block_k = weight_tensors(weight), block_columns(weight, rows.dtype)
        constants = weight_constants(weight) | {
            "IN_VALUES": in_values(weight, rows.dtype, by_compiler=tiles.by_compiler)
        }
    else:
        tensors, block_k, constants = (weight, None, None, None), tiles.block_k, _dense_constants(weight.shape[2])
    grouped_kernel[(len(order.block_experts), ceil_div(size, tiles.block_n))](
        rows.values, rows.scales, *tensors, bias, out, *order, *rows.strides,
        OUT=size, PAIRS_PER_ROW=pairs_per_row, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=block_k,
        HAS_BIAS=bias is not None, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        **constants, **activation_constants(activation), **dependent_launch(out.device),
    )  # fmt: skip
    return out


def _dense_constants(size: int) -> dict[str, Any]:
    flags = dict.fromkeys(("HAS_ZEROS", "HAS_FACTORS", "FP8_UNITS", "IN_VALUES"), False)
    return {"CODES": DENSE, "SCALES": 0, "IN": size, "GROUP": size, "GROUPS": 0, "ROW_BLOCK": 1, **flags}
