"""The threshold search of ``sampling_filter_triton`` among values that one program has in its registers."""

from __future__ import annotations

import triton
import triton.language as tl

from tp_engine.kernels.sampling_filter_triton import fixed_weights, value_of

_MIN_INT32 = tl.constexpr(-(2**31))
_MAX_INT32 = tl.constexpr(2**31 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def next_digit(  # type: ignore[no-untyped-def]
    ordered,
    counted,
    amounts,
    target,
    found,
    shift,
    WEIGHTED: tl.constexpr,  # noqa: N803
):
    """``found`` (ordered bits + 2**31) with two more bits, from ``shift`` on: the largest that still has ``target``.

    ``ordered`` (BLOCK,) are in registers; those that are not ``counted`` do not count, the others their ``amounts``,
    or 1.
    """
    unit = tl.full((), 1, tl.int64) << shift
    above_low = counted & (ordered >= (found + unit - 2147483648).to(tl.int32))
    above_middle = counted & (ordered >= (found + 2 * unit - 2147483648).to(tl.int32))
    above_high = counted & (ordered >= (found + 3 * unit - 2147483648).to(tl.int32))
    if WEIGHTED:
        in_low = tl.sum(tl.where(above_low, amounts, 0), axis=0)
        in_middle = tl.sum(tl.where(above_middle, amounts, 0), axis=0)
        in_high = tl.sum(tl.where(above_high, amounts, 0), axis=0)
    else:  # three counts of less than 2**20 in one sum
        packed = above_low.to(tl.int64) + (above_middle.to(tl.int64) << 20) + (above_high.to(tl.int64) << 40)
        counts = tl.sum(packed, axis=0)
        in_low, in_middle, in_high = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
    enough = (in_low >= target).to(tl.int64) + (in_middle >= target).to(tl.int64) + (in_high >= target).to(tl.int64)
    return found + enough * unit


@triton.jit  # type: ignore[untyped-decorator]
def search_registers(ordered, counted, amounts, target, WEIGHTED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """``sampling_filter_triton.search`` of values that are in registers."""
    found = tl.full((), 0, tl.int64)
    for step in range(16):
        found = next_digit(ordered, counted, amounts, target, found, 30 - 2 * step, WEIGHTED)
    return (found - 2147483648).to(tl.int32)


@triton.jit
def narrow(  # type: ignore[no-untyped-def]
    values,
    ordered,
    exists,
    num_ids,
    top_k,
    top_p,
    temperature,
    highest,
    all_weight,
    cut,
):
    """The threshold (ordered bits) and how many of the values equal to it are kept: top_k, then top_p.

    And whether it is the row's, which has other values too, all of them below ``cut``.
    """
    threshold = tl.full((), _MIN_INT32, tl.int32)
    num_equal = tl.full((), 0, tl.int64)
    is_known = tl.full((), 1, tl.int1)
    if top_k < num_ids:
        threshold = search_registers(ordered, exists, ordered, top_k.to(tl.int64), False)
        num_equal = top_k.to(tl.int64) - tl.sum((exists & (ordered > threshold)).to(tl.int64), axis=0)
        is_known = threshold >= cut
    if top_p < 1.0:
        amounts = fixed_weights(values, temperature, highest)
        above = tl.sum(tl.where(exists & (ordered > threshold), amounts, 0), axis=0)
        weight = fixed_weights(value_of(threshold), temperature, highest)
        total = all_weight
        if top_k < num_ids:
            total = above + num_equal * weight
        wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        border = search_registers(ordered, exists & (ordered > threshold), amounts, wanted, True)
        if border > threshold:
            threshold = border
            num_equal = tl.full((), _MAX_INT32, tl.int64)
            above = tl.sum(tl.where(exists & (ordered > threshold), amounts, 0), axis=0)
            weight = fixed_weights(value_of(threshold), temperature, highest)
        if weight > 0:
            num_equal = tl.minimum(num_equal, (wanted - above + weight - 1) // weight)
    return threshold, num_equal, is_known & (threshold >= cut)
