"""top_k, then top_p and min_p, without a sort: a program searches for a row's threshold bit by bit.

The Triton twin of ``sampling``'s methods RANKED and SORTED: ``top_keys_triton`` finds a rank's candidates for the
others, ``draw`` searches all of a row's logits, and ``narrow`` only values in registers (``candidates_triton`` calls
both).

Values are compared as ``ordered_bits`` (their order as integers), so a threshold is a 32-bit number.  It is found from
its highest bits down, two at a time: of the three numbers that extend the known bits, the largest that still has enough
values above it.  That takes 16 passes over the row instead of a sort::

    top_k    the largest t with            #(values >= t) >= k;          of the values equal to t, the lowest ids
    top_p    the largest t with   weight of (values >= t) >= p * total;  of the values equal to t, as many as p takes

Weights are the twin's integers (fixed point), whose sums are exact in any order.
"""

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row, dependent_launch
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling.scores_triton import (
    LAUNCH_OPTIONS,
    LOWEST_KEY,
    MIN_INT32,
    exponential,
    gumbel_noise,
    id_of,
    ordered_bits,
    pack_keys,
    pack_scores,
    value_of,
)
from tp_engine.kernels.sampling.tables import SamplingTables

_BLOCK = 4096
_MAX_INT32 = tl.constexpr(2**31 - 1)
_WEIGHT_ONE = tl.constexpr(float(1 << 36))


@jit
def load_block(logits, start, num_ids, BLOCK: tl.constexpr):
    """Columns, which of them exist, their values as float32 and their ordered bits."""
    column = start + tl.arange(0, BLOCK)
    inside = column < num_ids
    values = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    return column, inside, values, ordered_bits(values)


@jit
def fixed_weights(values, temperature, highest):
    """int64 fixed point; ``highest`` is the largest value over the temperature."""
    return (exponential(tl.math.div_rn(values, temperature) - highest) * _WEIGHT_ONE).to(tl.int64)


@jit
def amounts_of(values, temperature, highest, WEIGHTED: tl.constexpr):
    """What each value counts, int64: its weight, or 1."""
    return fixed_weights(values, temperature, highest) if WEIGHTED else tl.full(values.shape, 1, tl.int64)


@jit
def measure_above(logits, num_ids, threshold, temperature, highest, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The number, or the weight, of the values above ``threshold`` (ordered bits)."""
    total = tl.full((BLOCK,), 0, tl.int64)
    for start in range(0, num_ids, BLOCK):
        _, inside, values, ordered = load_block(logits, start, num_ids, BLOCK)
        amounts = amounts_of(values, temperature, highest, WEIGHTED)
        total += tl.where(inside & (ordered > threshold), amounts, 0)
    return tl.sum(total, axis=0)


@jit
def search(logits, num_ids, target, floor, temperature, highest, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest t (ordered bits) with at least ``target`` (int64) in the values that are >= t and > ``floor``; the
    smallest int32 if there is none.
    """
    found = tl.full((), 0, tl.int64)  # ordered bits + 2**31
    for step in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        low = (found + unit - 2147483648).to(tl.int32)
        middle = (found + 2 * unit - 2147483648).to(tl.int32)
        high = (found + 3 * unit - 2147483648).to(tl.int32)
        in_low = tl.full((BLOCK,), 0, tl.int64)
        in_middle = tl.full((BLOCK,), 0, tl.int64)
        in_high = tl.full((BLOCK,), 0, tl.int64)
        for start in range(0, num_ids, BLOCK):
            _, inside, values, ordered = load_block(logits, start, num_ids, BLOCK)
            amounts = tl.where(inside & (ordered > floor), amounts_of(values, temperature, highest, WEIGHTED), 0)
            in_low += tl.where(ordered >= low, amounts, 0)
            in_middle += tl.where(ordered >= middle, amounts, 0)
            in_high += tl.where(ordered >= high, amounts, 0)
        enough = (tl.sum(in_low, axis=0) >= target).to(tl.int64)
        enough += (tl.sum(in_middle, axis=0) >= target).to(tl.int64)
        enough += (tl.sum(in_high, axis=0) >= target).to(tl.int64)
        found += enough * unit
    return (found - 2147483648).to(tl.int32)


@jit
def find_top_k(logits, num_ids, top_k, BLOCK: tl.constexpr):
    """The k-th largest value (ordered bits), and how many of the values equal to it belong to the top k."""
    wanted = top_k.to(tl.int64)
    threshold = search(logits, num_ids, wanted, MIN_INT32, 1.0, 0.0, False, BLOCK)
    return threshold, wanted - measure_above(logits, num_ids, threshold, 1.0, 0.0, False, BLOCK)


@jit
def find_nucleus(logits, num_ids, threshold, num_equal, top_p, temperature, highest, BLOCK: tl.constexpr):
    """``threshold`` and ``num_equal``, as ``find_top_k`` gives them, narrowed to the nucleus."""
    above = measure_above(logits, num_ids, threshold, temperature, highest, True, BLOCK)
    weight = fixed_weights(value_of(threshold), temperature, highest)
    total = above + num_equal * weight
    wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    border = search(logits, num_ids, wanted, threshold, temperature, highest, True, BLOCK)
    # If the values above the threshold weigh too little, the threshold stays the border.
    if border > threshold:
        threshold = border
        num_equal = tl.full((), _MAX_INT32, tl.int64)
        above = measure_above(logits, num_ids, threshold, temperature, highest, True, BLOCK)
        weight = fixed_weights(value_of(threshold), temperature, highest)
    if weight > 0:
        # The j-th (from 0) of the equal values is kept while above + j * weight < wanted.
        num_equal = tl.minimum(num_equal, (wanted - above + weight - 1) // weight)
    return threshold, num_equal


@jit
def top_keys_kernel(
    logits, rows, top_ks, out, logits_stride, num_ids, first_id, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the rank keys of a row's top_k, in the order of their ids; none if top_k is above WIDTH."""
    place = begin_row(PDL)
    top_k = tl.load(top_ks + tl.maximum(tl.load(rows + place).to(tl.int64), 0))
    count = tl.where(top_k <= WIDTH, tl.minimum(top_k, num_ids), 0)
    slot = tl.arange(0, WIDTH)
    tl.store(out + place * WIDTH + slot, tl.full((WIDTH,), LOWEST_KEY, tl.int64), mask=slot >= count)
    if count > 0:
        logits += place * logits_stride
        threshold, num_equal = find_top_k(logits, num_ids, count, BLOCK)
        seen_equal = tl.full((), 0, tl.int64)
        written = tl.full((), 0, tl.int64)
        for start in range(0, num_ids, BLOCK):
            column, inside, values, ordered = load_block(logits, start, num_ids, BLOCK)
            candidate = inside & (ordered >= threshold)
            if tl.sum(candidate.to(tl.int32), axis=0) > 0:
                is_equal = (candidate & (ordered == threshold)).to(tl.int64)
                is_early = seen_equal + tl.cumsum(is_equal, axis=0) <= num_equal
                kept = candidate & ((is_equal == 0) | is_early)
                to = written + tl.cumsum(kept.to(tl.int64), axis=0) - 1
                tl.store(out + place * WIDTH + to, pack_keys(values, column + first_id), mask=kept)
                seen_equal += tl.sum(is_equal, axis=0)
                written += tl.sum(kept.to(tl.int64), axis=0)


@jit
def draw(logits, num_ids, parameters, top_k, word_1, word_2, BLOCK: tl.constexpr):
    """The token of a row with top_k, by all three filters and noise."""
    temperature, top_p, log_min_p = tl.load(parameters), tl.load(parameters + 1), tl.load(parameters + 2)
    largest = tl.full((BLOCK,), MIN_INT32, tl.int32)
    for start in range(0, num_ids, BLOCK):
        _, inside, _, ordered = load_block(logits, start, num_ids, BLOCK)
        largest = tl.maximum(largest, tl.where(inside, ordered, MIN_INT32))
    first = tl.max(largest, axis=0)
    highest = tl.math.div_rn(value_of(first), temperature)

    threshold, num_equal = find_top_k(logits, num_ids, top_k, BLOCK)
    if top_p < 1.0:
        threshold, num_equal = find_nucleus(logits, num_ids, threshold, num_equal, top_p, temperature, highest, BLOCK)

    best = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
    seen_equal = tl.full((), 0, tl.int64)
    for start in range(0, num_ids, BLOCK):
        column, inside, values, ordered = load_block(logits, start, num_ids, BLOCK)
        is_equal = (inside & (ordered == threshold)).to(tl.int64)
        num_here = tl.sum(is_equal, axis=0)
        kept = inside & (ordered > threshold)
        if num_here > 0:
            kept = kept | ((is_equal > 0) & (seen_equal + tl.cumsum(is_equal, axis=0) <= num_equal))
            seen_equal += num_here
        scaled = tl.math.div_rn(values, temperature)
        kept = kept & ((scaled - highest >= log_min_p) | (ordered == first))
        keys = pack_scores(gumbel_noise(column, word_1, word_2) + scaled, column)
        best = tl.maximum(best, tl.where(kept, keys, LOWEST_KEY))
    return id_of(tl.max(best, axis=0))


def top_keys_triton(
    logits: torch.Tensor, rows: torch.Tensor, tables: SamplingTables, *, first_id: int, width: int
) -> torch.Tensor:
    """Rank keys (n, width) int64 of the top_k of ``logits`` (n, num_ids), in the order of their ids, then LOWEST_KEY.

    ``rows`` (n,) as for ``best_tokens_triton``; rows whose top_k is above ``width``, a power of two, get no keys.
    """
    num_rows, num_ids = logits.shape
    assert num_ids > 0 and logits.stride(1) == 1, (logits.shape, logits.stride())
    out = torch.empty((num_rows, width), dtype=torch.int64, device=logits.device)
    top_keys_kernel[(num_rows,)](
        logits, rows, tables.top_k, out, logits.stride(0), num_ids, first_id,
        WIDTH=width, BLOCK=_BLOCK, num_warps=16, **LAUNCH_OPTIONS, **dependent_launch(logits.device),
    )  # fmt: skip
    return out


@jit
def next_digit(ordered, counted, amounts, target, found, shift, WEIGHTED: tl.constexpr):
    """``found`` (ordered bits + 2**31) with two more bits, from ``shift`` on: the largest that still has ``target``.

    ``ordered`` (BLOCK,) are in registers.  Each ``counted`` value counts its ``amounts`` if WEIGHTED, else 1; the
    others count nothing.
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


@jit
def search_registers(ordered, counted, amounts, target, WEIGHTED: tl.constexpr):
    """``search`` of values that are in registers."""
    found = tl.full((), 0, tl.int64)
    for step in range(16):
        found = next_digit(ordered, counted, amounts, target, found, 30 - 2 * step, WEIGHTED)
    return (found - 2147483648).to(tl.int32)


@jit
def narrow(values, ordered, exists, top_k, top_p, temperature, highest, cut):
    """The threshold (ordered bits) of top_k, then top_p; how many of the values equal to it are kept; and whether it is
    the threshold of the whole row, whose other values are all below ``cut``.
    """
    threshold = search_registers(ordered, exists, ordered, top_k.to(tl.int64), False)
    num_equal = top_k.to(tl.int64) - tl.sum((exists & (ordered > threshold)).to(tl.int64), axis=0)
    is_known = threshold >= cut
    if top_p < 1.0:
        amounts = fixed_weights(values, temperature, highest)
        above = tl.sum(tl.where(exists & (ordered > threshold), amounts, 0), axis=0)
        weight = fixed_weights(value_of(threshold), temperature, highest)
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
