"""A quantised weight applied to a few rows: a decode step of several requests, or the end of a prompt.

The grid is (blocks of outputs, blocks of rows).  ``sums_triton`` makes the sums; bias and activation are added here.
A product of few rows takes as long as reading the weight once.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.quantization.row_codes import Rows, rule_for
from tp_engine.kernels.quantization.scaled_products import as_codes
from tp_engine.kernels.quantization.sums_triton import block_columns, in_values, quantised_sums, row_arguments
from tp_engine.kernels.quantization.values_triton import weight_constants, weight_tensors
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div


class RowTiles(NamedTuple):
    """Rows of a program's tile, its outputs for weights with few and with many of them, its warps and stages.

    ``by_compiler``: Triton's ``dot_scaled`` widens the values of MXFP4.
    """

    block_m: int
    few_outputs: int
    many_outputs: int
    num_warps: int
    num_stages: int
    by_compiler: bool = False


# The most rows, and their tiles.  ``scripts/bench_kernels.py --tiles quantised`` times them.
TILES = (
    (16, RowTiles(16, 32, 64, 4, 4)),
    (32, RowTiles(32, 32, 64, 4, 4)),
    (64, RowTiles(64, 64, 64, 4, 3)),
    (1 << 30, RowTiles(128, 64, 64, 8, 3)),
)
_MANY_OUTPUTS = 8192  # blocks of 64 outputs then occupy a GPU


@triton.jit(do_not_specialize=["num_rows", "row_scale_stride", "group_scale_stride"])
@no_type_check
def quantised_linear_kernel(
    x, row_scales, codes, scales, zeros, factors, bias, out, num_rows, x_stride, row_scale_stride, group_scale_stride,
    CODES: tl.constexpr, SCALES: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr, FP8_UNITS: tl.constexpr,
    IN_VALUES: tl.constexpr, OUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of BLOCK_M rows; with GATED, the weight has 2 * OUT rows, gate then up."""
    begin_program(PDL)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside, is_row = output < OUT, row < num_rows
    scale_place = row_scales
    if x.dtype.element_ty == tl.float8e4nv:
        scale_place = row_scales + row * row_scale_stride
    sums = quantised_sums(
        x + row * x_stride, is_row, scale_place, group_scale_stride, output, inside, codes, scales, zeros, factors,
        CODES, SCALES, IN, GROUP, GROUPS, ROW_BLOCK, HAS_ZEROS, HAS_FACTORS, FP8_UNITS, IN_VALUES, BLOCK_N, BLOCK_M,
        BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up_sums = quantised_sums(
            x + row * x_stride, is_row, scale_place, group_scale_stride, output + OUT, inside, codes, scales, zeros,
            factors, CODES, SCALES, IN, GROUP, GROUPS, ROW_BLOCK, HAS_ZEROS, HAS_FACTORS, FP8_UNITS, IN_VALUES, BLOCK_N,
            BLOCK_M, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            up_sums += tl.load(bias + OUT + output, mask=inside, other=0.0).to(tl.float32)[:, None]
        sums = gated(sums, up_sums, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        sums = squared_relu(sums)
    place = out + row[None, :] * OUT + output[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside[:, None] & is_row[None, :])


def quantised_linear_triton(
    x: Rows,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    tiles: RowTiles | None = None,
) -> torch.Tensor:
    """``weights.multiply_quantised``: ``x`` (N, in), whose rows may be slices of wider ones -> (N, out).

    ``tiles`` replaces the choice from ``TILES``.  Of codes, the result is bfloat16.
    """
    num_rows, (num_outputs, size), rows = len(x), weight.shape, row_arguments(x)
    assert rows.values.shape[1] == size and rows.values.stride(1) == 1, (rows.values.shape, weight.shape)
    is_gated = activation is not None and activation.num_parts == 2
    num_out = num_outputs // 2 if is_gated else num_outputs
    dtype, device = rows.dtype, rows.values.device
    out = torch.empty((num_rows, num_out), dtype=dtype, device=device)
    if not num_rows:
        return out
    tiles = tiles or next(tiles for most, tiles in TILES if num_rows <= most)
    block_n = tiles.many_outputs if num_outputs >= _MANY_OUTPUTS else tiles.few_outputs
    quantised_linear_kernel[(ceil_div(num_out, block_n), ceil_div(num_rows, tiles.block_m))](
        rows.values, rows.scales, *weight_tensors(weight), bias, out, num_rows, rows.values.stride(0), *rows.strides,
        IN_VALUES=in_values(weight, dtype, by_compiler=tiles.by_compiler), OUT=num_out, BLOCK_N=block_n,
        BLOCK_M=tiles.block_m, BLOCK_K=block_columns(weight, dtype), HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **weight_constants(weight),
        **activation_constants(activation), **dependent_launch(device),
    )  # fmt: skip
    return out


class TritonCodesProduct:
    """A ``ScaledProduct`` of ``weight``, which ``takes_codes``, in ``tiles``.

    It takes what the libraries do not: scales per block on GPUs other than those of compute capability 9.0, and blocks
    that the ranks have cut.
    """

    def __init__(self, weight: QuantisedWeight, tiles: RowTiles) -> None:
        self.rule = rule_for(weight)
        self._weight, self._tiles = weight, tiles

    def __call__(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None = None) -> torch.Tensor:
        return quantised_linear_triton(as_codes(x, self.rule, activation), self._weight, bias, None, self._tiles)
