"""The causal convolution of a decode step in one launch, for layers with a recurrent state (``kernels/recurrent.py``).

Padding rows read and write no state.  The programs of a row with draft rows take their tokens too, in order, and write
the inputs behind each to its slot; those of draft rows do nothing.
"""

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row_block, launch_row_blocks
from tp_engine.kernels.jit import jit
from tp_engine.kernels.recurrent import LayerStates

_BLOCK = 256
_WARPS = 2


@jit
def silu(x):
    """Float32; nothing overflows."""
    return x / (1.0 + tl.exp(-x))


@jit
def input_at(place, mask, SIZE: tl.constexpr, IS_GATED: tl.constexpr):
    """Return a token's inputs, float32; if IS_GATED, times their gates, which lie 2 SIZE behind."""
    item = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        item *= tl.load(place + 2 * SIZE, mask=mask, other=0.0).to(tl.float32)
    return item


@jit
def causal_conv_kernel(
    mixed, weight, kept, slots, runs, out, mixed_stride, slot_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, HAS_RUNS: tl.constexpr, IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK of the SIZE channels of one row, and of its draft rows: the last one first, because the
    inputs before all of them are in the slot of the row itself.  SiLU follows, or if IS_GATED the output's gate."""
    own, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    before = kept + tl.load(slots + own).to(tl.int64) * slot_stride + column
    first, count = own, 0
    if HAS_RUNS:
        first = tl.load(runs + 2 * own).to(tl.int64)
        count = tl.load(runs + 2 * own + 1)
    for turn in range(count + 1):
        token = count - turn
        row = tl.where(token == 0, own, first + token - 1)
        slot = tl.load(slots + row).to(tl.int64)
        is_kept = inside & (slot >= 0)
        own_input = mixed + row * mixed_stride + column
        item = input_at(own_input, inside, SIZE, IS_GATED)
        place = kept + slot * slot_stride + column
        total = item * tl.load(weight + (TAPS - 1) * SIZE + column, mask=inside, other=0.0)
        for tap in tl.static_range(TAPS - 1):
            at = token + tap - (TAPS - 1)  # among the run's tokens
            old = tl.load(before + (tap + token) * SIZE, mask=is_kept & (at < 0), other=0.0)
            if HAS_RUNS:
                earlier = tl.where(at <= 0, own, first + at - 1)
                of_run = input_at(mixed + earlier * mixed_stride + column, inside & (at >= 0), SIZE, IS_GATED)
                old = tl.where(at < 0, old, of_run)
            total += old * tl.load(weight + tap * SIZE + column, mask=inside, other=0.0)
            if tap > 0:
                tl.store(place + (tap - 1) * SIZE, old, mask=is_kept)
            tl.debug_barrier()  # all threads have read this tap before the next store, which is to its place
        if TAPS > 1:
            tl.store(place + (TAPS - 2) * SIZE, item, mask=is_kept)
        if IS_GATED:
            total *= tl.load(own_input + SIZE, mask=inside, other=0.0).to(tl.float32)
        else:
            total = silu(total)
        tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=inside)


def causal_conv(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None,
    out: torch.Tensor,
    *,
    is_gated: bool = False,
) -> None:
    """Convolve one token of each row, ``mixed`` (B, ...), of which the first C elements are inputs, into ``out``
    (B, C), with SiLU.  The inputs that ``states`` keep move on.

    If ``is_gated``, the next C elements are gates of the output, in the place of SiLU, and those behind them gates of
    the input.  ``weight`` (taps, C) float32.  Rows of ``mixed`` may lie apart.
    """
    taps, channels = weight.shape
    assert mixed.stride(1) == slots.stride(0) == 1, (mixed.stride(), slots.stride())
    assert states.conv[0].is_contiguous() and out.is_contiguous(), "a slot is contiguous"
    assert runs is None or runs.is_contiguous(), runs.stride()
    arguments = mixed, weight, states.conv, slots, runs, out, mixed.stride(0), states.conv.stride(0)
    constants = {"TAPS": taps, "HAS_RUNS": runs is not None, "IS_GATED": is_gated}
    launch_row_blocks(
        causal_conv_kernel, mixed, len(mixed), channels, *arguments, most=_BLOCK, **constants, num_warps=_WARPS
    )
