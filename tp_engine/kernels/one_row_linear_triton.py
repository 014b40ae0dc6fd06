"""A linear layer applied to one row, as in a decode step of one request: its time is that of reading the weight.

::

    weight (out, in) = [ rows of program 0 ]     program i: BLOCK_OUT whole rows, BLOCK_IN columns at a time
                       [ rows of program 1 ]     gated: BLOCK_OUT rows of gate and BLOCK_OUT of up; the activation
                       ...                       of a gate and an up is one result

Libraries cut one row into tiles for matrix units, split the columns over programs, and then add up their sums.  Here a
program multiplies as it reads, and the first columns of its weight are on their way before the kernel that makes ``x``
has ended (``dependent_launch_triton``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.elementwise_triton import activation_constants, gated
from tp_engine.model_config.mlp import Activation

_MAX_BLOCK_IN, _MIN_BLOCK_IN = 4096, 128
_BLOCK_ELEMENTS = 4096
_MIN_BLOCK_OUT = 2
# With more outputs, such as a vocabulary, a library's product reads the weight as fast as memory allows.
_MAX_OUT = 1 << 16


@triton.jit  # type: ignore[untyped-decorator]
def one_row_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    OUT: tl.constexpr,  # noqa: N803
    IN: tl.constexpr,  # noqa: N803
    BLOCK_OUT: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: BLOCK_OUT of the OUT results; with GATED, ``weight`` has twice as many rows, gate then up."""
    let_next_begin(PDL)
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    place = weight + row.to(tl.int64)[:, None] * IN + column[None, :]
    first = tl.load(place)
    up_place = place + OUT * IN
    first_up = first
    if GATED:
        first_up = tl.load(up_place)
    wait_for_previous(PDL)
    values = tl.load(x + column).to(tl.float32)[None, :]
    sums = first.to(tl.float32) * values
    up_sums = first_up.to(tl.float32) * values
    for start in tl.static_range(BLOCK_IN, IN, BLOCK_IN):
        values = tl.load(x + start + column).to(tl.float32)[None, :]
        sums += tl.load(place + start).to(tl.float32) * values
        if GATED:
            up_sums += tl.load(up_place + start).to(tl.float32) * values
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + OUT + row).to(tl.float32)
        result = gated(result, up, KIND, ALPHA, LIMIT)
    tl.store(out + row, result.to(out.dtype.element_ty))


def takes_weight(weight: torch.Tensor, *, is_gated: bool = False) -> bool:
    """Whether ``one_row_linear_triton`` takes a weight of this shape."""
    num_rows, size = weight.shape
    block_in, block_out = _blocks(size, is_gated)
    is_whole = num_rows % (2 * block_out if is_gated else block_out) == 0
    return weight.is_contiguous() and block_in >= _MIN_BLOCK_IN and is_whole and num_rows <= _MAX_OUT


def one_row_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
) -> torch.Tensor:
    """``x`` (1, in) @ ``weight`` (out, in).T + ``bias`` (out,), summed up in float32: (1, out).

    With an ``activation``: ``layer_ops.gate`` of that, rounded once: (1, out / 2).
    """
    num_rows, size = weight.shape
    is_gated = activation is not None
    assert x.shape == (1, size) and x.stride(1) == 1 and takes_weight(weight, is_gated=is_gated), (x.shape, size)
    num_out = num_rows // 2 if is_gated else num_rows
    block_in, block_out = _blocks(size, is_gated)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    one_row_linear_kernel[(num_out // block_out,)](
        x,
        weight,
        bias,
        out,
        OUT=num_out,
        IN=size,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        GATED=is_gated,
        HAS_BIAS=bias is not None,
        **activation_constants(activation),
        **dependent_launch(x.device),
    )
    return out


def _blocks(size: int, is_gated: bool) -> tuple[int, int]:
    """Columns and rows of a program; the columns are the largest power of two that divides ``size``, up to a limit."""
    block_in = min(size & -size, _MAX_BLOCK_IN)
    block_out = max(_BLOCK_ELEMENTS // block_in, _MIN_BLOCK_OUT)
    return block_in, block_out // 2 if is_gated else block_out
