"""Elementwise operations, in one pass and with one rounding: gate, gate_heads, embed, cap_logits.

The Triton twins of ``layer_ops``.  Program (i, j) makes elements [j * BLOCK, (j + 1) * BLOCK) of row i.
"""

from typing import Any

import torch
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_row_block, launch_row_blocks
from tp_engine.kernels.jit import jit
from tp_engine.model_config.head_gate import GateFunction
from tp_engine.model_config.mlp import Activation

# Values of ``Activation.code``; 2 is "swiglu_clamped".
_SILU, _GELU_TANH, RELU2, _SILU_CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
_TWO_ROOTS_OF_TWO_OVER_PI = tl.constexpr(1.5957691216057308)
_TWO_LOG2_E = tl.constexpr(2 * 1.4426950408889634)
# tanh adds up four terms of its series below this, and divides exponentials above: each is exact to float32 there.
_SMALL = tl.constexpr(0.2)


@jit
def gated(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activated ``gate`` times ``up``, both float32.  NaN stays NaN.

    With tanh: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), which neither overflows nor cancels.
    """
    if KIND == _SILU:
        product = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == _GELU_TANH:
        twice = (gate + 0.044715 * gate * gate * gate) * _TWO_ROOTS_OF_TWO_OVER_PI
        product = gate / (1.0 + tl.exp(-twice)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if KIND == _SILU_CLAMPED:
            product = up * (gate / (1.0 + tl.exp(-gate)))
        else:
            product = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    return product


@jit
def squared_relu(up):
    """The activation of an MLP without a gate, KIND == RELU2; float32, NaN stays NaN."""
    kept = tl.where(up < 0, 0.0, up)
    return kept * kept


@jit
def gate_kernel(
    gate_up, out, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK elements of one token."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    row = gate_up + token * stride
    product = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
        product = gated(product, up, KIND, ALPHA, LIMIT)
    else:
        product = squared_relu(product)
    tl.store(out + token * SIZE + column, product.to(out.dtype.element_ty), mask=inside)


def gate_triton(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``layer_ops.gate``; the rows may be slices of wider ones."""
    num_tokens, width = gate_up.shape
    assert width % activation.num_parts == 0 and gate_up.stride(1) == 1, (gate_up.shape, gate_up.stride())
    size = width // activation.num_parts
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    arguments = gate_up, out, gate_up.stride(0)
    launch_row_blocks(gate_kernel, out, num_tokens, size, *arguments, **activation_constants(activation))
    return out


def activation_constants(activation: Activation | None) -> dict[str, Any]:
    """The constants of ``gated`` and its callers; for None, those of a kernel that applies nothing."""
    if activation is None:
        return {"GATED": False, "KIND": -1, "ALPHA": 0.0, "LIMIT": 0.0}
    constants = {"KIND": activation.code, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return {"GATED": activation.num_parts == 2, **constants}


@jit
def gate_heads_kernel(
    x, gate, x_stride, gate_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, IS_SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK elements of one token; DIM elements share one of the gate's."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    place = x + token * x_stride + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(gate + token * gate_stride + column // DIM, mask=inside, other=0.0).to(tl.float32)
    if IS_SOFTPLUS:
        product = values * tl.where(weights > 20.0, weights, tl.log(1.0 + tl.exp(tl.minimum(weights, 20.0))))
    else:
        product = values / (1.0 + tl.exp(-weights))
    tl.store(place, product.to(x.dtype.element_ty), mask=inside)


def gate_heads_triton(x: torch.Tensor, gate: torch.Tensor, function: GateFunction = "sigmoid") -> None:
    """``layer_ops.gate_heads``; the rows of both may be slices of wider ones."""
    (num_tokens, size), count = x.shape, gate.shape[1]
    assert size % count == 0 and x.stride(1) == gate.stride(1) == 1, (x.shape, x.stride(), gate.shape, gate.stride())
    constants = {"DIM": size // count, "IS_SOFTPLUS": function == "softplus"}
    arguments = x, gate, x.stride(0), gate.stride(0)
    launch_row_blocks(gate_heads_kernel, x, num_tokens, size, *arguments, **constants)


@jit
def embed_kernel(
    token_ids, weight, out,
    FIRST_ID: tl.constexpr, NUM_IDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK of the SIZE elements of a token's row; ``weight`` has NUM_IDS rows from FIRST_ID on."""
    token, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    row = tl.load(token_ids + token).to(tl.int64) - FIRST_ID
    is_held = (row >= 0) & (row < NUM_IDS)
    values = tl.load(weight + row * SIZE + column, mask=inside & is_held, other=0.0)
    if SCALE != 1:
        values = (values.to(tl.float32) * SCALE).to(values.dtype)
    tl.store(out + token * SIZE + column, values, mask=inside)


def embed_triton(
    token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0
) -> torch.Tensor:
    """``layer_ops.embed``; ids outside of ``weight`` give zeros, even if ``first_id`` is None."""
    num_ids, size = weight.shape
    assert weight.is_contiguous() and token_ids.is_contiguous(), (weight.stride(), token_ids.stride())
    out = torch.empty((len(token_ids), size), dtype=weight.dtype, device=weight.device)
    constants: dict[str, Any] = {"FIRST_ID": first_id or 0, "NUM_IDS": num_ids, "SCALE": scale}
    launch_row_blocks(embed_kernel, out, len(token_ids), size, token_ids, weight, out, **constants)
    return out


@jit
def cap_logits_kernel(
    logits, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr
):
    """One program: up to BLOCK logits of one row; CAP 0: no bound."""
    row, column, inside = begin_row_block(SIZE, BLOCK, PDL)
    place = logits + row * stride + column
    values = capped(tl.load(place, mask=inside, other=0.0).to(tl.float32), SCALE, CAP)
    tl.store(place, values.to(logits.dtype.element_ty), mask=inside)


@jit
def capped(values, SCALE: tl.constexpr, CAP: tl.constexpr):
    """float32 times SCALE, bounded by CAP; 0: no bound."""
    values *= SCALE
    if CAP > 0:
        values = CAP * tanh(values / CAP)
    return values


def cap_logits_triton(logits: torch.Tensor, scale: float, cap: float | None) -> None:
    """``layer_ops.cap_logits``; the rows of ``logits`` may be slices of wider ones."""
    num_rows, width = logits.shape
    assert logits.stride(1) == 1, (logits.shape, logits.stride())
    launch_row_blocks(cap_logits_kernel, logits, num_rows, width, logits, logits.stride(0), SCALE=scale, CAP=cap or 0.0)


@jit
def tanh(x):
    """The hyperbolic tangent in float32, within a few units in the last place; nothing overflows, and NaN stays NaN."""
    magnitude = tl.abs(x)
    shrunk = tl.exp2(magnitude * -_TWO_LOG2_E)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    return tl.where(magnitude < _SMALL, near, tl.where(x < 0, -far, far))
