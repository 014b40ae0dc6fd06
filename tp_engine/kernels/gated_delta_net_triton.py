"""A decode step of the gated delta rule: the Triton twin of ``gated_delta_net.gated_delta_net_decode``, in two
launches.

::

    causal_conv_kernel               row x channels    mixed, kept inputs -> q, k, v after SiLU (float32), kept inputs
    gated_delta_net_decode_kernel    row x value head  q, k, v, gates, z, state -> output, next state

There are two because value heads share the convolved query and key of their key head, whose kept inputs one program
updates.  A state is read and written once: a program holds all of it, so that the output's root mean square needs no
third launch.  Padding rows read and write no state.

The programs of a row with draft rows take their tokens too, in order, and write the state after each to its slot; those
of draft rows do nothing.
"""

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.kernels.gated_delta_net import LENGTH_EPS, DeltaRule
from tp_engine.kernels.jit import jit
from tp_engine.kernels.recurrent import LayerStates
from tp_engine.kernels.recurrent_triton import causal_conv, load_run, matrix_blocks, row_of, silu, softplus

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)


@jit
def gated_norm(attended, mean_square, gain, z, eps):
    """Heads' outputs over their root mean square, times ``gain`` and SiLU(z)."""
    return attended * tl.rsqrt(mean_square + eps) * gain * silu(z.to(tl.float32))


@jit
def gates_of(gates, gates_stride, log_decay, dt_bias, row, head, exists, VALUE_HEADS: tl.constexpr):
    """beta and g of a head at ``row``, 0 where no row ``exists``."""
    own = gates + row * gates_stride + head
    b = tl.load(own, mask=exists, other=0.0).to(tl.float32)
    a = tl.load(own + VALUE_HEADS, mask=exists, other=0.0).to(tl.float32)
    beta, step = 1.0 / (1.0 + tl.exp(-b)), tl.load(log_decay + head) * softplus(a + tl.load(dt_bias + head))
    return tl.where(exists, beta, 0.0), tl.where(exists, step, 0.0)


@jit
def gated_delta_net_decode_kernel(
    convolved, mixed, gates, log_decay, dt_bias, weight, states, slots, runs, out, mixed_stride, gates_stride,
    slot_stride, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, QUERY_SCALE: tl.constexpr, HAS_RUNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the state (KEY_DIM, VALUE_DIM) of one value head of one row, and of its draft rows."""
    let_next_begin(PDL)
    i, j = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    gain = tl.load(weight + j, mask=in_value, other=0.0)
    wait_for_previous(PDL)
    own, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys: tl.constexpr = KEY_HEADS * KEY_DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    place = states + head * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    first, count = load_run(runs, own, HAS_RUNS)
    slot = tl.load(slots + own).to(tl.int64)
    state = tl.load(place + slot * slot_stride, mask=inside & (slot >= 0) & (count >= 0), other=0.0)
    step = tl.load(log_decay + head)
    for token in range(count + 1):
        row = row_of(token, own, first)
        slot = tl.load(slots + row).to(tl.int64)
        turned = convolved + row * (2 * keys + values)
        own_key = turned + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
        query = tl.load(own_key, mask=in_key, other=0.0)
        key = tl.load(own_key + keys, mask=in_key, other=0.0)
        value = tl.load(turned + 2 * keys + head * VALUE_DIM + j, mask=in_value, other=0.0)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + _LENGTH_EPS) * QUERY_SCALE
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + _LENGTH_EPS)
        b = tl.load(gates + row * gates_stride + head).to(tl.float32)
        a = tl.load(gates + row * gates_stride + VALUE_HEADS + head).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b))
        decay = tl.exp(step * softplus(a + tl.load(dt_bias + head)))

        state *= decay
        change = (value - tl.sum(state * key[:, None], axis=0)) * beta
        state += key[:, None] * change[None, :]
        tl.store(place + slot * slot_stride, state, mask=inside & (slot >= 0))
        attended = tl.sum(state * query[:, None], axis=0)
        z = mixed + row * mixed_stride + 2 * keys + values + head * VALUE_DIM + j
        square = tl.sum(attended * attended, axis=0) / VALUE_DIM
        result = gated_norm(attended, square, gain, tl.load(z, mask=in_value, other=0.0), eps)
        tl.store(out + row * values + head * VALUE_DIM + j, result.to(out.dtype.element_ty), mask=in_value)


def gated_delta_net_decode_triton(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rule: DeltaRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gated_delta_net.gated_delta_net_decode``; rows of ``mixed`` and ``gates`` may lie apart, and padding changes no
    slot at all."""
    kind, num_rows = rule.kind, len(mixed)
    channels, heads, width = kind.num_channels, kind.num_value_heads, kind.value_dim
    assert mixed.shape[1] == channels + heads * width and gates.shape[1] == 2 * heads, (mixed.shape, gates.shape)
    assert mixed.stride(1) == gates.stride(1) == 1, (mixed.stride(), gates.stride())
    assert states.recurrent[0].is_contiguous(), "a slot is contiguous"
    out = torch.empty((num_rows, heads * width), dtype=mixed.dtype, device=mixed.device)
    if num_rows == 0:
        return out
    convolved = torch.empty((num_rows, channels), dtype=torch.float32, device=mixed.device)
    has_runs = runs is not None
    causal_conv(mixed, rule.conv, states, slots, runs, convolved)
    blocks = matrix_blocks(kind)
    gated_delta_net_decode_kernel[(num_rows, heads)](
        convolved, mixed, gates, rule.decay, rule.dt_bias, rule.norm, states.recurrent, slots, runs, out,
        mixed.stride(0), gates.stride(0), states.recurrent.stride(0), rule.eps,
        KEY_HEADS=kind.num_key_heads, VALUE_HEADS=heads, KEY_DIM=kind.key_dim, VALUE_DIM=width,
        QUERY_SCALE=kind.key_dim**-0.5, HAS_RUNS=has_runs, **blocks, **dependent_launch(mixed.device),
    )  # fmt: skip
    return out
