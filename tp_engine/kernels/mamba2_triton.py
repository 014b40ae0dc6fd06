"""Mamba2's state space layer: the Triton twins of ``mamba2.mamba2_decode`` and ``mamba2_prefill``, in two launches
each, and of the grouped norm after them.

::

    causal_conv_kernel     row x channels      mixed, kept inputs -> C, B, x after SiLU (float32), kept inputs
    mamba2_decode_kernel   row x value head    C, B, x, z, dt, state -> output, next state

    conv_chunks_kernel     tile x channels     the convolution of prompts, all chunks of a step at once
    mamba2_scan_kernel     chunk x value head  tile after tile: outputs, and the next state

A decode's program holds all of a state, which is read and written once.  Padding rows read and write no state.  The
programs of a row with draft rows take their tokens too, in order, and write the state after each to its slot; those of
draft rows do nothing.
"""

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import (
    begin_program,
    dependent_launch,
    let_next_begin,
    wait_for_previous,
)
from tp_engine.kernels.jit import jit
from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.recurrent_triton import (
    added_product,
    causal_conv,
    conv_chunks,
    decays_of,
    last_of,
    load_run,
    load_state,
    load_tile,
    matrix_blocks,
    product,
    product_of_parts,
    row_of,
    scan_blocks,
    silu,
    softplus,
    tile_table,
)

_ELEMENTS_PER_THREAD, _MAX_WARPS = 8, 16
# Of a program of a chunk: tokens of a tile, and columns of a state, half as many where keys are wider.  More of them
# spill.
_TILE, _COLUMNS, _WIDE_KEYS = 16, 32, 128
_SCAN_WARPS, _SCAN_STAGES = 8, 2


@jit
def mamba2_decode_kernel(
    convolved, mixed, log_decay, dt_bias, skip, states, slots, runs, out, mixed_stride, slot_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, HAS_RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the state (KEY_DIM, VALUE_DIM) of one value head of one row, and of its draft rows."""
    let_next_begin(PDL)
    own, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    factor, bias, share = tl.load(log_decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    wait_for_previous(PDL)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    place = states + head * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    first, count = load_run(runs, own, HAS_RUNS)
    slot = tl.load(slots + own).to(tl.int64)
    state = tl.load(place + slot * slot_stride, mask=inside & (slot >= 0) & (count >= 0), other=0.0)
    for token in range(count + 1):
        row = row_of(token, own, first)
        slot = tl.load(slots + row).to(tl.int64)
        turned = convolved + row * (2 * keys + values)
        own_query = turned + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
        query = tl.load(own_query, mask=in_key, other=0.0)
        key = tl.load(own_query + keys, mask=in_key, other=0.0)
        value = tl.load(turned + 2 * keys + head * VALUE_DIM + j, mask=in_value, other=0.0)
        gates = mixed + row * mixed_stride + 2 * keys + values
        step = softplus(tl.load(gates + values + head).to(tl.float32) + bias)
        state = state * tl.exp(factor * step) + key[:, None] * (value * step)[None, :]
        tl.store(place + slot * slot_stride, state, mask=inside & (slot >= 0))
        attended = tl.sum(state * query[:, None], axis=0) + share * value
        gate = silu(tl.load(gates + head * VALUE_DIM + j, mask=in_value, other=0.0).to(tl.float32))
        tl.store(out + row * values + head * VALUE_DIM + j, attended * gate, mask=in_value)


def mamba2_decode_triton(
    mixed: torch.Tensor,
    rule: Mamba2Rule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """``mamba2.mamba2_decode``; rows of ``mixed`` may lie apart, and padding changes no slot at all."""
    convolved, out = _outputs(mixed, rule)
    if not len(mixed):
        return out
    kind = rule.kind
    assert states.recurrent[0].is_contiguous(), "a slot is contiguous"
    causal_conv(mixed, rule.conv, states, slots, runs, convolved, bias=rule.conv_bias)
    mamba2_decode_kernel[(len(mixed), kind.num_value_heads)](
        convolved, mixed, rule.decay, rule.dt_bias, rule.skip, states.recurrent, slots, runs, out, mixed.stride(0),
        states.recurrent.stride(0),
        KEY_HEADS=kind.num_key_heads, VALUE_HEADS=kind.num_value_heads, KEY_DIM=kind.key_dim, VALUE_DIM=kind.value_dim,
        HAS_RUNS=runs is not None, **matrix_blocks(kind), **dependent_launch(mixed.device),
    )  # fmt: skip
    return out


@jit
def mamba2_scan_kernel(
    convolved, mixed, log_decay, dt_bias, skip, states, out, chunks, mixed_stride, slot_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: VALUES columns of the state of one value head, through a chunk, SIZE tokens at a time."""
    begin_program(PDL)
    start, count, slot, is_fresh, _ = load_tile(chunks)
    head = tl.program_id(1)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    # fmt: off
    i, j, own, inside, state = load_state(
        states, slot, slot_stride, is_fresh, head, KEY_DIM, VALUE_DIM, KEY_BLOCK, WIDTH, VALUES)
    # fmt: on
    factor, bias, share = tl.load(log_decay + head), tl.load(dt_bias + head), tl.load(skip + head)
    token = tl.arange(0, SIZE)
    in_turned = token[None, :, None] * (2 * keys + values) + i
    column = head * VALUE_DIM + j[None, :]
    for first in range(0, count, SIZE):
        exists, row = token < count - first, start + first
        in_key = exists[None, :, None] & (i < KEY_DIM)
        in_value = exists[:, None] & (j < VALUE_DIM)[None, :]
        turned = convolved + row * (2 * keys + values)
        own_query = turned + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + in_turned
        query = tl.load(own_query, mask=in_key, other=0.0)
        key = tl.load(own_query + keys, mask=in_key, other=0.0)
        own_value = turned + 2 * keys + token[:, None] * (2 * keys + values) + column
        x = tl.load(own_value, mask=in_value, other=0.0)
        gates = mixed + row * mixed_stride + 2 * keys + values + token * mixed_stride
        dt = tl.load(gates + values + head, mask=exists, other=0.0).to(tl.float32)
        step = tl.where(exists, softplus(dt + bias), 0.0)
        sums = tl.cumsum(factor * step, axis=0)
        last = last_of(sums, count - first, SIZE)
        value = x * step[:, None]
        scores = product_of_parts(query, tl.trans(key, 0, 2, 1)) * decays_of(sums, SIZE)
        attended = product_of_parts(query, state) * tl.exp(sums)[:, None] + product(scores, value) + share * x
        gate = silu(tl.load(gates[:, None] + column, mask=in_value, other=0.0).to(tl.float32))
        own_out = out + row * values + token[:, None] * values + column
        tl.store(own_out, attended * gate, mask=in_value)
        state = added_product(tl.exp(last) * state, key, value * tl.exp(last - sums)[:, None])
    tl.store(own, state, mask=inside)


def mamba2_prefill_triton(
    mixed: torch.Tensor, rule: Mamba2Rule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """``mamba2.mamba2_prefill``; rows of ``mixed`` may lie apart."""
    convolved, out = _outputs(mixed, rule)
    if not chunks:
        return out
    conv_chunks(mixed, rule.conv, states, chunks, convolved, bias=rule.conv_bias)
    kind, whole = rule.kind, tile_table(chunks, None, states, mixed.device)
    recurrent = out if states is None else states.recurrent  # without states nothing is read or written there
    assert states is None or recurrent[0].is_contiguous(), "a slot is contiguous"
    blocks = scan_blocks(kind, _COLUMNS if kind.key_dim <= _WIDE_KEYS else _COLUMNS // 2)
    mamba2_scan_kernel[(len(whole), kind.num_value_heads, triton.cdiv(kind.value_dim, blocks["VALUES"]))](
        convolved, mixed, rule.decay, rule.dt_bias, rule.skip, recurrent, out, whole, mixed.stride(0),
        recurrent.stride(0),
        KEY_HEADS=kind.num_key_heads, VALUE_HEADS=kind.num_value_heads, KEY_DIM=kind.key_dim, VALUE_DIM=kind.value_dim,
        KEY_BLOCK=blocks["KEY_BLOCK"], WIDTH=blocks["WIDTH"], VALUES=blocks["VALUES"], SIZE=_TILE,
        num_warps=_SCAN_WARPS, num_stages=_SCAN_STAGES, **dependent_launch(mixed.device),
    )  # fmt: skip
    return out


def _outputs(mixed: torch.Tensor, rule: Mamba2Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the convolved inputs (N, channels), and for the result (N, VH DV), both float32."""
    kind, heads = rule.kind, rule.kind.num_value_heads
    assert mixed.shape[1] == kind.num_channels + heads * (kind.value_dim + 1), mixed.shape
    assert mixed.stride(1) == 1, mixed.stride()
    convolved = torch.empty((len(mixed), kind.num_channels), dtype=torch.float32, device=mixed.device)
    return convolved, convolved.new_empty((len(mixed), heads * kind.value_dim))


@jit
def norm_groups_kernel(
    x, weight, squares, out, eps, group_size,
    NUM_GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SQUARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the WIDTH elements of one group of a row."""
    let_next_begin(PDL)
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + number % NUM_GROUPS * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + number * WIDTH + column, mask=inside, other=0.0)
    total = tl.load(squares + number) if HAS_SQUARES else tl.sum(values * values, axis=0)
    result = values * tl.rsqrt(total / group_size + eps) * gain
    tl.store(out + number * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@jit
def group_squares_kernel(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: one group of a row."""
    let_next_begin(PDL)
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    values = tl.load(x + number * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(out + number, tl.sum(values * values, axis=0))


def group_squares_triton(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``mamba2.group_squares``."""
    assert x.is_contiguous() and x.dtype == torch.float32, (x.stride(), x.dtype)
    out = x.new_empty((len(x), num_groups))
    if len(x):
        group_squares_kernel[(out.numel(),)](x, out, **_group_sizes(x, num_groups))
    return out


def norm_groups_triton(
    x: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float, squares: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """``mamba2.norm_groups``."""
    assert x.is_contiguous() and x.dtype == torch.float32, (x.stride(), x.dtype)
    assert squares is None or squares.is_contiguous(), squares.stride()
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if len(x):
        norm_groups_kernel[(len(x) * num_groups,)](
            x, weight, squares, out, eps, float(group_size), NUM_GROUPS=num_groups, HAS_SQUARES=squares is not None,
            **_group_sizes(x, num_groups),
        )  # fmt: skip
    return out


def _group_sizes(x: torch.Tensor, num_groups: int) -> dict[str, int | bool]:
    """Constants of a launch, and its number of warps."""
    width = x.shape[1] // num_groups
    block = int(triton.next_power_of_2(width))
    num_warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)
    return {"WIDTH": width, "BLOCK": block, "num_warps": num_warps, **dependent_launch(x.device)}
