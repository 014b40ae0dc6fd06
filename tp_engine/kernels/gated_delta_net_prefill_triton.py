"""Chunks of prompts by the gated delta rule: the Triton twin of ``gated_delta_net.gated_delta_net_prefill``, in four
launches for all prompts of a step.

::

    conv_chunks_kernel     tile x channels      mixed, kept inputs -> q, k, v after SiLU (float32)
    solve_tiles_kernel     tile x value head    U, W, scores and factors of each tile of SIZE tokens, without a state
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
    added_product,
    columns_in_parts,
    conv_chunks,
    decays_of,
    last_of,
    load_state,
    load_tile,
    product,
    product_of_parts,
    product_with_parts,
    scan_blocks,
    tile_table,
)

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)
_NORMED = 16  # tokens of a program
# Tokens of a tile, half as many where keys are wider, and columns of a state.  More of them spill.
_TILE, _WIDE_KEYS, _COLUMNS = 32, 128, 16
_WARPS, _STAGES = 8, 2


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
def inverse_lengths(rows):
    """One by the L2 norm of each of ``rows``, whose columns are in parts: (parts, m, k) -> (m,)."""
    return tl.rsqrt(tl.sum(tl.sum(rows * rows, axis=2), axis=0) + _LENGTH_EPS)


@jit
def solve_tiles_kernel(
    convolved, gates, log_decay, dt_bias, values_out, of_state_out, scores_out, factors_out, tiles, gates_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    QUERY_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one value head of up to SIZE tokens of a chunk.  The factors (tokens, value heads, 3) of a token are
    that of what its query reads of a state, that of what its key adds to the next one, and the tile's decay."""
    begin_program(PDL)
    start, count, _, _, tile = load_tile(tiles)
    head, token = tl.program_id(1), tile * SIZE + tl.arange(0, SIZE)
    exists, row = token < count, start + token
    i, j = columns_in_parts(KEY_BLOCK, WIDTH), columns_in_parts(VALUE_BLOCK, WIDTH)
    in_key, in_value = exists[None, :, None] & (i < KEY_DIM), exists[None, :, None] & (j < VALUE_DIM)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    turned = convolved + row[None, :, None] * (2 * keys + values)
    own_query = turned + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    key = tl.load(own_query + keys, mask=in_key, other=0.0)
    of_key = inverse_lengths(key)
    beta, step = gates_of(gates, gates_stride, log_decay, dt_bias, row, head, exists, VALUE_HEADS)
    sums = tl.cumsum(step, axis=0)
    total = last_of(sums, count - tile * SIZE, SIZE)
    decays = decays_of(sums, SIZE) * of_key[None, :]
    line, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * VALUE_HEADS + head

    query = tl.load(own_query, mask=in_key, other=0.0)
    of_query = inverse_lengths(query) * QUERY_SCALE
    scores = product_of_parts(query, tl.trans(key, 0, 2, 1)) * decays * of_query[:, None]
    tl.store(scores_out + place[:, None] * SIZE + column, scores, mask=exists[:, None])
    tl.store(factors_out + place * 3, of_query * tl.exp(sums), mask=exists)
    tl.store(factors_out + place * 3 + 1, of_key * tl.exp(total - sums), mask=exists)
    tl.store(factors_out + place * 3 + 2, tl.exp(total + tl.zeros_like(sums)), mask=exists)

    alike = product_of_parts(key, tl.trans(key, 0, 2, 1))
    inverse = inverse_of(tl.where(line > column, alike * decays * (beta * of_key)[:, None], 0.0), SIZE)
    of_state = product_with_parts(inverse * (beta * tl.exp(sums) * of_key)[None, :], key)
    tl.store(of_state_out + place[None, :, None] * KEY_DIM + i, of_state, in_key)
    value = tl.load(turned + 2 * keys + head * VALUE_DIM + j, mask=in_value, other=0.0)
    value = product_with_parts(inverse * beta[None, :], value)
    tl.store(values_out + place[None, :, None] * VALUE_DIM + j, value, in_value)


@jit
def scan_tiles_kernel(
    convolved, values_in, of_state_in, scores_in, factors_in, states, out, chunks, slot_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: VALUES columns of the state of one value head, through all tiles of a chunk.

    Products are of what memory holds, and their results are multiplied by factors: an operand that is computed takes
    registers from the time that it is loaded."""
    begin_program(PDL)
    start, count, slot, is_fresh, _ = load_tile(chunks)
    head = tl.program_id(1)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    # fmt: off
    i, j, own, inside, state = load_state(
        states, slot, slot_stride, is_fresh, head, KEY_DIM, VALUE_DIM, KEY_BLOCK, WIDTH, VALUES)
    # fmt: on
    token = tl.arange(0, SIZE)
    in_turned = token[None, :, None] * (2 * keys + values) + i
    in_keys = token[None, :, None] * (VALUE_HEADS * KEY_DIM) + i
    in_values = token[:, None] * values + j[None, :]
    for first in range(0, count, SIZE):
        exists, row = token < count - first, start + first
        in_key = exists[None, :, None] & (i < KEY_DIM)
        in_value = exists[:, None] & (j < VALUE_DIM)[None, :]
        place = row * VALUE_HEADS + head
        value = tl.load(values_in + place * VALUE_DIM + in_values, mask=in_value, other=0.0)
        of_state = tl.load(of_state_in + place * KEY_DIM + in_keys, mask=in_key, other=0.0)
        change = value - product_of_parts(of_state, state)
        own_query = convolved + row * (2 * keys + values) + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + in_turned
        query = tl.load(own_query, mask=in_key, other=0.0)
        factor = factors_in + (place + token * VALUE_HEADS) * 3
        read = product_of_parts(query, state) * tl.load(factor, mask=exists, other=0.0)[:, None]
        of_tile = scores_in + place * SIZE + (token * (VALUE_HEADS * SIZE))[:, None] + token[None, :]
        scores = tl.load(of_tile, mask=exists[:, None], other=0.0)
        tl.store(out + place * VALUE_DIM + in_values, read + product(scores, change), mask=in_value)
        key = tl.load(own_query + keys, mask=in_key, other=0.0)
        left = change * tl.load(factor + 1, mask=exists, other=0.0)[:, None]
        state = added_product(tl.load(factors_in + place * 3 + 2) * state, key, left)
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
    size = _TILE if kind.key_dim <= _WIDE_KEYS else _TILE // 2
    scores = torch.empty((num_tokens, heads, size), dtype=torch.float32, device=device)
    factors = torch.empty((num_tokens, heads, 3), dtype=torch.float32, device=device)
    recurrent = factors if states is None else states.recurrent  # without states nothing is read or written there
    assert states is None or recurrent[0].is_contiguous(), "a slot is contiguous"
    blocks = scan_blocks(kind, _COLUMNS)
    sizes = {
        "KEY_HEADS": kind.num_key_heads, "VALUE_HEADS": heads, "KEY_DIM": kind.key_dim, "VALUE_DIM": width,
        "SIZE": size, "KEY_BLOCK": blocks["KEY_BLOCK"], "WIDTH": blocks["WIDTH"], "num_warps": _WARPS,
        **dependent_launch(device),
    }  # fmt: skip
    conv_chunks(mixed, rule.conv, states, chunks, convolved)
    tiles, whole = (tile_table(chunks, one, states, device) for one in (size, None))
    solve_tiles_kernel[(len(tiles), heads)](
        convolved, gates, rule.decay, rule.dt_bias, values, of_state, scores, factors, tiles, gates.stride(0),
        VALUE_BLOCK=blocks["VALUE_BLOCK"], QUERY_SCALE=kind.key_dim**-0.5, **sizes,
    )  # fmt: skip
    scan_tiles_kernel[(len(whole), heads, triton.cdiv(width, blocks["VALUES"]))](
        convolved, values, of_state, scores, factors, recurrent, attended, whole, recurrent.stride(0),
        VALUES=blocks["VALUES"], num_stages=_STAGES, **sizes,
    )  # fmt: skip
    norm_outputs_kernel[(triton.cdiv(num_tokens, _NORMED), heads)](
        attended, mixed, rule.norm, out, num_tokens, mixed.stride(0), rule.eps,
        CHANNELS=kind.num_channels, VALUE_HEADS=heads, VALUE_DIM=width, VALUE_BLOCK=blocks["VALUE_BLOCK"],
        TOKENS=_NORMED, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return out
