"""Rows of activations in blocks, the Triton twin of ``block_rows``: one pass over memory.

Codes are rounded in float32, without types of 8 bits, so GPUs without units for them have the same::

    step = 2 ** (exponent(x) - bits of the mantissa), at least that of the subnormal codes
    x rounded = (x + 1.5 * 2^23 * step) - 1.5 * 2^23 * step

A rounded number has the code's exponent and mantissa at the top of float32's, up to the difference of the biases.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.block_rows import BLOCK_FORMATS, LARGEST_SCALE
from tp_engine.model_config.quantization import Blocks
from tp_engine.system.units import ceil_div

_COLUMNS = 1024  # of a program
_ELEMENTS_PER_THREAD = 8
# Bits of the mantissa, and the exponent of the smallest number that is not subnormal.
_FLOATS = {"e2m1": (1, 0), "e4m3": (3, -6)}
_E4M3_BITS, _E4M3_LEAST, _LARGEST_SCALE = tl.constexpr(3), tl.constexpr(-6), tl.constexpr(LARGEST_SCALE)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@jit
def rounded_float(size, BITS: tl.constexpr, LEAST: tl.constexpr):
    """float32 numbers of at least 0 -> the nearest with a mantissa of BITS bits."""
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 127 + LEAST)
    rounder = ((exponent + 23 - BITS) << 23 | 1 << 22).to(tl.float32, bitcast=True)
    return (size + rounder) - rounder


@jit
def float_code(size, BITS: tl.constexpr, LEAST: tl.constexpr):
    """The codes of what ``rounded_float`` has rounded, int32."""
    normal = (size.to(tl.int32, bitcast=True) >> (23 - BITS)) - ((126 + LEAST) << BITS)
    return tl.where(size < 2.0**LEAST, (size * 2.0 ** (BITS - LEAST)).to(tl.int32), normal)


@jit
def block_scales(largest, given, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, HAS_POWERS: tl.constexpr):
    """The scales of groups by their ``largest`` magnitudes, which are finite: codes as int32, and their values."""
    if HAS_POWERS:
        codes = tl.maximum(((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - EXPONENT, 0)
        codes = tl.minimum(codes, 254)
        values = tl.where(codes == 0, 1 << 22, codes << 23).to(tl.float32, bitcast=True)
    else:
        whole = tl.load(given)
        wanted = tl.div_rn(tl.div_rn(largest, LARGEST), whole)
        scales = rounded_float(tl.minimum(wanted, _LARGEST_SCALE), _E4M3_BITS, _E4M3_LEAST)
        codes = float_code(scales, _E4M3_BITS, _E4M3_LEAST)
        values = scales * whole
    return codes, values


@triton.jit
@no_type_check
def block_rows_kernel(
    x, given, out, scales, x_stride,
    SIZE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, LARGEST: tl.constexpr, EXPONENT: tl.constexpr,
    COPIES: tl.constexpr, HAS_POWERS: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr, PER_BYTE: tl.constexpr,
    AS_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: PARTS groups of GROUP columns of one row; ``out`` has codes, or with AS_VALUES what they stand for.

    ``given`` is the scale of all rows; if COPIES is not 0, a row becomes so many, each with its own.
    The largest magnitude of a group is found among bits, where NaN is above all numbers.
    """
    token = begin_row(PDL)
    source = token
    given_place = given
    if COPIES > 0:
        source = token // COPIES
        given_place = given + token
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < SIZE
    values = tl.load(x + source * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    peak_bits = tl.max(size_bits, axis=1)
    is_finite = peak_bits < _INFINITY_BITS
    largest = tl.where(is_finite, peak_bits, 0).to(tl.float32, bitcast=True)
    scale_codes, own = block_scales(largest, given_place, LARGEST, EXPONENT, HAS_POWERS)
    divisor, is_whole = own[:, None], is_finite[:, None]
    sizes = tl.where(is_whole, size_bits, 0).to(tl.float32, bitcast=True)
    quotient = tl.where(divisor == 0, 0.0, tl.div_rn(sizes, tl.where(divisor == 0, 1.0, divisor)))
    rounded = rounded_float(tl.minimum(quotient, LARGEST), BITS, LEAST)
    if AS_VALUES:
        found = tl.where(is_whole, tl.where(bits < 0, -rounded, rounded) * divisor, float("nan"))
        tl.store(out + token * SIZE + column, found.to(out.dtype.element_ty), mask=inside)
    else:
        sign = tl.where(is_whole & (bits < 0), 1, 0)
        codes = float_code(rounded, BITS, LEAST) | sign << (3 if PER_BYTE == 2 else 7)
        if PER_BYTE == 2:
            low, high = tl.split(tl.reshape(codes, (PARTS, GROUP // 2, 2)))
            codes = low | high << 4
        byte = part[:, None] * (GROUP // PER_BYTE) + tl.arange(0, GROUP // PER_BYTE)[None, :]
        tl.store(out + token * (SIZE // PER_BYTE) + byte, codes.to(tl.uint8), mask=byte < SIZE // PER_BYTE)
        groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        scale_codes = tl.where(is_finite, scale_codes, 0xFF if HAS_POWERS else 0x7F)
        tl.store(scales + token * groups + part, scale_codes.to(tl.uint8), mask=part < groups)


def encode_rows_triton(
    x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``block_rows.encode_rows``; the rows of ``x`` may be slices of wider ones."""
    form, (num_rows, size) = BLOCK_FORMATS[kind], _shape_of_rows(x, scale)
    assert size % form.per_byte == 0, x.shape
    codes = torch.empty((num_rows, size // form.per_byte), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, ceil_div(size, form.group)), dtype=torch.uint8, device=x.device)
    _launch(x, kind, scale, codes, scales)
    return codes, scales


def round_rows_triton(x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``block_rows.round_rows``; the rows of ``x`` may be slices of wider ones."""
    out = torch.empty(_shape_of_rows(x, scale), dtype=x.dtype, device=x.device)
    _launch(x, kind, scale, out, None)
    return out


def _shape_of_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, int]:
    return len(x) if scale is None or not scale.dim() else len(scale), x.shape[1]


def _launch(
    x: torch.Tensor, kind: Blocks, scale: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    form, (num_rows, size) = BLOCK_FORMATS[kind], _shape_of_rows(x, scale)
    assert x.stride(1) == 1 and (scale is None) == (form.scales == "e8m0"), (x.stride(), kind)
    if not num_rows:
        return
    parts = min(_COLUMNS // form.group, int(triton.next_power_of_2(ceil_div(size, form.group))))
    bits, least = _FLOATS[form.codes]
    copies = 0 if scale is None or not scale.dim() else num_rows // len(x)
    block_rows_kernel[(num_rows, ceil_div(size, parts * form.group))](
        x, scale, out, scales, x.stride(0),
        SIZE=size, GROUP=form.group, PARTS=parts, LARGEST=form.largest, EXPONENT=form.exponent,
        COPIES=copies, HAS_POWERS=form.scales == "e8m0", BITS=bits, LEAST=least, PER_BYTE=form.per_byte,
        AS_VALUES=scales is None,
        num_warps=max(parts * form.group // (32 * _ELEMENTS_PER_THREAD), 1), **dependent_launch(x.device),
    )  # fmt: skip
