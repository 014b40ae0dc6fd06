"""Sums of products of rows with a quantised weight, for dense layers and experts.

::

    sums[o, m] = sum over groups g of scale[o, g] * (sum over i in g of (value(code[o, i]) - zero[o, g]) * x[m, i])

A program has BLOCK_N outputs and BLOCK_M rows and takes BLOCK_K columns at a time.  The weight is the left operand,
which matrix units take from registers, where its codes become numbers.  Codes of 4 bits are never interleaved: low and
high halves of the bytes meet the even and the odd columns of ``x``.

The groups' sums are scaled in float32, so no weight is rounded.  If BLOCK_K columns belong to several groups, each
group is a product with the other groups' columns of ``x`` set to zero; but if a value times its scale is exact in the
type of ``x``, the scales are multiplied into the values (``scales_fit_values``).

BLOCK_K follows from the weight alone, so a row's result does not depend on the number of rows.

Rows may be codes of 8-bit floats with scales of their own (``row_codes``), then e4m3 meets e4m3 in the units for it::

    sums[o, m] = sum over groups g of scale[o, g] * row_scale[m, g] * (sum over i in g of code[o, i] * code[m, i])

Units of some GPUs keep fewer bits of such a sum than float32 has, so each block of columns has one of its own.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.row_codes import PRODUCT_DTYPE, RowCodes, Rows
from tp_engine.kernels.quantization.values_triton import code_values, load_scales, num_groups
from tp_engine.kernels.quantization.weights import QuantisedWeight, values_per_byte

_MAX_BLOCK_K, _MIN_BLOCK_K = 128, 32
BY_COMPILER = 2
_BY_COMPILER = tl.constexpr(BY_COMPILER)
_MX_GROUP = 32  # columns of a scale in the microscaling formats
_CODES_FORMAT, _ROWS_FORMAT = tl.constexpr("e2m1"), tl.constexpr("bf16")


@jit
def quantised_sums(
    row_place, is_row, row_scale_place, row_scale_stride, output, inside, codes, scales, zeros, factors,
    CODES: tl.constexpr, SCALES: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr, FP8_UNITS: tl.constexpr,
    IN_VALUES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) float32: of the weight's rows ``output``, where ``inside``, and the rows of ``x`` at
    ``row_place``, where ``is_row``.

    With IN_VALUES, scales go into the values; 2: the compiler widens them (``dot_scaled``).  Pointers are those of one
    weight, also if it is one of a stack.  With ROW_CODES, rows are codes, whose scales of the first group are at
    ``row_scale_place``, those of the next ``row_scale_stride`` further on.
    """
    dtype: tl.constexpr = row_place.dtype.element_ty
    ROW_CODES: tl.constexpr = dtype == tl.float8e4nv
    in_place: tl.constexpr = (GROUPS < 2 or IN_VALUES) and not ROW_CODES
    per_byte: tl.constexpr = 2 if CODES == 1 or CODES == 4 else 1
    block_bytes: tl.constexpr = BLOCK_K // per_byte
    # The most groups that a block of columns touches.
    parts: tl.constexpr = 0 if IN_VALUES == _BY_COMPILER else (
        1 if GROUP % BLOCK_K == 0 or GROUPS < 2 or IN_VALUES else (
            BLOCK_K // GROUP if BLOCK_K % GROUP == 0 else (BLOCK_K + GROUP - 1) // GROUP + 1
        )
    )  # fmt: skip
    column, byte = tl.arange(0, BLOCK_K), tl.arange(0, block_bytes)
    code_place = codes + output.to(tl.int64)[:, None] * (IN // per_byte) + byte[None, :]
    scale_place = scales
    zero_place = zeros
    if GROUPS > 0:
        scale_place = scales + (output // ROW_BLOCK) * GROUPS
    if HAS_ZEROS:
        zero_place = zeros + output * GROUPS
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, IN, BLOCK_K):
        mask = is_row[:, None] & (start + column < IN)[None, :]
        rows = tl.load(row_place[:, None] + (start + column)[None, :], mask=mask, other=0.0)
        mask = inside[:, None] & (start // per_byte + byte < IN // per_byte)[None, :]
        raw = tl.load(code_place + start // per_byte, mask=mask, other=0)
        if IN_VALUES == _BY_COMPILER:
            number = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            mask = inside[:, None] & (number < GROUPS)[None, :]
            exponents = tl.load(scale_place[:, None] + number[None, :], mask=mask, other=0)
            sums = tl.dot_scaled(raw, exponents, _CODES_FORMAT, tl.trans(rows), None, _ROWS_FORMAT, sums)
        for part in tl.static_range(parts):
            group = start // GROUP + part
            own = rows
            if parts > 1:
                own = tl.where(((start + column) // GROUP == group)[None, :], rows, 0.0).to(dtype)
            zero = 0
            if HAS_ZEROS:
                zero = tl.load(zero_place + group, mask=inside & (group < GROUPS), other=0)[:, None]
            if IN_VALUES:
                groups: tl.constexpr = BLOCK_K // GROUP
                number = start // GROUP + tl.arange(0, groups)
                mask = inside[:, None] & (number < GROUPS)[None, :]
                few = load_scales(scale_place[:, None] + number[None, :], mask, SCALES, FP8_UNITS)
                spread = tl.broadcast_to(few[:, :, None], (BLOCK_N, groups, GROUP // per_byte))
                factor = tl.reshape(spread, (BLOCK_N, block_bytes))
            added = sums if in_place else tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if per_byte == 2:
                halves = tl.split(tl.reshape(own, (BLOCK_M, block_bytes, 2)))
                for half in tl.static_range(2):
                    if IN_VALUES:
                        values = code_values(raw, zero, half, tl.float32, CODES, HAS_ZEROS, FP8_UNITS) * factor
                    else:
                        values = code_values(raw, zero, half, dtype, CODES, HAS_ZEROS, FP8_UNITS)
                    added = tl.dot(values.to(dtype), tl.trans(halves[half]), added, input_precision="ieee")
            else:
                values = code_values(raw, zero, 0, dtype, CODES, HAS_ZEROS, FP8_UNITS)
                added = tl.dot(values, tl.trans(own), added, input_precision="ieee")
            if in_place:
                sums = added
            elif GROUPS < 2:
                sums += added
            else:
                own_scales = load_scales(scale_place + group, inside & (group < GROUPS), SCALES, FP8_UNITS)
                if ROW_CODES:
                    of_rows = tl.load(row_scale_place + group * row_scale_stride, mask=is_row, other=0.0)
                    added *= of_rows[None, :]
                sums += added * own_scales[:, None]
    if GROUPS < 2 and ROW_CODES:
        sums *= tl.load(row_scale_place, mask=is_row, other=0.0)[None, :]
    if GROUPS == 1:
        sums *= load_scales(scale_place, inside, SCALES, FP8_UNITS)[:, None]
    if CODES == 1 and HAS_ZEROS:
        sums *= 0.0625  # values are in sixteenths
    if HAS_FACTORS:
        sums *= tl.load(factors + output, mask=inside, other=0.0)[:, None]
    return sums


class RowArguments(NamedTuple):
    """Rows as kernels take them: values or codes, and the codes' scales with their strides by row and by group.
    ``dtype`` is that of results."""

    values: torch.Tensor
    scales: torch.Tensor | None
    strides: tuple[int, int]
    dtype: torch.dtype


def row_arguments(x: Rows) -> RowArguments:
    """What a launch has of ``x``."""
    if isinstance(x, RowCodes):
        return RowArguments(x.codes, x.scales, (x.scales.stride(0), x.scales.stride(1)), PRODUCT_DTYPE)
    return RowArguments(x, None, (0, 0), x.dtype)


def block_columns(weight: QuantisedWeight, dtype: torch.dtype) -> int:
    """BLOCK_K for ``weight``: as many columns as share a scale, within limits."""
    if num_groups(weight) < 2 or scales_fit_values(weight, dtype):
        return _MAX_BLOCK_K
    return min(max(weight.group & -weight.group, _MIN_BLOCK_K), _MAX_BLOCK_K)


def in_values(weight: QuantisedWeight, dtype: torch.dtype, *, by_compiler: bool) -> int:
    """IN_VALUES for ``weight``; ``by_compiler``: its scales go into the values as Triton does it."""
    assert not by_compiler or (takes_dot_scaled(weight) and dtype == torch.bfloat16), (weight.kind, dtype)
    return BY_COMPILER if by_compiler else int(scales_fit_values(weight, dtype))


def takes_dot_scaled(weight: QuantisedWeight) -> bool:
    """Whether Triton's ``dot_scaled`` multiplies ``weight`` with rows of bfloat16: MXFP4; it refuses NVFP4's scales."""
    is_mxfp4 = weight.kind == "e2m1" and weight.scales is not None and weight.scales.dtype == torch.float8_e8m0fnu
    return is_mxfp4 and weight.group == _MX_GROUP and scales_fit_values(weight, torch.bfloat16)


def scales_fit_values(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    """Whether each value times its scale is exact in ``dtype``: IN_VALUES.

    A value of e2m1 has two significant bits and one of e4m3 four, so six are needed; powers of two also need the range.
    """
    if weight.kind != "e2m1" or weight.scales is None or not 1 < weight.group <= _MAX_BLOCK_K:
        return False
    is_exact = weight.scales.dtype == torch.float8_e4m3fn or (
        weight.scales.dtype == torch.float8_e8m0fnu and dtype != torch.float16
    )
    return (
        is_exact and num_groups(weight) > 1 and _MAX_BLOCK_K % weight.group == 0 and values_per_byte(weight.kind) == 2
    )
