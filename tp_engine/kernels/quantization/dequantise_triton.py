"""A quantised weight's values in the model's type, for products of many rows, which a library then computes.

One program makes BLOCK_OUT rows of BLOCK_BYTES bytes of codes.  Values are float32 and rounded once.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.jit import jit
from tp_engine.kernels.quantization.values_triton import code_values, load_scales, weight_constants, weight_tensors
from tp_engine.kernels.quantization.weights import QuantisedWeight
from tp_engine.system.units import ceil_div

# Values of an output head would be the largest allocation of a step.
MOST_VALUES = 1 << 27
_BLOCK_OUT, _BLOCK_BYTES = 16, 256


@jit
def dequantise_kernel(
    codes, scales, zeros, factors, out,
    OUT: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ROW_BLOCK: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    FP8_UNITS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``out`` (OUT, IN).  It reads only weights, but kernels before it may still use ``out``."""
    let_next_begin(PDL)
    per_byte: tl.constexpr = 2 if CODES == 1 or CODES == 4 else 1
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    byte = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    is_row = row < OUT
    mask = is_row[:, None] & (byte < IN // per_byte)[None, :]
    raw = tl.load(codes + row.to(tl.int64)[:, None] * (IN // per_byte) + byte[None, :], mask=mask, other=0)
    group = byte * per_byte // GROUP
    zero = 0
    if HAS_ZEROS:
        zero = tl.load(zeros + (row * GROUPS)[:, None] + group[None, :], mask=mask, other=0)
    factor = tl.full((BLOCK_OUT, BLOCK_BYTES), 1.0, tl.float32)
    if GROUPS > 0:
        factor = load_scales(scales + (row // ROW_BLOCK * GROUPS)[:, None] + group[None, :], mask, SCALES, FP8_UNITS)
    own = tl.full((BLOCK_OUT,), 0.0625 if CODES == 1 and HAS_ZEROS else 1.0, tl.float32)
    if HAS_FACTORS:
        own *= tl.load(factors + row, mask=is_row, other=0.0)
    values = code_values(raw, zero, 0, tl.float32, CODES, HAS_ZEROS, FP8_UNITS) * factor * own[:, None]
    if per_byte == 2:
        odd = code_values(raw, zero, 1, tl.float32, CODES, HAS_ZEROS, FP8_UNITS) * factor * own[:, None]
        values = tl.reshape(tl.join(values, odd), (BLOCK_OUT, BLOCK_BYTES * 2))
    column = tl.program_id(1) * BLOCK_BYTES * per_byte + tl.arange(0, BLOCK_BYTES * per_byte)
    wait_for_previous(PDL)
    place = out + row.to(tl.int64)[:, None] * IN + column[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=is_row[:, None] & (column < IN)[None, :])


def multiply_dequantised(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None, most_values: int = MOST_VALUES
) -> torch.Tensor:
    """``x`` (N, in) -> (N, out), by PyTorch's product with the values, at most ``most_values`` of them at a time."""
    num_out, size = weight.shape
    step = max(most_values // size // weight.row_block, 1) * weight.row_block
    if num_out <= step:
        return F.linear(x, dequantise_triton(weight, x.dtype), bias)
    parts = []
    for first in range(0, num_out, step):
        rows = slice(first, first + step)
        values = dequantise_triton(_rows_of(weight, first, step), x.dtype)
        parts.append(F.linear(x, values, None if bias is None else bias[rows]))
        del values
    return torch.cat(parts, 1)


def _rows_of(weight: QuantisedWeight, first: int, count: int) -> QuantisedWeight:
    """``count`` rows from ``first`` on, both multiples of ``row_block``."""
    rows, block = slice(first, first + count), weight.row_block
    return replace(
        weight,
        codes=weight.codes[rows],
        scales=None if weight.scales is None else weight.scales[first // block : (first + count) // block],
        zeros=None if weight.zeros is None else weight.zeros[rows],
        factors=None if weight.factors is None else weight.factors[rows],
    )


def dequantise_triton(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """``weights.dequantise`` of a weight (out, in), rounded to ``dtype``."""
    num_rows, size = weight.shape
    num_bytes = weight.codes.shape[1]
    out = torch.empty((num_rows, size), dtype=dtype, device=weight.codes.device)
    dequantise_kernel[(ceil_div(num_rows, _BLOCK_OUT), ceil_div(num_bytes, _BLOCK_BYTES))](
        *weight_tensors(weight), out,
        OUT=num_rows, BLOCK_OUT=_BLOCK_OUT, BLOCK_BYTES=_BLOCK_BYTES, **weight_constants(weight),
        **dependent_launch(out.device),
    )  # fmt: skip
    return out
