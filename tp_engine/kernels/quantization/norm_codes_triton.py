"""Norms whose results become 8-bit floats in the same pass over memory: the Triton twin of ``row_codes.norm_codes``.

One program holds one token's row, as in ``norm_triton``, and rounds it to the model's type before it makes the codes.
The rows themselves are not stored.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.norm_triton import begin_norm, normalised_row, row_constants
from tp_engine.kernels.quantization.row_codes import CODE_DTYPE, LARGEST_CODE, CodeRule, RowCodes
from tp_engine.kernels.quantization.row_codes_triton import rounded_groups
from tp_engine.system.units import ceil_div


@triton.jit(do_not_specialize=["scale_stride"])
@no_type_check
def norm_codes_kernel(
    x, residual, weight, given, codes, scales, x_stride, residual_stride, scale_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, HAS_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row of SIZE elements, with a scale for every WIDTH columns, or ``given`` for all.

    ``scales`` has a row for each group, ``scale_stride`` apart.
    """
    token, column, inside, gain = begin_norm(weight, SIZE, BLOCK, OFFSET, PDL)
    row = normalised_row(
        x, residual, gain, token, column, inside, x_stride, residual_stride, eps, 1.0, SIZE, ADDS, SCALE, False, CENTRED
    )
    # Columns outside may be NaN, if the row has NaN.
    values = tl.where(inside, row.to(x.dtype.element_ty).to(tl.float32), 0.0)
    found, own = rounded_groups(tl.reshape(values, (BLOCK // WIDTH, WIDTH)), given, LARGEST, HAS_SCALE)
    # By row and column of groups: a store of the row's shape would change which thread has which column, and with it
    # the order of the norm's sums.
    part = tl.arange(0, BLOCK // WIDTH)
    place = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(codes + token * SIZE + place, found.to(codes.dtype.element_ty), mask=place < SIZE)
    tl.store(scales + part * scale_stride + token, own, mask=part * WIDTH < SIZE)


def norm_codes_triton(
    x: torch.Tensor, residual: torch.Tensor | None, rule: NormRule, wanted: CodeRule, scale: float = 1.0
) -> RowCodes:
    """``row_codes.norm_codes``; the rows of ``x`` and ``residual`` may be slices of wider ones.

    A group is a power of two, and not wider than a row.  A group's scales of all tokens follow one another in memory,
    as in ``quantise_rows_triton``.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1, (x.shape, x.stride())
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1), (x.shape, residual)
    constants = row_constants(size, rule)
    width = wanted.group or constants["BLOCK"]
    assert width & (width - 1) == 0 and width <= constants["BLOCK"], (x.shape, wanted.group)
    codes = torch.empty((num_rows, size), dtype=CODE_DTYPE, device=x.device)
    scales = torch.empty((ceil_div(size, width), num_rows), dtype=torch.float32, device=x.device)
    if num_rows:
        norm_codes_kernel[(num_rows,)](
            x, residual, rule.weight, wanted.scale, codes, scales, x.stride(0),
            0 if residual is None else residual.stride(0), num_rows, rule.eps,
            ADDS=residual is not None, SCALE=scale, WIDTH=width, LARGEST=LARGEST_CODE,
            HAS_SCALE=wanted.scale is not None, **constants, **dependent_launch(x.device),
        )  # fmt: skip
    return RowCodes(codes, scales.t())
