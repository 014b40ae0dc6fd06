"""Rows in blocks times weights in blocks, by units that multiply codes and scales (NVFP4, MXFP4, MXFP8).

::

    out[m, o] = factor[o] * scale * sum over i of code[m, i] * block_scale[m, i / group]
                                                 * code[o, i] * block_scale[o, i / group]  + bias[o]

Triton's ``dot_scaled`` becomes one instruction for codes and scales: ``tcgen05.mma`` with ``block_scale`` on GPUs of
compute capability 10.x, ``mma.sync`` with it on 12.x.  No code is widened, and each product of a row's code with a
weight's is exact; sums are float32.  The weight is the left operand, because these units take 128 of its rows.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.ops import op
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS, has_blocks
from tp_engine.kernels.quantization.linear_triton import RowTiles
from tp_engine.kernels.quantization.row_codes import PRODUCT_DTYPE
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.system.units import ceil_div

_BLOCK_BYTES = 128  # of a row of codes, at a time
_E2M1, _E4M3 = tl.constexpr("e2m1"), tl.constexpr("e4m3")


@jit
def block_sums(
    x, x_scales, codes, scales, row, is_row, output, inside,
    IN: tl.constexpr, GROUP: tl.constexpr, PER_BYTE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) float32: rows ``output`` of the weight times rows ``row`` of ``x``."""
    width: tl.constexpr = IN // PER_BYTE
    groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    block_groups: tl.constexpr = BLOCK_BYTES * PER_BYTE // GROUP
    byte, number = tl.arange(0, BLOCK_BYTES), tl.arange(0, block_groups)
    code_place = codes + output.to(tl.int64)[:, None] * width + byte[None, :]
    row_place = x + row[:, None] * width + byte[None, :]
    scale_place = scales + output.to(tl.int64)[:, None] * groups + number[None, :]
    row_scale_place = x_scales + row[:, None] * groups + number[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, width, BLOCK_BYTES):
        is_byte = (start + byte < width)[None, :]
        first = start * PER_BYTE // GROUP
        is_group = (first + number < groups)[None, :]
        own = tl.load(code_place + start, mask=inside[:, None] & is_byte, other=0)
        rows = tl.load(row_place + start, mask=is_row[:, None] & is_byte, other=0)
        own_scales = tl.load(scale_place + first, mask=inside[:, None] & is_group, other=0)
        row_scales = tl.load(row_scale_place + first, mask=is_row[:, None] & is_group, other=0)
        if GROUP == 16:
            own_scales = own_scales.to(tl.float8e4nv, bitcast=True)
            row_scales = row_scales.to(tl.float8e4nv, bitcast=True)
        if PER_BYTE == 2:
            sums = tl.dot_scaled(own, own_scales, _E2M1, tl.trans(rows), row_scales, _E2M1, sums)
        else:
            own, rows = own.to(tl.float8e4nv, bitcast=True), rows.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot_scaled(own, own_scales, _E4M3, tl.trans(rows), row_scales, _E4M3, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def block_linear_kernel(
    x, x_scales, codes, scales, factors, given, bias, out, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, PER_BYTE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of BLOCK_M rows; codes are e2m1, two PER_BYTE, or e4m3."""
    begin_program(PDL)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside, is_row = output < OUT, row < num_rows
    sums = block_sums(
        x, x_scales, codes, scales, row, is_row, output, inside, IN, GROUP, PER_BYTE, BLOCK_N, BLOCK_M, BLOCK_BYTES
    )
    if HAS_SCALE:
        sums *= tl.load(given)
    if HAS_FACTORS:
        sums *= tl.load(factors + output, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = out + row[None, :] * OUT + output[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside[:, None] & is_row[None, :])


class BlockScaledProduct:
    """The product with a ``weight`` in the blocks of its rows, in ``tiles``; results are bfloat16."""

    def __init__(self, weight: QuantisedWeight, tiles: RowTiles) -> None:
        assert weight.rows is not None and weight.scales is not None and has_blocks(weight, weight.rows.kind)
        self._weight, self._rows, self._tiles = weight, weight.rows, tiles
        self._scales = weight.scales.view(torch.uint8)
        self._encode = op("encode_rows", weight.codes.device.type)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out)."""
        weight, rows, tiles = self._weight, self._rows, self._tiles
        (num_outputs, size), num_rows, form = weight.shape, len(x), BLOCK_FORMATS[rows.kind]
        out = torch.empty((num_rows, num_outputs), dtype=PRODUCT_DTYPE, device=x.device)
        if not num_rows:
            return out
        codes, scales = self._encode(x, rows.kind, rows.scale)
        block_n = tiles.many_outputs
        block_linear_kernel[(ceil_div(num_outputs, block_n), ceil_div(num_rows, tiles.block_m))](
            codes, scales, weight.codes, self._scales, weight.factors, rows.scale, bias, out, num_rows,
            IN=size, OUT=num_outputs, GROUP=form.group, PER_BYTE=form.per_byte, HAS_FACTORS=weight.factors is not None,
            HAS_SCALE=rows.scale is not None, HAS_BIAS=bias is not None, BLOCK_N=block_n, BLOCK_M=tiles.block_m,
            BLOCK_BYTES=_BLOCK_BYTES, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            **dependent_launch(x.device),
        )  # fmt: skip
        return out
