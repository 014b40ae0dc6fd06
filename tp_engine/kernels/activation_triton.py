"""The product of a gated MLP's two halves in one pass, rounded once: the Triton twin of ``activation``.

::

    gate_up (N, 2 * size) = [ gate | up ]        program (i, j): elements [j * BLOCK, (j + 1) * BLOCK) of token i
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import dependent_launch, let_next_begin, wait_for_previous
from tp_engine.model_config.activation import Activation

_BLOCK = 1024
# As Activation.code counts them; 3 is "relu2".
_SILU, _GELU_TANH, _SWIGLU_CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TWO_ROOTS_OF_TWO_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit  # type: ignore[untyped-decorator]
def gated(  # type: ignore[no-untyped-def]
    gate,
    up,
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
):
    """The activated ``gate`` times ``up``, both float32.  NaN stays NaN.

    With tanh: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), which neither overflows nor cancels.
    """
    if KIND == _SILU:
        product = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == _GELU_TANH:
        twice = (gate + 0.044715 * gate * gate * gate) * _TWO_ROOTS_OF_TWO_OVER_PI
        product = gate / (1.0 + tl.exp(-twice)) * up
    elif KIND == _SWIGLU_CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        product = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        gate = tl.where(gate < 0, 0.0, gate)
        product = gate * gate * up
    return product


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    stride,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One program: up to BLOCK elements of one token."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = gate_up + token * stride
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    product = gated(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out + token * SIZE + column, product.to(out.dtype.element_ty), mask=inside)


def gate_triton(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``activation.gate``; the rows may be slices of wider ones."""
    num_tokens, double = gate_up.shape
    assert double % 2 == 0 and gate_up.stride(1) == 1, (gate_up.shape, gate_up.stride())
    size = double // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        block = min(int(triton.next_power_of_2(size)), _BLOCK)
        gate_kernel[(num_tokens, triton.cdiv(size, block))](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            **activation_constants(activation),
            **dependent_launch(gate_up.device),
        )
    return out


def activation_constants(activation: Activation | None) -> dict[str, float]:
    """What ``gated`` is compiled for; None where a kernel does not call it."""
    if activation is None:
        return {"KIND": 0, "ALPHA": 0.0, "LIMIT": 0.0}
    return {"KIND": activation.code, "ALPHA": activation.alpha, "LIMIT": activation.limit}
