"""Rows of activations as 8-bit floats with scales, the Triton twin of ``row_codes``: one pass over memory."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.jit import jit
from tp_engine.kernels.kv_cache.store_kv_triton import scaled_to_range
from tp_engine.kernels.quantization.row_codes import CODE_DTYPE, LARGEST_CODE
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import ceil_div

MAX_SIZE = 1 << 16
_BLOCK = 1024
_ELEMENTS_PER_THREAD, _MAX_WARPS = 8, 16


@jit
def rounded_groups(values, given, LARGEST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """float32 ``values`` (groups, columns) -> the same in the codes' range, not rounded yet, and the groups' scales."""
    if HAS_SCALE:
        scale = tl.load(given)
        found = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
        own = tl.zeros((values.shape[0],), tl.float32) + scale
    else:
        peak = tl.max(tl.abs(values), axis=1)
        found = scaled_to_range(values, peak[:, None], LARGEST, False)
        own = peak / LARGEST
    # Maxima ignore NaN, so it is looked for.
    is_broken = tl.max((values != values).to(tl.int32), axis=1) > 0
    return found, tl.where(is_broken, float("nan"), own)


@triton.jit(do_not_specialize=["scale_stride"])
@no_type_check
def quantise_rows_kernel(
    x, given, codes, scales, x_stride, scale_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, LARGEST: tl.constexpr, HAS_SCALE: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: PARTS groups of WIDTH columns of one row.

    ``scales`` has a row for each group, ``scale_stride`` apart.  HAS_SCALE: ``given`` is the only scale.  GATED: a row
    of ``x`` is SIZE gates, then SIZE ups; the activation's result is rounded to the type of ``x``.
    """
    token = begin_row(PDL)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < SIZE
    place = x + token * x_stride + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
        values = gated(values, up, KIND, ALPHA, LIMIT).to(x.dtype.element_ty).to(tl.float32)
    elif KIND == RELU2:
        values = squared_relu(values).to(x.dtype.element_ty).to(tl.float32)
    is_part = part * WIDTH < SIZE
    found, own = rounded_groups(values, given, LARGEST, HAS_SCALE)
    tl.store(codes + token * SIZE + column, found.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + part * scale_stride + token, own, mask=is_part)


def quantise_rows_triton(
    x: torch.Tensor, group: int = 0, scale: torch.Tensor | None = None, activation: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``row_codes.quantise_rows``; the rows of ``x`` may be slices of wider ones.

    ``group`` is a power of two.  The scales of a group, for all tokens, are contiguous, as products of blocks want
    them.
    """
    num_rows, size = x.shape
    if activation is not None:
        assert size % activation.num_parts == 0, x.shape
        size //= activation.num_parts
    width = group or int(triton.next_power_of_2(size))
    assert x.stride(1) == 1 and width & (width - 1) == 0 and width <= MAX_SIZE, (x.shape, x.stride(), group)
    num_groups = ceil_div(size, width)
    codes = torch.empty((num_rows, size), dtype=CODE_DTYPE, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    if num_rows:
        parts = max(_BLOCK // width, 1)
        quantise_rows_kernel[(num_rows, ceil_div(num_groups, parts))](
            x, scale, codes, scales, x.stride(0), num_rows,
            SIZE=size, WIDTH=width, PARTS=parts, LARGEST=LARGEST_CODE, HAS_SCALE=scale is not None,
            **activation_constants(activation),
            num_warps=min(max(parts * width // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS),
            **dependent_launch(x.device),
        )  # fmt: skip
    return codes, scales.t()
