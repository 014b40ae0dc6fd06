"""A linear layer applied to one row, as in a decode step of one request: it takes as long as reading the weight.

::

    weight (out, in) = [ rows of program 0 ]     program i: BLOCK_OUT whole rows, BLOCK_IN columns at a time
                       [ rows of program 1 ]     gated: BLOCK_OUT rows of gate and BLOCK_OUT of up, whose products
                       ...                       the activation joins

Libraries cut one row into tiles for matrix units, split the columns over programs, and then add up their sums.  Here a
program multiplies as it reads, and reads its weight before the kernel that makes ``x`` has ended
(``dependent_launch_triton``): as many columns as registers hold, and others into the second-level cache.
"""

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    LINE_BYTES,
    dependent_launch,
    let_next_begin,
    prefetch_weights,
    prefetched_columns,
    wait_for_previous,
)
from tp_engine.kernels.elementwise_triton import RELU2, activation_constants, gated, squared_relu
from tp_engine.kernels.jit import jit
from tp_engine.model_config.mlp import Activation

_MAX_BLOCK_IN, _MIN_BLOCK_IN = 4096, 128
_BLOCK_ELEMENTS = 4096
_MIN_BLOCK_OUT = 2
_THREADS = 128
# 32-bit registers of each thread for columns that are read before the wait.
_MOST_REGISTERS = 48


@jit
def one_row_linear_kernel(
    x, weight, bias, out,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, HELD: tl.constexpr,
    PREFETCHED: tl.constexpr, PER_LINE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_OUT of the OUT results; with GATED, ``weight`` has twice as many rows, gate then up.

    HELD columns are in registers before the wait, and PREFETCHED more are on their way into the cache.
    """
    let_next_begin(PDL)
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    line = weight + row.to(tl.int64)[:, None] * IN
    place = line + column[None, :]
    up_place = place + OUT * IN
    held = ()
    held_up = ()
    for start in tl.static_range(0, HELD, BLOCK_IN):
        held += (tl.load(place + start),)
        if GATED:
            held_up += (tl.load(up_place + start),)
    for start in tl.static_range(HELD, HELD + PREFETCHED, BLOCK_IN):
        later = line + (start + tl.arange(0, BLOCK_IN // PER_LINE) * PER_LINE)[None, :]
        prefetch_weights(later, PDL)
        if GATED:
            prefetch_weights(later + OUT * IN, PDL)
    wait_for_previous(PDL)
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    up_sums = sums
    for start in tl.static_range(0, IN, BLOCK_IN):
        values = tl.load(x + start + column).to(tl.float32)
        weights = held[start // BLOCK_IN] if start < HELD else tl.load(place + start)
        sums += weights.to(tl.float32) * values[None, :]
        if GATED:
            up_weights = held_up[start // BLOCK_IN] if start < HELD else tl.load(up_place + start)
            up_sums += up_weights.to(tl.float32) * values[None, :]
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + OUT + row).to(tl.float32)
        result = gated(result, up, KIND, ALPHA, LIMIT)
    elif KIND == RELU2:
        result = squared_relu(result)
    tl.store(out + row, result.to(out.dtype.element_ty))


def takes_weight(weight: torch.Tensor, *, is_gated: bool = False) -> bool:
    """Whether ``one_row_linear_triton`` takes a weight of this shape."""
    num_rows, size = weight.shape
    block_in, block_out = _blocks(size, is_gated)
    is_whole = num_rows % (2 * block_out if is_gated else block_out) == 0
    return weight.is_contiguous() and block_in >= _MIN_BLOCK_IN and is_whole


def one_row_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
) -> torch.Tensor:
    """Multiply ``x`` (1, in) by ``weight`` (out, in) and add ``bias`` (out,), in float32; returns (1, out).

    With an ``activation`` that has a gate, the weight is gate above up, and the result is (1, out / 2).
    """
    num_rows, size = weight.shape
    is_gated = activation is not None and activation.num_parts == 2
    assert x.shape == (1, size) and x.stride(1) == 1 and takes_weight(weight, is_gated=is_gated), (x.shape, size)
    num_out = num_rows // 2 if is_gated else num_rows
    block_in, block_out = _blocks(size, is_gated)
    out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    itemsize = weight.dtype.itemsize
    registers = block_in * block_out * (1 + is_gated) * itemsize // (4 * _THREADS)
    held = min(size, max(1, _MOST_REGISTERS // registers) * block_in)
    one_row_linear_kernel[(num_out // block_out,)](
        x, weight, bias, out,
        OUT=num_out, IN=size, BLOCK_OUT=block_out, BLOCK_IN=block_in, HELD=held,
        PREFETCHED=prefetched_columns(size - held, block_out * (1 + is_gated), itemsize, block_in),
        PER_LINE=LINE_BYTES // itemsize, HAS_BIAS=bias is not None, num_warps=_THREADS // 32,
        **activation_constants(activation), **dependent_launch(x.device),
    )  # fmt: skip
    return out


def _blocks(size: int, is_gated: bool) -> tuple[int, int]:
    """Columns and rows of a program; the columns are the largest power of two that divides ``size``, up to a limit."""
    block_in = min(size & -size, _MAX_BLOCK_IN)
    block_out = max(_BLOCK_ELEMENTS // block_in, _MIN_BLOCK_OUT)
    return block_in, block_out // 2 if is_gated else block_out
