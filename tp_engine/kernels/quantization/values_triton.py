"""Codes and scales of quantised weights as numbers, inside Triton kernels.

A float of few bits becomes a float32 by shifts: its exponent and mantissa are put where float32's exponent ends and its
mantissa begins, and a product with a power of two corrects the exponent.  Subnormal numbers come out right as well::

    e4m3    s eeee mmm   ->   s 0000eeee mmm000...   * 2^120        float32's bias is 127, e4m3's is 7
    e2m1    s ee m       ->   s 000000ee m00000...   * 2^126        its bias is 1

GPUs with units for e4m3 convert it in one instruction instead.
"""

from typing import Any

import torch
import triton.language as tl

from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.scaled_products import has_fp8_units
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, values_per_byte

DENSE = 0  # the code number of weights in the model's own type, which some kernels take as well
CODE_NUMBERS: dict[Codes, int] = {"int4": 1, "int8": 2, "e4m3": 3, "e2m1": 4}
_INT4, _INT8, _E4M3, _E2M1 = (tl.constexpr(CODE_NUMBERS[kind]) for kind in ("int4", "int8", "e4m3", "e2m1"))
_NO_SCALES, _FLOATS, _E4M3_SCALES, _E8M0_SCALES = (tl.constexpr(number) for number in range(4))
_SCALE_NUMBERS = {torch.float8_e4m3fn: 2, torch.float8_e8m0fnu: 3}  # floats have 1
_TWO_TO_126, _TWO_TO_120 = tl.constexpr(2.0**126), tl.constexpr(2.0**120)
# Masks of sign, exponent and mantissa in a float32, as signed numbers.
_E4M3_BITS, _E2M1_BITS = tl.constexpr(0x87F00000 - (1 << 32)), tl.constexpr(0x81C00000 - (1 << 32))


@jit
def e4m3_values(codes, DTYPE: tl.constexpr, FP8_UNITS: tl.constexpr):
    """Bytes of e4m3 in DTYPE."""
    if FP8_UNITS:
        values = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & _E4M3_BITS
        wide = bits.to(tl.float32, bitcast=True) * _TWO_TO_120
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    return values


@jit
def code_values(
    codes, zeros,
    HALF: tl.constexpr, DTYPE: tl.constexpr, CODES: tl.constexpr, HAS_ZEROS: tl.constexpr, FP8_UNITS: tl.constexpr,
):  # fmt: skip
    """Values of ``codes`` (uint8), or of their low (HALF 0) or high 4 bits (1), minus ``zeros``, if any: in DTYPE.

    With zeros, values of int4 are 16 times as large, which is exact in any DTYPE.
    """
    if CODES == _E4M3:
        values = e4m3_values(codes, DTYPE, FP8_UNITS)
    elif CODES == _INT8:
        signed = codes.to(tl.int8, bitcast=True)
        values = _minus(signed, zeros, DTYPE, HAS_ZEROS)
    elif CODES == _INT4:
        if HAS_ZEROS:
            sixteenths = ((codes & 240) if HALF == 1 else (codes << 4)) ^ 128
            values = _minus(sixteenths.to(tl.int8, bitcast=True), zeros, DTYPE, HAS_ZEROS)
        else:
            values = (((codes >> 4) if HALF == 1 else (codes & 15)).to(tl.int8) - 8).to(DTYPE)
    else:
        high = codes if HALF == 1 else codes << 4
        bits = (high.to(tl.int8, bitcast=True).to(tl.int32) << 18) & _E2M1_BITS
        values = (bits.to(tl.float32, bitcast=True) * _TWO_TO_126).to(DTYPE)
    return values


@jit
def _minus(signed, zeros, DTYPE: tl.constexpr, HAS_ZEROS: tl.constexpr):
    return (signed.to(tl.int16) - zeros.to(tl.int16)).to(DTYPE) if HAS_ZEROS else signed.to(DTYPE)


@jit
def load_scales(place, mask, SCALES: tl.constexpr, FP8_UNITS: tl.constexpr):
    """The scales at ``place`` in float32; where ``mask`` is false, any number but NaN."""
    raw = tl.load(place, mask=mask, other=0)
    if SCALES == _E4M3_SCALES:
        scales = e4m3_values(raw, tl.float32, FP8_UNITS)
    elif SCALES == _E8M0_SCALES:
        bits = tl.where(raw == 0, 1 << 22, tl.where(raw == 255, 0x7FC00000, raw.to(tl.int32) << 23))
        scales = bits.to(tl.float32, bitcast=True)
    else:
        scales = raw.to(tl.float32)
    return scales


def num_groups(weight: QuantisedWeight) -> int:
    """The number of groups of columns with their own scales; 0 without scales."""
    return 0 if weight.scales is None else weight.scales.shape[-1]


def weight_constants(weight: QuantisedWeight) -> dict[str, Any]:
    """What kernels must know of a weight: constants of ``code_values``, of ``load_scales`` and of their pointers."""
    size, groups = weight.shape[-1], num_groups(weight)
    assert weight.group % values_per_byte(weight.kind) == 0, (weight.kind, weight.group)
    return {
        "CODES": CODE_NUMBERS[weight.kind],
        "SCALES": 0 if weight.scales is None else _SCALE_NUMBERS.get(weight.scales.dtype, 1),
        "IN": size,
        "GROUP": weight.group if groups > 1 else size,
        "GROUPS": groups,
        "ROW_BLOCK": weight.row_block,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_FACTORS": weight.factors is not None,
        "FP8_UNITS": has_fp8_units(weight.codes.device),
    }


def weight_tensors(weight: QuantisedWeight) -> tuple[torch.Tensor | None, ...]:
    """Codes, scales, zeros and factors as kernels take them: 8-bit scales as bytes."""
    tensors = (weight.codes, weight.scales, weight.zeros, weight.factors)
    assert all(one is None or one.is_contiguous() for one in tensors)
    scales = weight.scales
    if scales is not None and scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
    return weight.codes, scales, weight.zeros, weight.factors
