"""What Triton kernels of layers with a recurrent state (``kernels/recurrent.py``) share, and their causal convolutions:
that of a decode step, and that of prompts, one launch each.

Padding rows read and write no state.  The programs of a row with draft rows take their tokens too, and write the inputs
to keep after each to its slot; those of draft rows do nothing.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    begin_program,
    begin_row_block,
    dependent_launch,
    launch_row_blocks,
)
from tp_engine.kernels.jit import jit
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

_BLOCK = 256
_WARPS = 2
# Of a program for a chunk.
_TOKENS, _CHANNELS, _CHUNK_WARPS = 16, 128, 4
# A state has at least as many elements as threads: two threads must not update the same element in place.
_MIN_BLOCK = 16
_ELEMENTS_PER_THREAD = 32
_MAX_WARPS = 16


@jit
def silu(x):
    """Float32; nothing overflows."""
    return x / (1.0 + tl.exp(-x))


@jit
def softplus(x):
    """log(1 + exp(x)), float32, with a small relative error for any x, because a slow decay is a product of many steps.

    log(1 + e) = 2 artanh(s) with s = e / (2 + e), at most 1/3 for e = exp(-|x|): seven terms of the series.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = 1.0 / 9 + square * (1.0 / 11 + square * (1.0 / 13))
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * series)))
    return tl.where(x > 0, x, 0.0) + 2.0 * s * series


@jit
def load_run(runs, own, HAS_RUNS: tl.constexpr):
    """The first draft row of row ``own``, which its others follow, and their number, -1 for a draft row."""
    first, count = own, 0
    if HAS_RUNS:
        first = tl.load(runs + 2 * own).to(tl.int64)
        count = tl.load(runs + 2 * own + 1)
    return first, count


@jit
def row_of(token, own, first):
    """The row of the ``token``-th token of the run of row ``own``."""
    return tl.where(token == 0, own, first + token - 1)


@jit
def input_at(place, mask, SIZE: tl.constexpr, IS_GATED: tl.constexpr):
    """A token's inputs, float32; if IS_GATED, times their gates, 2 SIZE elements further on."""
    item = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        item *= tl.load(place + 2 * SIZE, mask=mask, other=0.0).to(tl.float32)
    return item


@jit
def causal_conv_kernel(
    mixed, weight, bias, kept, slots, runs, out, mixed_stride, slot_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RUNS: tl.constexpr,
    IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK of the SIZE channels of one row, and of its draft rows, the last one first, because the
    row's own slot holds the inputs before all of them.  SiLU follows, or if IS_GATED the output's gate."""
    own, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    before = kept + tl.load(slots + own).to(tl.int64) * slot_stride + column
    first, count = load_run(runs, own, HAS_RUNS)
    for turn in range(count + 1):
        token = count - turn
        row = row_of(token, own, first)
        slot = tl.load(slots + row).to(tl.int64)
        is_kept = inside & (slot >= 0)
        own_input = mixed + row * mixed_stride + column
        item = input_at(own_input, inside, SIZE, IS_GATED)
        place = kept + slot * slot_stride + column
        total = item * tl.load(weight + (TAPS - 1) * SIZE + column, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0)
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
            tl.debug_barrier()  # all threads have read this tap before the next store overwrites it
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
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """Convolve one token of each row, ``mixed`` (B, ...), whose first C elements are inputs, into ``out`` (B, C), with
    SiLU, and update the inputs in ``states``.  ``bias`` (C,) float32.

    If ``is_gated``, the next C elements are gates of the output, instead of SiLU, and the C after them gates of the
    input.  ``weight`` (taps, C) float32.  Rows of ``mixed`` may lie apart.
    """
    taps, channels = weight.shape
    assert mixed.stride(1) == slots.stride(0) == 1, (mixed.stride(), slots.stride())
    assert states.conv[0].is_contiguous() and out.is_contiguous(), "a slot is contiguous"
    assert runs is None or runs.is_contiguous(), runs.stride()
    arguments = mixed, weight, bias, states.conv, slots, runs, out, mixed.stride(0), states.conv.stride(0)
    constants = {"TAPS": taps, "HAS_BIAS": bias is not None, "HAS_RUNS": runs is not None, "IS_GATED": is_gated}
    launch_row_blocks(
        causal_conv_kernel, mixed, len(mixed), channels, *arguments, most=_BLOCK, **constants, num_warps=_WARPS
    )


# A step's chunks follow its decodes, so they begin at any address.
@triton.jit(do_not_specialize_on_alignment=["mixed"])
@no_type_check
def conv_chunks_kernel(
    mixed, weight, bias, kept, out, tiles, mixed_stride, slot_stride,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK of the SIZE channels of up to TOKENS tokens of a chunk.  The programs of its first
    tokens, which alone read the inputs kept before, also store those to keep."""
    begin_program(PDL)
    start, count, slot, is_fresh, block = load_tile(tiles)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    token = block * TOKENS + tl.arange(0, TOKENS)
    is_read = (slot >= 0) & (is_fresh == 0)
    place = kept + slot * slot_stride + column
    rows = mixed + start * mixed_stride + column
    total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        at = token + tap - (TAPS - 1)
        is_own = inside[None, :] & (at >= 0)[:, None] & (at < count)[:, None]
        item = input_at(rows[None, :] + at.to(tl.int64)[:, None] * mixed_stride, is_own, SIZE, IS_GATED)
        if tap < TAPS - 1:
            before = place[None, :] + (at + TAPS - 1)[:, None] * SIZE
            item += tl.load(before, mask=inside[None, :] & ((at < 0) & is_read)[:, None], other=0.0)
        total += item * tl.load(weight + tap * SIZE + column, mask=inside, other=0.0)[None, :]
    is_own = inside[None, :] & (token < count)[:, None]
    row = start + token[:, None]
    if IS_GATED:
        total *= tl.load(mixed + row * mixed_stride + SIZE + column[None, :], mask=is_own, other=0.0).to(tl.float32)
    else:
        total = silu(total)
    tl.store(out + row * SIZE + column[None, :], total.to(out.dtype.element_ty), mask=is_own)
    is_kept = inside & (slot >= 0) & (block == 0)
    for tap in tl.static_range(TAPS - 1):
        at = count + tap - (TAPS - 1)
        item = input_at(rows + at.to(tl.int64) * mixed_stride, is_kept & (at >= 0), SIZE, IS_GATED)
        item += tl.load(place + (tap + count) * SIZE, mask=is_kept & is_read & (at < 0), other=0.0)
        tl.debug_barrier()  # all threads have read what the store overwrites
        tl.store(place + tap * SIZE, item, mask=is_kept)


@jit
def load_state(
    states, slot, slot_stride, is_fresh, head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The program's rows i (parts, 1, WIDTH) and columns j (VALUES,) of the matrix of a chunk's ``head``, where it is,
    which of its elements exist, and the matrix (parts, WIDTH, VALUES), which is zero if the chunk is fresh or has no
    slot."""
    i = columns_in_parts(KEY_BLOCK, WIDTH)
    row, j = tl.trans(i, 0, 2, 1), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside = (row < KEY_DIM) & (j < VALUE_DIM)[None, None, :] & (slot >= 0)
    own = states + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + row * VALUE_DIM + j[None, None, :]
    return i, j, own, inside, tl.load(own, mask=inside & (is_fresh == 0), other=0.0)


@jit
def columns_in_parts(SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The numbers below SIZE in parts: (parts, 1, WIDTH)."""
    return tl.arange(0, SIZE // WIDTH)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]


@jit
def load_tile(tiles):
    """The program's row of ``tile_table``: the chunk's first token (64 bits), its number of tokens, its slot (64 bits),
    whether it is fresh, and which of its tiles this is."""
    own = tiles + tl.program_id(0) * 5
    return (
        tl.load(own).to(tl.int64), tl.load(own + 1), tl.load(own + 2).to(tl.int64), tl.load(own + 3), tl.load(own + 4)
    )  # fmt: skip


@jit
def product(a, b):
    """a b, float32: on tensor cores in three parts (tf32x3), which keeps that precision."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def product_of_parts(a, b):
    """a b, whose inner dimension is in parts: (parts, m, k) and (parts, k, n) -> (m, n).

    Each warp has some of the parts: whole operands would not fit into its registers, because ``product`` splits each
    element in two."""
    return tl.sum(product(a, b), axis=0)


@jit
def product_with_parts(a, b):
    """a b, whose columns are in parts: (m, k) and (parts, k, n) -> (parts, m, n)."""
    return product(tl.broadcast_to(a[None], [b.shape[0], a.shape[0], a.shape[1]]), b)


@jit
def added_product(state, a, b):
    """``state`` (parts, k, n) + a' b, of ``a`` (parts, m, k) and ``b`` (m, n)."""
    return state + product(tl.trans(a, 0, 2, 1), tl.broadcast_to(b[None], [a.shape[0], b.shape[0], b.shape[1]]))


@jit
def last_of(sums, count, SIZE: tl.constexpr):
    """Of ``sums`` (SIZE,), the one of the last of ``count`` tokens.  A sum of all steps would be of another order: sums
    are large where a state is forgotten fast, and the last token's decay, exp of a difference, would not be 1."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == tl.minimum(count, SIZE) - 1, sums, 0.0), axis=0)


@jit
def decays_of(sums, SIZE: tl.constexpr):
    """D (SIZE, SIZE): exp of the ``sums`` at token i minus those at token j; 0 above the diagonal."""
    is_below = tl.arange(0, SIZE)[:, None] >= tl.arange(0, SIZE)[None, :]
    return tl.where(is_below, tl.exp(tl.where(is_below, sums[:, None] - sums[None, :], 0.0)), 0.0)


def conv_chunks(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates | None,
    chunks: list[Chunk],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """Convolve the tokens of ``chunks``, ``mixed`` (N, ...), into ``out`` (N, C), in one launch; the rest as in
    ``causal_conv``."""
    taps, channels = weight.shape
    assert mixed.stride(1) == 1 and out.is_contiguous(), (mixed.stride(), out.stride())
    kept = weight if states is None else states.conv  # without states nothing is read or written there
    assert kept[0].is_contiguous(), "a slot is contiguous"
    tiles = tile_table(chunks, _TOKENS, states, mixed.device)
    conv_chunks_kernel[(len(tiles), triton.cdiv(channels, _CHANNELS))](
        mixed, weight, bias, kept, out, tiles, mixed.stride(0), kept.stride(0),
        SIZE=channels, TOKENS=_TOKENS, BLOCK=_CHANNELS, TAPS=taps, HAS_BIAS=bias is not None, IS_GATED=is_gated,
        num_warps=_CHUNK_WARPS, **dependent_launch(mixed.device),
    )  # fmt: skip


def tile_table(chunks: list[Chunk], size: int | None, states: LayerStates | None, device: torch.device) -> torch.Tensor:
    """The chunks' tiles of ``size`` tokens, or one tile per chunk if None: (tiles, 5) int32 on ``device``, namely
    ``start``, ``num_tokens``, slot (-1 for none, or without ``states``), ``is_fresh``, and the tile's index in its
    chunk."""
    rows = [
        (start, count, slot if states is not None and slot is not None else -1, int(is_fresh), tile)
        for start, count, slot, is_fresh in chunks
        for tile in range(1 if size is None else triton.cdiv(count, size))
    ]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, 5).to(device, non_blocking=True)


def scan_blocks(kind: StateKind, columns: int) -> dict[str, int]:
    """The constants of launches whose programs hold up to ``columns`` columns of a state, in parts."""
    blocks = matrix_blocks(kind)
    key, value = blocks["KEY_BLOCK"], blocks["VALUE_BLOCK"]
    return {"KEY_BLOCK": key, "VALUE_BLOCK": value, "WIDTH": _MIN_BLOCK, "VALUES": min(value, columns)}


def matrix_blocks(kind: StateKind) -> dict[str, int]:
    """The constants of a launch whose programs hold a whole matrix of a state, and their number of warps."""
    key, value = (max(int(triton.next_power_of_2(dim)), _MIN_BLOCK) for dim in (kind.key_dim, kind.value_dim))
    num_warps = key * value // (32 * _ELEMENTS_PER_THREAD)
    return {"KEY_BLOCK": key, "VALUE_BLOCK": value, "num_warps": min(max(num_warps, 1), _MAX_WARPS)}
