"""Chunks of prompts by the gated delta rule: the Triton twin of ``gated_delta_net.gated_delta_net_prefill``, in four
launches for all prompts of a step.

::

    conv_chunks_kernel     tile x channels      mixed, kept inputs -> q, k, v after SiLU (float32)
    solve_tiles_kernel     tile x value head    U, W and the sums c of each tile of SIZE tokens, which need no state
    scan_tiles_kernel      chunk x value head   tile after tile: what its tokens read of the state, and the next state
    norm_outputs_kernel    token x value head   output divided by its root mean square, gated

The letters are those of ``gated_delta_net``.  Only the scan goes from tile to tile; each of its programs holds VALUES
columns of a state.  Products are of float32, on tensor cores in three parts each (tf32x3), which keeps float32's
precision.

I + A, unit lower triangular, is inverted by halves: with the inverses of its blocks of n rows on the diagonal in T, and
C the part of A that joins two of them to a block of 2 n, T - T C T has the inverses of those.  Every step multiplies by
inverses alone, which stay small where powers of A do not (keys that repeat).
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.gated_delta_net import LENGTH_EPS, DeltaRule
from tp_engine.kernels.gated_delta_net_triton import gated_norm, gates_of
from tp_engine.kernels.jit import jit
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.recurrent_triton import (
    conv_chunks,
    decays_of,
    load_state,
    load_tile,
    matrix_blocks,
    product,
    tile_table,
)

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)
_NORMED = 16  # tokens of a program
_TILE = 32  # tokens, and columns of a state: more of them spill
_WIDE_KEYS = 128  # of more, half as many tokens and columns


@jit
def inverse_of(below, SIZE: tl.constexpr):
    """The inverse of the unit lower triangular matrix (SIZE, SIZE) that has ``below`` below its diagonal."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    half = 1
    while half < SIZE:
        is_corner = (
            (row // (2 * half) == column // (2 * half)) & (row % (2 * half) >= half) & (column % (2 * half) < half)
        )
        inverse -= product(inverse, product(tl.where(is_corner, below, 0.0), inverse))
        half *= 2
    return inverse


@jit
def unit_rows(place, inside):
    """The rows at ``place``, each L2-normalised."""
    rows = tl.load(place, mask=inside, other=0.0)
    return rows * tl.rsqrt(tl.sum(rows * rows, axis=1) + _LENGTH_EPS)[:, None]


@jit
def solve_tiles_kernel(
    convolved, gates, log_decay, dt_bias, values_out, of_state_out, sums_out, tiles, gates_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one value head of up to SIZE tokens of a chunk."""
    begin_program(PDL)
    start, count, _, _, tile = load_tile(tiles)
    head, token = tl.program_id(1), tile * SIZE + tl.arange(0, SIZE)
    exists, row = token < count, start + token
    i, j = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_key, in_value = exists[:, None] & (i < KEY_DIM)[None, :], exists[:, None] & (j < VALUE_DIM)[None, :]
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    turned = convolved + row[:, None] * (2 * keys + values)
    key = unit_rows(turned + keys + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i[None, :], in_key)
    value = tl.load(turned + 2 * keys + head * VALUE_DIM + j[None, :], mask=in_value, other=0.0)
    beta, step = gates_of(gates, gates_stride, log_decay, dt_bias, row, head, exists, VALUE_HEADS)
    sums = tl.cumsum(step, axis=0)
    is_below = tl.arange(0, SIZE)[:, None] > tl.arange(0, SIZE)[None, :]
    system = tl.where(is_below, product(key, tl.trans(key)) * decays_of(sums, SIZE) * beta[:, None], 0.0)
    inverse = inverse_of(system, SIZE)
    place = row * VALUE_HEADS + head
    tl.store(sums_out + place, sums, mask=exists)
    tl.store(values_out + place[:, None] * VALUE_DIM + j[None, :], product(inverse, beta[:, None] * value), in_value)
    of_state = product(inverse, (beta * tl.exp(sums))[:, None] * key)
    tl.store(of_state_out + place[:, None] * KEY_DIM + i[None, :], of_state, in_key)


@jit
def scan_tiles_kernel(
    convolved, values_in, of_state_in, sums_in, states, out, chunks, slot_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, QUERY_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: VALUES columns of the state of one value head, through all tiles of a chunk."""
    begin_program(PDL)
    start, count, slot, is_fresh, _ = load_tile(chunks)
    head = tl.program_id(1)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    # fmt: off
    i, j, own, inside, state = load_state(
        states, slot, slot_stride, is_fresh, head, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUES)
    # fmt: on
    for first in range(0, count, SIZE):
        token = first + tl.arange(0, SIZE)
        exists, row = token < count, start + token
        in_key, in_value = exists[:, None] & (i < KEY_DIM)[None, :], exists[:, None] & (j < VALUE_DIM)[None, :]
        turned = convolved + row[:, None] * (2 * keys + values) + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        query = unit_rows(turned + i[None, :], in_key) * QUERY_SCALE
        key = unit_rows(turned + keys + i[None, :], in_key)
        place = row * VALUE_HEADS + head
        sums = tl.load(sums_in + place, mask=exists, other=0.0)
        last = tl.load(sums_in + (start + tl.minimum(first + SIZE, count) - 1) * VALUE_HEADS + head)
        value = tl.load(values_in + place[:, None] * VALUE_DIM + j[None, :], mask=in_value, other=0.0)
        of_state = tl.load(of_state_in + place[:, None] * KEY_DIM + i[None, :], mask=in_key, other=0.0)
        change = value - product(of_state, state)
        scores = product(query, tl.trans(key)) * decays_of(tl.where(exists, sums, last), SIZE)
        attended = product(query * tl.exp(sums)[:, None], state) + product(scores, change)
        tl.store(out + place[:, None] * VALUE_DIM + j[None, :], attended, mask=in_value)
        left = key * tl.where(exists, tl.exp(last - sums), 0.0)[:, None]
        state = tl.exp(last) * state + product(tl.trans(left), change)
    tl.store(own, state, mask=inside)


@jit
def norm_outputs_kernel(
    attended, mixed, weight, out, num_tokens, mixed_stride, eps,
    CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one value head of up to TOKENS tokens."""
    begin_program(PDL)
    row, j = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None], tl.arange(0, VALUE_BLOCK)[None, :]
    inside = (row < num_tokens) & (j < VALUE_DIM)
    column = tl.program_id(1) * VALUE_DIM + j
    z = tl.load(mixed + row * mixed_stride + CHANNELS + column, mask=inside, other=0.0)
    gain = tl.load(weight + j, mask=j < VALUE_DIM, other=0.0)
    place = row * (VALUE_HEADS * VALUE_DIM) + column
    read = tl.load(attended + place, mask=inside, other=0.0)
    result = gated_norm(read, (tl.sum(read * read, axis=1) / VALUE_DIM)[:, None], gain, z, eps)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def gated_delta_net_prefill_triton(
    mixed: torch.Tensor, gates: torch.Tensor, rule: DeltaRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """``gated_delta_net.gated_delta_net_prefill``; rows of ``mixed`` and ``gates`` may lie apart."""
    kind, num_tokens, device = rule.kind, len(mixed), mixed.device
    heads, width = kind.num_value_heads, kind.value_dim
    assert mixed.shape[1] == kind.num_channels + heads * width and gates.shape[1] == 2 * heads, (
        mixed.shape,
        gates.shape,
    )
    assert mixed.stride(1) == gates.stride(1) == 1, (mixed.stride(), gates.stride())
    out = torch.empty((num_tokens, heads * width), dtype=mixed.dtype, device=device)
    if not chunks:
        return out
    convolved = torch.empty((num_tokens, kind.num_channels), dtype=torch.float32, device=device)
    values, attended = torch.empty((2, num_tokens, heads * width), dtype=torch.float32, device=device).unbind()
    of_state = torch.empty((num_tokens, heads * kind.key_dim), dtype=torch.float32, device=device)
    sums = torch.empty((num_tokens, heads), dtype=torch.float32, device=device)
    recurrent = sums if states is None else states.recurrent  # without states nothing is read or written there
    assert states is None or recurrent[0].is_contiguous(), "a slot is contiguous"
    blocks = matrix_blocks(kind)
    size = columns = _TILE if kind.key_dim <= _WIDE_KEYS else _TILE // 2
    sizes = {
        "KEY_HEADS": kind.num_key_heads, "VALUE_HEADS": heads, "KEY_DIM": kind.key_dim, "VALUE_DIM": width,
        "KEY_BLOCK": blocks["KEY_BLOCK"], "SIZE": size, "num_warps": 8, **dependent_launch(device),
    }  # fmt: skip
    conv_chunks(mixed, rule.conv, states, chunks, convolved)
    tiles, whole = (tile_table(chunks, one, states, device) for one in (size, None))
    solve_tiles_kernel[(len(tiles), heads)](
        convolved, gates, rule.decay, rule.dt_bias, values, of_state, sums, tiles, gates.stride(0),
        VALUE_BLOCK=blocks["VALUE_BLOCK"], **sizes,
    )  # fmt: skip
    scan_tiles_kernel[(len(whole), heads, triton.cdiv(width, columns))](
        convolved, values, of_state, sums, recurrent, attended, whole, recurrent.stride(0),
        VALUES=columns, QUERY_SCALE=kind.key_dim**-0.5, num_stages=1, **sizes,
    )  # fmt: skip
    norm_outputs_kernel[(triton.cdiv(num_tokens, _NORMED), heads)](
        attended, mixed, rule.norm, out, num_tokens, mixed.stride(0), rule.eps,
        CHANNELS=kind.num_channels, VALUE_HEADS=heads, VALUE_DIM=width, VALUE_BLOCK=blocks["VALUE_BLOCK"],
        TOKENS=_NORMED, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return out
